"""The requests behind one HTTP call: started together, read together, and all given back when the call ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import CompletionOutput, LogprobsOfPosition, RequestOutput
from pagemill.frontend.request_stream import RequestStream
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.protocol import PromptTokensDetails, Usage


@dataclass(slots=True)
class Answer:
    """One sequence as it has come so far."""

    text: str = ""
    num_tokens: int = 0
    logprobs: list[LogprobsOfPosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, new: CompletionOutput) -> None:
        self.text += new.text
        self.num_tokens += len(new.token_ids)
        if new.logprobs is not None:
            self.logprobs = (self.logprobs or []) + new.logprobs
        self.finish_reason = new.finish_reason
        self.stop_reason = new.stop_reason


@dataclass(slots=True)
class PromptResult:
    """What one prompt has brought so far."""

    prompt_token_ids: list[int]
    answers: list[Answer]
    num_cached_tokens: int = 0
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None

    def add(self, new: RequestOutput) -> None:
        self.num_cached_tokens = new.num_cached_tokens
        self.prompt_logprobs = new.prompt_logprobs or self.prompt_logprobs
        for output in new.outputs[: len(self.answers)]:
            self.answers[output.index].add(output)


@dataclass(slots=True)
class Generation:
    """One or several prompts with the same parameters. Read `deltas()` once; always `close()`."""

    streams: Sequence[RequestStream]
    results: list[PromptResult]
    _first: list[tuple[int, RequestOutput]] = field(default_factory=list)
    _deltas: AsyncGenerator[tuple[int, RequestOutput], None] | None = None

    @classmethod
    async def start(
        cls,
        llm: AsyncLLM,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        num_answers: int,
        *,
        request_id: str,
        priority: int,
        tenant: str,
    ) -> Generation:
        """Checks and submits every prompt; if one is refused, none runs on. Raises `InvalidRequestError`.

        num_answers: sequences of each prompt that are wanted, the first of those that come.
        """
        streams: list[RequestStream] = []
        try:
            for position, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{position}"
                streams.append(await llm.submit(prompt, params, name, priority=priority, tenant=tenant))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return cls.of(streams, num_answers)

    @classmethod
    def of(cls, streams: Sequence[RequestStream], num_answers: int) -> Generation:
        """Of requests that are under way."""
        results = [PromptResult(stream.prompt_token_ids, [Answer() for _ in range(num_answers)]) for stream in streams]
        return cls(streams, results)

    async def wait_for_first(self) -> None:
        """Until something has come. What the engine refuses is raised here, before an answer has begun."""
        self._deltas = self._merge()
        with contextlib.suppress(StopAsyncIteration):
            self._first.append(await anext(self._deltas))

    async def deltas(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """`(which prompt, what is new)` in the order of coming; `results` are brought up to date first."""
        if self._deltas is None:
            self._deltas = self._merge()
        for position, output in self._first:
            yield position, output
        async for position, output in self._deltas:
            yield position, output

    async def finish(self) -> list[PromptResult]:
        """Waits for everything."""
        async for _ in self.deltas():
            pass
        return self.results

    async def close(self) -> None:
        """Aborts what still runs."""
        if self._deltas is not None:
            await self._deltas.aclose()
        for stream in self.streams:
            stream.close()

    def usage(self) -> Usage:
        prompt = sum(len(result.prompt_token_ids) for result in self.results)
        completion = sum(answer.num_tokens for result in self.results for answer in result.answers)
        cached = sum(result.num_cached_tokens for result in self.results)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def _merge(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        if len(self.streams) == 1:  # without a task per output
            async for output in self.streams[0]:
                self.results[0].add(output)
                yield 0, output
            return
        waiting = {asyncio.ensure_future(anext(stream)): position for position, stream in enumerate(self.streams)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    position = waiting.pop(task)
                    output = task.result()
                    if not output.finished:
                        waiting[asyncio.ensure_future(anext(self.streams[position]))] = position
                    self.results[position].add(output)
                    yield position, output
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def begin(events: AsyncGenerator[str, None], generation: Generation) -> AsyncGenerator[str, None]:
    """The events, once the first part of the answer is there; what is refused until then is raised.

    `events` must yield once, anything, before its first event, inside the `try` that closes `generation`: closing a
    generator that has not begun runs none of it, and whoever is handed these events may close them unread.
    """
    await anext(events)
    try:
        await generation.wait_for_first()
    except BaseException:
        await events.aclose()
        raise
    return events
