"""`/v1/chat/completions`: a conversation in, the assistant's next turn out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestOutput
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.session import AsyncSession
from pagemill.sampling.params import SamplingParams
from pagemill.server.call import Call
from pagemill.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    TokenLogprob,
    TopLogprob,
)


class ChatCall(Call[ChatCompletionRequest]):
    """One chat completion."""

    ID, WHOLE, CHUNK = "chatcmpl", ChatCompletion, ChatCompletionChunk

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._begun: set[int] = set()

    async def _turn(self, session: AsyncSession, params: SamplingParams) -> RequestStream:
        messages = self.request.for_template()
        return await session.submit_chat(messages, params, self._id, priority=self.request.priority)

    async def _prompts(self) -> list[Prompt]:
        salt = self.request.cache_salt or ""
        return [await self._llm.render_chat(self.request.for_template(), cache_salt=salt)]

    def _choice(self, position: int, output: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=AnswerMessage(content=self._forked + output.text),
            logprobs=self._logprobs(output.logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )

    def _beside(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        return {"prompt_logprobs": results[0].prompt_logprobs}

    def _chunks(self, position: int, new: CompletionOutput) -> Iterator[ChunkChoice]:
        if new.index not in self._begun:
            self._begun.add(new.index)
            yield ChunkChoice(index=new.index, delta=Delta(role="assistant", content=self._forked))
        if new.text or new.finish_reason or new.logprobs:
            yield ChunkChoice(
                index=new.index,
                delta=Delta(content=new.text) if new.text else Delta(),
                logprobs=self._logprobs(new.logprobs),
                finish_reason=new.finish_reason,
                stop_reason=new.stop_reason,
            )

    def _logprobs(self, positions: Sequence[LogprobsOfPosition] | None) -> ChatLogprobs | None:
        """Returns the chosen token of each position, with as many of the most likely ones as were asked for."""
        if positions is None:
            return None
        wanted = self.request.top_logprobs or 0
        content = []
        for position in positions:
            entries = list(position.values())
            likely = [_top(entry) for entry in entries if entry.rank <= wanted]
            likely.sort(key=lambda entry: -entry.logprob)
            content.append(TokenLogprob(**_top(entries[0]).model_dump(), top_logprobs=likely))
        return ChatLogprobs(content=content)


def _top(entry: Logprob) -> TopLogprob:
    token = entry.decoded_token
    return TopLogprob(token=token, logprob=entry.logprob, bytes=None if "\ufffd" in token else list(token.encode()))
