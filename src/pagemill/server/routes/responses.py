"""`/v1/responses`: OpenAI's newer API. A response is a chat completion that is kept, as a session of one turn."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from pagemill.errors import InvalidRequestError, PagemillError, ResponseNotFoundError, shown
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.outputs import LogprobsOfPosition, RequestOutput
from pagemill.frontend.request_state import RequestState, ResponseTurn
from pagemill.lora_request import LoRARequest
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.errors import error_response
from pagemill.server.protocol.events import until_disconnect
from pagemill.server.protocol.response_items import CallItem, CallOutput, OutputReasoning, listed_items
from pagemill.server.protocol.responses import (
    IncompleteDetails,
    InputTokenCount,
    InputTokensDetails,
    ItemList,
    OutputTokensDetails,
    ResponseDeleted,
    ResponseFailure,
    ResponseInput,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
)
from pagemill.server.routes.call import respond
from pagemill.server.routes.chat import ChatCall, options_for
from pagemill.server.routes.known_query import known_query
from pagemill.server.routes.models import ServedModels
from pagemill.server.routes.response_logprobs import ReadLogprobs
from pagemill.server.routes.response_output import ResponseOutput
from pagemill.server.routes.tokens import encode_conversation
from pagemill.sessions.record import RESPONSE, SessionRecord, is_response
from pagemill.text.answer.reader import AnswerPart
from pagemill.text.detokenizer import Detokenizer

STATUSES: dict[str | None, Any] = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
"""What a response is, by why its answer ended."""
INCLUDE = ("include", "include[]")
OF_RETRIEVED = (*INCLUDE, "include_obfuscation", "starting_after")
"""Query parameters of OpenAI's that have no effect here."""


class ResponseCall(ChatCall):
    """One response."""

    ID, END = RESPONSE, ""

    def __init__(
        self, llm: AsyncLLM, asked: ResponsesRequest, model: str, tenant: str, lora_request: LoRARequest | None
    ) -> None:
        super().__init__(llm, asked.chat, model, tenant, lora_request)
        self._asked = asked

    async def _start(self) -> None:
        self._tokenizer = await self._llm.tokenizer()
        await super()._start()

    async def _submit(self, params: SamplingParams | BeamSearchParams) -> None:
        assert isinstance(params, SamplingParams)
        asked, chat = self._asked, self.request
        check = partial(_check_outputs, asked.input)
        turn = ResponseTurn(asked.previous_response_id, asked.instructions, asked.keep, check, self._ended)
        session = self._llm.session(self._id, cache_salt=chat.cache_salt or "", tenant=self._tenant)
        stream = await session.submit_chat(
            *(chat.for_template(), params, self._id),
            priority=chat.priority,
            max_tool_calls=chat.max_tool_calls,
            calls_only=chat.forces_a_call,
            on_prompt=partial(self._hold, params),
            response=turn,
            lora_request=self._lora_request,
            tools=self._tools,
            **self._options,
        )
        self._streams.append(stream)
        self._answer_reader, self._num_read = self._reader(0), 0
        skip = params.skip_special_tokens
        detokenizer = Detokenizer(self._tokenizer, stream.prompt_token_ids, skip_special_tokens=skip)
        self._read_logprobs = ReadLogprobs(self._answer_reader, detokenizer) if chat.logprobs else None
        self._output = ResponseOutput(self._id, streaming=bool(asked.stream))
        for name in ("created", "in_progress"):
            self._output.tell(f"response.{name}", response=self._so_far("in_progress"))

    def _read(self, request: RequestState) -> None:
        """Takes what is new of the answer."""
        output = request.sequences[0].output
        if self._read_logprobs is not None:
            self._add_parts(self._read_logprobs.read(output))
            return
        text, self._num_read = output.text[self._num_read :], len(output.text)
        self._output.add(self._answer_reader.add(text))

    def _add_parts(self, parts: Iterator[tuple[AnswerPart, list[LogprobsOfPosition]]]) -> None:
        for part, positions in parts:
            logprobs = self._logprobs(positions)
            self._output.add(part, () if logprobs is None else logprobs.content)

    def _ended(self, request: RequestState) -> dict[str, Any]:
        """Completes the response, and returns what is kept of it beside its conversation."""
        output = request.sequences[0].output
        if self._read_logprobs is None:
            self._read(request)
            self._output.add(self._answer_reader.finish())
        else:
            self._add_parts(self._read_logprobs.finish(output))
        self._output.close("completed" if output.finish_reason == "stop" else "incomplete")
        reasoning = [item.content[0].text for item in self._output.items if isinstance(item, OutputReasoning)]
        prompt, completion = len(request.prompt_token_ids), len(output.token_ids)
        thought = sum(len(self._tokenizer.encode(text, add_special_tokens=False)) for text in reasoning)
        usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=request.num_cached_tokens),
            output_tokens=completion,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=thought),
            total_tokens=prompt + completion,
        )
        self._response = self._so_far(STATUSES[output.finish_reason], usage=usage)
        body = self._response.model_dump(mode="json", by_alias=True)
        for item in body["output"] if self._read_logprobs is not None else ():
            for part in item.get("content", ()):
                part |= {"logprobs": []} if "logprobs" in part else {}
        return {"body": body, "input": listed_items(self._asked.input, self._id)}

    def _whole(self) -> bytes:
        return self._response.model_dump_json(by_alias=True).encode()

    def _parts(self, position: int, output: RequestOutput) -> str:
        if not output.finished:
            self._read(self._streams[0].request)
        return "".join(self._output.take_events())

    def _last_parts(self) -> list[str]:
        status = self._response.status
        name = "incomplete" if status == "cancelled" else status
        self._output.tell(f"response.{name}", response=self._response)
        return self._output.take_events()

    def _failure(self, error: PagemillError) -> str:
        body = error_response(error).error
        failure = ResponseFailure(code=body.code or "server_error", message=body.message)
        self._output.close("incomplete")
        self._output.tell("response.failed", response=self._so_far("failed", error=failure))
        return "".join(self._output.take_events())

    def _so_far(self, status: Any, **more: Any) -> ResponseObject:
        cut = IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
        return ResponseObject(
            id=self._id,
            created_at=self._head["created"],
            model=self._head["model"],
            status=status,
            incomplete_details=cut,
            output=self._output.items,
            **self._asked.repeated(),
            **more,
        )


