"""`/v1/chat/completions`: a conversation in, the assistant's next turn out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pagemill.errors import InvalidRequestError, shown
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestOutput
from pagemill.frontend.rates import Charge
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.session import AsyncSession
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.sampling.structured import MAX_CHARACTERS, StructuredOutputsParams
from pagemill.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    PartsDelta,
    TokenLogprob,
    TopLogprob,
)
from pagemill.server.protocol.tools import Called, CalledDelta, ToolCall, ToolCallDelta
from pagemill.server.routes.call import Call
from pagemill.text.answer.of_model import AnswerFormats
from pagemill.text.answer.reader import AnswerPart, AnswerReader
from pagemill.text.tool_messages import functions_of

READ_LIKE_ONE = 50
"""Characters of answers with tool calls or reasoning that are read in the time in which one choice is written."""


class ChatCall(Call[ChatCompletionRequest]):
    """One chat completion."""

    ID, WHOLE, CHUNK = "chatcmpl-", ChatCompletion, ChatCompletionChunk

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tools = self.request.tools_for_template()
        self._readers: dict[int, AnswerReader] = {}
        """What reads each choice, by index; its first part is there once the choice has begun."""

    async def _start(self) -> None:
        tokenizer = await self._llm.tokenizer()
        self._answers, self._bytes_of = tokenizer.answers, tokenizer.token_texts.raw
        self._options = options_for(self._answers, self.request)
        await super()._start()

    def _params(self) -> SamplingParams | BeamSearchParams:
        params = self.request.params()
        if isinstance(params, SamplingParams):
            self._keep_marks(params, self._tools)
        return params

    def _keep_marks(self, params: SamplingParams, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Leaves the special tokens in texts that mark tool calls or reasoning."""
        if self._answers.needs_special_tokens(bool(tools)):
            if self.request.given.get("skip_special_tokens"):
                raise InvalidRequestError(
                    "skip_special_tokens is true, but this model marks tool calls or reasoning by special tokens, "
                    "which must be read; leave it out",
                    param="skip_special_tokens",
                )
            params.skip_special_tokens = False

    def _hold(self, params: SamplingParams, prompt: str | None, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Holds an answer to the form and the schemas that are asked for. prompt: None for a fork. tools: the prompt's;
        beside a form, calls have any arguments where no schema is asked for."""
        request, asked, answers = self.request, params.structured_outputs, self._answers
        functions = request.held_to_schemas
        may_call = request.max_tool_calls != 0 and (bool(self._tools) or answers.marks_calls)
        if asked is not None and functions is None and may_call:
            functions = {name: {} for name in functions_of(tools)} or None
        grammar = answers.grammar(
            asked, functions, prompt=prompt, forced=request.forces_a_call, one_call=request.max_tool_calls == 1
        )
        if grammar is None:
            return
        if len(grammar) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"structured_outputs, with the tools' schemas, make a grammar of {len(grammar)} characters, over "
                f"{MAX_CHARACTERS}; make schemas shorter, or leave strict out and set tool_choice to 'auto'",
                param="structured_outputs",
            )
        params.structured_outputs = StructuredOutputsParams(grammar=grammar)

    def _hold_turn(self, params: SamplingParams, prompt: str, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Does the same for a session's turn, whose tools may be those of an earlier one."""
        self._keep_marks(params, tools)
        self._hold(params, prompt, tools)

    async def _send(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, name: str, charge: Charge | None = None
    ) -> None:
        held = self.request.held_to_schemas is not None
        if isinstance(params, SamplingParams) and (held or params.structured_outputs is not None):
            assert isinstance(prompt, Mapping)
            await asyncio.to_thread(self._hold, params, prompt["prompt"], self._tools)
        await super()._send(prompt, params, name, charge)

    async def _fork(self, origin_id: str, params: SamplingParams | BeamSearchParams) -> None:
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:
            await asyncio.to_thread(self._hold, params, None, self._tools)
        await super()._fork(origin_id, params)

    async def _turn(self, session: AsyncSession, params: SamplingParams) -> RequestStream:
        return await session.submit_chat(
            self.request.for_template(),
            params,
            self._id,
            priority=self.request.priority,
            lora_request=self._lora_request,
            max_tool_calls=self.request.max_tool_calls,
            calls_only=self.request.forces_a_call,
            on_prompt=partial(self._hold_turn, params),
            tools=self._tools,
            **self._options,
        )

    async def _prompts(self) -> list[Prompt]:
        salt = self.request.cache_salt or ""
        messages, tools = self.request.for_template(), self._tools
        return [
            await self._llm.render_chat(messages, cache_salt=salt, tenant=self._tenant, tools=tools, **self._options)
        ]

    def _reader(self, index: int) -> AnswerReader:
        (stream,) = self._streams
        turn = stream.request.turn
        return self._answers.reader(
            self._tools if turn is None else turn.tools,
            prompt=stream.request.prompt or "",
            answer_id=self._id if turn is not None else f"{self._id}-{index}",
            max_calls=self.request.max_tool_calls,
            calls_only=self.request.forces_a_call,
        )

    def _reading_size(self) -> int:
        texts = (len(each.output.text) for stream in self._streams for each in stream.request.sequences)
        return sum(texts) // READ_LIKE_ONE if self._tools or self._answers.reasoning is not None else 0

    def _choice(self, position: int, output: CompletionOutput) -> ChatChoice:
        reader = self._reader(output.index)
        answer = reader.read(self._forked + output.text)
        calls = [
            ToolCall(id=call.id or "", function=Called(name=call.name or "", arguments=call.arguments))
            for call in answer.calls
        ]
        message = AnswerMessage(content=answer.content if answer.content or not calls else None)
        message.reasoning = (answer.reasoning or None) if self.request.include_reasoning else None
        message.reasoning_content = message.reasoning
        message.tool_calls = calls or None
        return ChatChoice(
            index=output.index,
            message=message,
            logprobs=self._logprobs(output.logprobs),
            finish_reason=_finish_reason(output, reader),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self.request.return_token_ids else None,
        )

    def _beside(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        tokens = results[0].prompt_token_ids if self.request.return_token_ids else None
        return {"prompt_logprobs": results[0].prompt_logprobs, "prompt_token_ids": tokens}

    def _chunks(self, position: int, new: CompletionOutput) -> Iterator[str]:
        text, with_ids = new.text, bool(self.request.return_token_ids)
        if new.index not in self._readers:
            self._readers[new.index] = self._reader(new.index)
            beside = {"prompt_token_ids": self._streams[position].prompt_token_ids} if with_ids else {}
            yield self._chunk(ChunkChoice(index=new.index, delta=Delta(role="assistant", content="")), **beside)
            text = self._forked + text
        reader = self._readers[new.index]
        part = reader.add(text)
        if new.finish_reason is None and new.logprobs is None and not (part.reasoning or part.calls or with_ids):
            if part.content:
                yield self._text_chunk(new.index, part.content)
            return
        parts = [part, *([reader.finish()] if new.finish_reason else ())]
        deltas = [delta for part in parts if (delta := self._delta(part)) is not None]
        if new.finish_reason or new.logprobs or with_ids:
            deltas = deltas or [Delta()]
        for delta in deltas:
            last = delta is deltas[-1]
            choice = ChunkChoice(
                index=new.index,
                delta=delta,
                logprobs=self._logprobs(new.logprobs) if last else None,
                finish_reason=_finish_reason(new, reader) if last else None,
                stop_reason=new.stop_reason if last else None,
                token_ids=new.token_ids if last and with_ids else None,
            )
            yield self._chunk(choice)

    def _text_choice(self, index: int) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(content=""))

    def _delta(self, part: AnswerPart) -> Delta | None:
        """Returns what is new of a choice; None for nothing."""
        reasoning = part.reasoning if self.request.include_reasoning else ""
        if not (reasoning or part.calls):
            return Delta(content=part.content) if part.content else None
        calls = [
            ToolCallDelta(
                index=call.index,
                id=call.id,
                type=None if call.id is None else "function",
                function=CalledDelta(name=call.name, arguments=call.arguments),
            )
            for call in part.calls
        ]
        thought = reasoning or None
        return PartsDelta(
            content=part.content or None, reasoning_content=thought, reasoning=thought, tool_calls=calls or None
        )

    def _logprobs(self, positions: Sequence[LogprobsOfPosition] | None) -> ChatLogprobs | None:
        """Returns the chosen token of each position, with as many of the most likely ones as were asked for."""
        if positions is None:
            return None
        wanted = self.request.top_logprobs or 0
        content = []
        for position in positions:
            entries = [(self._bytes_of(token_id), entry) for token_id, entry in position.items()]
            likely = [_top(*entry) for entry in entries if entry[1].rank <= wanted]
            likely.sort(key=lambda entry: -entry.logprob)
            content.append(TokenLogprob(**_top(*entries[0]).model_dump(), top_logprobs=likely[:wanted]))
        return ChatLogprobs(content=content)


def options_for(answers: AnswerFormats, request: ChatCompletionRequest) -> dict[str, Any]:
    """Returns what the chat template is given beside messages and tools. Raises `InvalidRequestError` for what it does
    not read, and for tools that the model does not take."""
    if request.offers_tools:
        answers.check_tool_calls()
    own = request.chat_template_kwargs or {}
    answers.check_options(own)
    asked = answers.options(request.reasoning_effort, request.thinks)
    for name in asked:
        if own.get(name, asked[name]) != asked[name]:
            raise InvalidRequestError(
                f"chat_template_kwargs has {name} {shown(own[name])}, but the request asks for {shown(asked[name])}; "
                f"leave one of them out",
                param="chat_template_kwargs",
            )
    return {**request.template_options(), "chat_template_kwargs": {**own, **asked}}


def _finish_reason(output: CompletionOutput, reader: AnswerReader) -> str | None:
    calls = output.finish_reason == "stop" and reader.num_calls and not reader.has_broken_call
    return "tool_calls" if calls else output.finish_reason


def _top(spelling: bytes, entry: Logprob) -> TopLogprob:
    return TopLogprob(token=entry.decoded_token, logprob=entry.logprob, bytes=list(spelling))
