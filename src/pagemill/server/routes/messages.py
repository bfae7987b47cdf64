"""`/v1/messages`: Anthropic's API, over the same call that answers chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagemill.errors import PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import size_of
from pagemill.frontend.outputs import CompletionOutput
from pagemill.lora_request import LoRARequest
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.anthropic_errors import AnthropicErrorResponse
from pagemill.server.protocol.errors import anthropic_error_response
from pagemill.server.protocol.events import until_disconnect
from pagemill.server.protocol.messages import (
    ChatOfMessages,
    Conversation,
    Message,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TokenCount,
)
from pagemill.server.routes.call import respond
from pagemill.server.routes.chat import ChatCall, options_for
from pagemill.server.routes.message_output import MessageOutput
from pagemill.server.routes.models import ServedModels
from pagemill.server.routes.tokens import encode_conversation
from pagemill.text.answer.reader import AnswerReader
from pagemill.text.tokenizer import Tokenizer

STOP_REASONS: dict[str | None, StopReason] = {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn"}
"""Why an answer ended that ended neither at a stop sequence nor with calls, by why its sequence did."""


class MessagesCall(ChatCall):
    """One message."""

    ID, END = "msg_", ""

    def __init__(
        self, llm: AsyncLLM, asked: MessagesRequest, model: str, tenant: str, lora_request: LoRARequest | None
    ) -> None:
        super().__init__(llm, asked.chat, model, tenant, lora_request)
        self._output = MessageOutput(streaming=bool(asked.stream), shows_reasoning=asked.chat.include_reasoning)
        self._ending: dict[str, Any] = {}
        """Why the answer ended, once it has."""

    async def _submit(self, params: SamplingParams | BeamSearchParams) -> None:
        """Submits the prompt, for an answer that ends with the context where that holds less than was asked for."""
        assert isinstance(params, SamplingParams)
        (prompt,) = await self._prompts()
        assert isinstance(prompt, Mapping)
        facts, self._asked_tokens = await self._llm.ready(), params.max_tokens or 0
        if len(prompt["prompt_token_ids"]) + self._asked_tokens > min(facts.max_model_len, facts.longest_sequence):
            params.max_tokens = None
        await self._send(prompt, params, self._id)

    def _whole(self) -> bytes:
        (output,) = self._results()[0].outputs
        reader = self._reader(0)
        self._output.add(reader.read(output.text))
        self._output.close()
        return self._message(**self._why_it_ended(output, reader)).model_dump_json().encode()

    def _chunks(self, position: int, new: CompletionOutput) -> Iterator[str]:
        if not self._readers:
            self._readers[0] = self._reader(0)
            self._output.start(self._message())
        reader = self._readers[0]
        for part in (reader.add(new.text), *([reader.finish()] if new.finish_reason else ())):
            self._output.add(part)
        if new.finish_reason:
            self._output.close()
            self._ending = self._why_it_ended(new, reader)
        yield from self._output.take_events()

    def _last_parts(self) -> list[str]:
        usage = self._usage().model_dump()
        self._output.tell("message_delta", delta=self._ending, usage=usage)
        self._output.tell("message_stop")
        return self._output.take_events()

    def _failure(self, error: PagemillError) -> str:
        self._output.tell("error", error=anthropic_error_response(error).error.model_dump())
        return "".join(self._output.take_events())

    def _message(self, **ending: Any) -> Message:
        head = {"id": self._id, "model": self._head["model"]}
        return Message(**head, content=self._output.blocks, usage=self._usage(), **ending)

    def _usage(self) -> MessageUsage:
        request = self._streams[0].request
        cached = request.num_cached_tokens
        return MessageUsage(
            input_tokens=len(request.prompt_token_ids) - cached,
            cache_read_input_tokens=cached,
            output_tokens=self._num_answered,
        )

    @property
    def _num_answered(self) -> int:
        return sum(len(each.output.token_ids) for each in self._streams[0].request.sequences)

    def _why_it_ended(self, output: CompletionOutput, reader: AnswerReader) -> dict[str, Any]:
        """Returns why the answer ended, in the fields of a message. output: its end."""
        reason, sequence = STOP_REASONS[output.finish_reason], None
        if reason == "end_turn" and reader.num_calls and not self._output.has_broken_call:
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(output.stop_reason, str):
            reason, sequence = "stop_sequence", output.stop_reason
        elif reason == "max_tokens" and self._num_answered < self._asked_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}


def message_routes(llm: AsyncLLM, served: ServedModels) -> APIRouter:
    """Returns the routes."""
    errors: dict[int | str, dict[str, Any]] = {kind: {"model": AnthropicErrorResponse} for kind in ("4XX", "5XX")}
    routes = APIRouter(prefix="/v1/messages", route_class=BodyRoute, responses=errors)

    @routes.post("", response_model=Message)
    async def create(body: MessagesRequest, request: Request) -> Response:
        """Answers a conversation through the model's chat template, in Anthropic's words."""
        return await respond(MessagesCall, llm, served, body, request)

    @routes.post("/count_tokens")
    async def count_tokens(body: Conversation, request: Request) -> TokenCount:
        """Counts the tokens of a conversation as the chat template writes it. It need not fit `max_model_len`."""
        served.name_for(body.model)
        tokenizer, chat = await llm.tokenizer(), body.chat
        how = {"size": size_of(chat.for_template()), "tenant": request.state.tenant}
        work = llm.in_tokenizer_thread(_count, tokenizer, chat, **how)
        return TokenCount(input_tokens=await until_disconnect(request.receive, work))

    return routes


def _count(tokenizer: Tokenizer, chat: ChatOfMessages) -> int:
    try:
        options = options_for(tokenizer.answers, chat)
        text = tokenizer.apply_chat_template(chat.for_template(), tools=chat.tools_for_template(), **options)
    except PagemillError as error:
        raise chat.in_own_words(error) from None
    return len(encode_conversation(tokenizer, text))