def _check_outputs(items: Iterable[Any], begun: SessionRecord) -> None:
    """Raises `InvalidRequestError` for the output of a call that is neither among the items nor in the conversation
    before them."""
    calls = {item.call_id for item in items if isinstance(item, CallItem)}
    calls.update(call["id"] for message in begun.messages or () for call in message.get("tool_calls", ()))
    if begun.response is not None:  # beside a call that was cut, messages have none
        calls.update(item["call_id"] for item in begun.response["body"]["output"] if item["type"] == "function_call")
    unknown = next((item.call_id for item in items if isinstance(item, CallOutput) and item.call_id not in calls), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"no tool call found for function call output with call_id {shown(unknown)}; send its function_call as an "
            f"item too, or name the response that has it in previous_response_id",
            param="input",
        )


def no_response(response_id: str) -> ResponseNotFoundError:
    """Returns why something that has another name than responses have is none."""
    return ResponseNotFoundError(f"there is no response {response_id!r:.140}; name one by its id, {RESPONSE}...")


def response_routes(llm: AsyncLLM, served: ServedModels) -> APIRouter:
    """Returns the routes. A response is in the namespace of its tenant and `cache_salt`."""
    routes = APIRouter(prefix="/v1/responses", route_class=BodyRoute)

    async def kept(response_id: str, request: Request, cache_salt: str) -> dict[str, Any]:
        session = llm.session(response_id, cache_salt=cache_salt, tenant=request.state.tenant)
        record = await session.record() if is_response(response_id) else None
        if record is None or record.response is None:
            raise no_response(response_id)
        return record.response

    @routes.post("", response_model=ResponseObject)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answers a conversation through the model's chat template, and keeps the answer unless told not to."""
        return await respond(ResponseCall, llm, served, body, request)

    @routes.post("/input_tokens")
    async def count(body: ResponseInput, request: Request) -> InputTokenCount:
        """Counts the tokens that the prompt of a response would have. They need not fit `max_model_len`."""
        served.name_for(body.model)
        chat, tokenizer = body.chat, await llm.tokenizer()
        check, encode = partial(_check_outputs, body.input), partial(encode_conversation, tokenizer)
        turn = ResponseTurn(body.previous_response_id, body.instructions, False, check, lambda _: {})
        name, salt = f"{RESPONSE}{uuid.uuid4().hex}", chat.cache_salt or ""
        session = llm.session(name, cache_salt=salt, tenant=request.state.tenant)
        try:
            options = options_for(tokenizer.answers, chat)
            work = session.count_chat(chat.for_template(), turn, encode, tools=chat.tools_for_template(), **options)
            return InputTokenCount(input_tokens=await until_disconnect(request.receive, work))
        except PagemillError as error:
            raise chat.in_own_words(error) from None

    @routes.get("/{response_id}", response_model=ResponseObject, dependencies=[known_query(*OF_RETRIEVED)])
    async def retrieve(response_id: str, request: Request, cache_salt: str = "", stream: bool = False) -> Response:
        """Shows a response that was kept."""
        if stream:
            raise InvalidRequestError(
                "a response that was kept is not streamed again; leave stream out", param="stream"
            )
        return JSONResponse((await kept(response_id, request, cache_salt))["body"])

    @routes.delete("/{response_id}", dependencies=[known_query()])
    async def delete(response_id: str, request: Request, cache_salt: str = "") -> ResponseDeleted:
        """Forgets a response. Those that go on from it stay."""
        if not is_response(response_id):
            raise no_response(response_id)
        await llm.session(response_id, cache_salt=cache_salt, tenant=request.state.tenant).delete()
        return ResponseDeleted(id=response_id)

    @routes.get("/{response_id}/input_items", dependencies=[known_query(*INCLUDE, "before")])
    async def input_items(
        response_id: str,
        request: Request,
        cache_salt: str = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ItemList:
        """Lists the items of a response's own input, the last first; not those of responses before it."""
        items = (await kept(response_id, request, cache_salt))["input"]
        items = items if order == "asc" else items[::-1]
        begin = 0
        if after is not None:
            begin = next((at for at, item in enumerate(items, 1) if item["id"] == after), -1)
            if begin < 0:
                raise InvalidRequestError(
                    f"after is {after!r:.140}, which is no item of this input; name one", param="after"
                )
        data = items[begin : begin + limit]
        ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        return ItemList(data=data, first_id=ends[0], last_id=ends[1], has_more=begin + limit < len(items))

    return routes
