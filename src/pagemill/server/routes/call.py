"""One HTTP call for text: its requests are started together, read together, and all given back when the call ends."""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Sized
from contextlib import aclosing
from functools import cached_property, partial
from json.encoder import encode_basestring
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from pagemill.errors import InvalidRequestError, PagemillError, RequestNotFoundError, RequestTimeoutError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagemill.frontend.rates import Charge
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.session import AsyncSession
from pagemill.lora_request import LoRARequest
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.protocol.errors import error_response, of_entry
from pagemill.server.protocol.events import CLIENT_GONE, DONE, EventStream, Writer, event, until_disconnect, until_late
from pagemill.server.protocol.generation import (
    Answer,
    CompletionTokensDetails,
    GenerationRequest,
    PromptTokensDetails,
    Usage,
)
from pagemill.server.protocol.parts import JSONInParts
from pagemill.server.routes.models import ServedModels
from pagemill.text.detokenizer import Detokenizer

R = TypeVar("R", bound=GenerationRequest)
T = TypeVar("T")

MOST_HERE = 200
"""Choices, and positions with log probabilities, that are written in the event loop; more take long enough to hold up
running streams, and are written in a thread."""
IDS_LIKE_ONE = 500
"""Token ids that are written in the time in which one choice is."""
STREAMS_AT_ONCE = 64
"""Streams of a call that are begun, or ended, before others may use the event loop."""


class _EventWriter:
    """Writes the events that say what is new of a stream."""

    def __init__(self, writer: Writer, parts: Callable[[RequestOutput], str]) -> None:
        self._writer = writer
        self._parts = parts

    def ready(self) -> bool:
        return self._writer.ready()

    def take(self, output: RequestOutput) -> None:
        if parts := self._parts(output):
            self._writer.write(parts.encode())


class Call(ABC, Generic[R]):
    """A completion or a chat, for one use: `answer` returns all of it, `events` gives it as it comes.

    Both raise `PagemillError` children for what is refused, and give back all that the call has started when they end.
    """

    ID: ClassVar[str]
    """The beginning of such answers' ids."""
    END: ClassVar[str] = DONE
    """The last event of a stream; "" for none."""
    WHOLE: ClassVar[type[Answer[Any]]]
    CHUNK: ClassVar[type[Answer[Any]]]

    def __init__(
        self, llm: AsyncLLM, request: R, model: str, tenant: str, lora_request: LoRARequest | None = None
    ) -> None:
        """model: the name in the answer. lora_request: the adapter of this name, if it is one's."""
        self._llm = llm
        self._lora_request = lora_request
        self.request = request
        self._tenant = tenant
        self._began_s = time.monotonic()
        self._id = f"{self.ID}{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self._id, "created": int(time.time()), "model": model}
        if request.service_tier is not None:
            self._head["service_tier"] = "default"
        self._num_choices = request.num_choices
        self._streams: list[RequestStream] = []
        """One for each prompt."""
        self._timer: asyncio.TimerHandle | None = None
        """Ends the request at its `timeout`."""
        self._broke_off: str | None = None
        """Why a stream ended before its answer: the kind of its error, or that its client has gone."""
        self._forked = ""
        """The text that a fork begins with."""
        self._around_text: dict[int, tuple[str, str]] = {}
        """Strings before and behind the text of an event that brings nothing else, by choice."""
        self._counted = Usage()
        """Counts what has come so far, where every event says it; drafts are counted at the end."""

    async def answer(self) -> Response:
        """Returns the whole answer."""
        try:
            return await self._answer()
        finally:
            self._forget_logprobs()

    async def _answer(self) -> Response:
        try:
            await self._begin()
            for stream in self._streams:
                stream.only_whole()
            async with aclosing(self._deltas()) as deltas:
                async for _ in deltas:
                    pass
        except PagemillError as error:
            raise self.request.in_own_words(error) from None
        finally:
            await self._close()
        size = sum(len(stream.request.sequences) + stream.request.num_logprobs for stream in self._streams)
        size += self._reading_size() + sum(map(self._prompt_size, self._streams))
        return JSONInParts([await _off_loop(size, self._whole)])

    def _whole(self) -> bytes:
        """Returns the whole answer in JSON, written choice by choice: other threads may run between two."""
        results = self._results()
        choices = [
            self._choice(at, output).model_dump_json() for at, result in enumerate(results) for output in result.outputs
        ]
        around = self.WHOLE(**self._head, choices=[], usage=self._usage_of(results), **self._beside(results))
        return around.model_dump_json().replace('"choices":[]', f'"choices":[{",".join(choices)}]', 1).encode()

    async def events(self) -> AsyncGenerator[str, None]:
        """Returns the answer's server-sent events once its first part is there; what is refused until then is raised.

        They must be closed, read or not.
        """
        events = self._events()
        await anext(events)
        return events

    async def _events(self) -> AsyncGenerator[str, None]:
        begun = False
        try:
            await self._begin()
            async with aclosing(self._deltas()) as deltas:
                async for position, output in deltas:
                    if not begun:
                        begun = True
                        yield ""  # for `events`
                    size = sum(1 + len(new.logprobs or ()) for new in output.outputs)
                    size += len(output.prompt_logprobs or ()) + self._prompt_size(self._streams[position])
                    if parts := await _off_loop(size, self._parts, position, output):
                        yield parts
            for part in self._last_parts():
                yield part
        except PagemillError as error:
            refused = self.request.in_own_words(error)
            if not begun:
                raise refused from None
            self._broke_off = refused.kind
            yield self._failure(refused)
        except (GeneratorExit, asyncio.CancelledError):
            self._broke_off = CLIENT_GONE
            raise
        finally:
            try:
                await self._close()
            finally:
                self._forget_logprobs()
        if self.END:
            yield self.END

    def write_to(self, writer: Writer) -> None:
        """Writes what comes as soon as it is there, where that takes little; `events` has the rest."""
        if len(self._streams) == 1:
            request = self._streams[0].request
            if len(request.sequences) <= MOST_HERE and not request.num_logprobs and not self.request.return_token_ids:
                self._streams[0].hand_to(_EventWriter(writer, partial(self._parts, 0)))

    def _parts(self, position: int, output: RequestOutput) -> str:
        """Returns the events that say what is new of the prompt at `position`, for one write."""
        if self.request.continuous_usage:
            self._count(output)
        return "".join([event for new in output.outputs for event in self._chunks(position, new)])

    def _chunk(self, choice: BaseModel, **beside: Any) -> str:
        """Returns the event that brings a choice, and other fields beside it."""
        before, after = self._frame(**beside) if beside else self._around
        return f"{before}{choice.model_dump_json()}{after}"

    def _text_chunk(self, index: int, text: str) -> str:
        """Returns the event that brings nothing but text of a choice: most events of most answers."""
        if index not in self._around_text or self.request.continuous_usage:
            before, after = self._around
            head, _, tail = self._text_choice(index).model_dump_json().partition('""')
            self._around_text[index] = before + head, tail + after
        before, after = self._around_text[index]
        return f"{before}{encode_basestring(text)}{after}"

    @property
    def _around(self) -> tuple[str, str]:
        """Returns what stands before and behind the choice of an event."""
        return self._frame() if self.request.continuous_usage else self._usual_frame

    @cached_property
    def _usual_frame(self) -> tuple[str, str]:
        """Returns the frame of every event but a few; written anew, it would cost as much as the choice."""
        return self._frame()

    def _count(self, output: RequestOutput) -> None:
        """Adds what is new to the usage so far."""
        usage = self._counted
        if not usage.prompt_tokens:
            usage.prompt_tokens = sum(len(stream.prompt_token_ids) for stream in self._streams)
            usage.prompt_tokens_details = PromptTokensDetails()
        if len(self._streams) == 1:
            usage.prompt_tokens_details.cached_tokens = output.num_cached_tokens
        usage.completion_tokens += sum(len(new.token_ids) for new in output.outputs)
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens

    def _prompt_size(self, stream: RequestStream) -> int:
        """Returns how many choices could be written in the time that it takes to write a prompt's token ids."""
        return len(stream.prompt_token_ids) // IDS_LIKE_ONE if self.request.return_token_ids else 0

    def _frame(self, **beside: Any) -> tuple[str, str]:
        usage = self._counted if self.request.continuous_usage else None
        before, _, after = event(self.CHUNK(**self._head, choices=[], usage=usage, **beside)).partition('"choices":[]')
        return f'{before}"choices":[', f"]{after}"

    def _last_parts(self) -> list[str]:
        """Returns the events that follow the answer."""
        if not self.request.include_usage:
            return []
        return [event(self.CHUNK(**self._head, choices=[], usage=self._usage_of(self._results())))]

    def _failure(self, error: PagemillError) -> str:
        """Returns the event that says why the answer broke off."""
        return event(error_response(error))

    async def _begin(self) -> None:
        """Does what `_start` does; once the request's `timeout` is over, it fails."""
        timeout_s = self.request.timeout
        await until_late(timeout_s, self._began_s, self._start())
        if timeout_s is not None:
            left_s = self._began_s + timeout_s - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._be_late, timeout_s)

    def _be_late(self, timeout_s: float) -> None:
        for stream in self._streams:
            stream.fail(RequestTimeoutError.after(timeout_s))

    async def _start(self) -> None:
        """Checks the request and submits it; if one prompt is refused, `_close` ends the others."""
        given = self.request.given
        allowed, vocabulary = len(given.get("allowed_token_ids", ())), (await self._llm.ready()).vocab_size
        if allowed > vocabulary:
            raise InvalidRequestError(
                f"allowed_token_ids has {allowed} entries; this model has {vocabulary} tokens; name each once",
                param="allowed_token_ids",
            )
        params = await _off_loop(sum(len(value) for value in given.values() if isinstance(value, Sized)), self._params)
        await self._submit(params)

    async def _submit(self, params: SamplingParams | BeamSearchParams) -> None:
        """Submits every prompt."""
        request = self.request
        if request.fork_of is not None:
            await self._fork(request.fork_of, params)
        elif request.session_id is not None:
            assert isinstance(params, SamplingParams)
            session = self._llm.session(request.session_id, cache_salt=request.cache_salt or "", tenant=self._tenant)
            self._streams.append(await self._turn(session, params))
        elif len(prompts := await self._prompts()) == 1:
            await self._send(prompts[0], params, self._id)
        else:
            width = request.num_sequences
            with await self._llm.charge(len(prompts), width=width, tenant=self._tenant) as charge:
                for position, prompt in enumerate(prompts):
                    with of_entry("prompt", position):
                        await self._send(prompt, params, f"{self._id}-{position}", charge)

    async def _send(
        self, prompt: Prompt, params: SamplingParams | BeamSearchParams, name: str, charge: Charge | None = None
    ) -> None:
        """Submits one prompt, under a name. charge: that of all prompts; None where this is the only one."""
        how: dict[str, Any] = {"priority": self.request.priority, "lora_request": self._lora_request, "charge": charge}
        self._streams.append(await self._llm.submit(prompt, params, name, tenant=self._tenant, **how))

    def _params(self) -> SamplingParams | BeamSearchParams:
        """Returns how the answer is generated."""
        return self.request.params()

    async def _fork(self, origin_id: str, params: SamplingParams | BeamSearchParams) -> None:
        """Goes on from a running request of the same namespace, and shares its KV blocks."""
        request, tokenizer = self.request, await self._llm.tokenizer()
        try:
            origin = self._llm.running(origin_id, Namespace(self._tenant, request.cache_salt or ""))
        except RequestNotFoundError as error:
            raise RequestNotFoundError(error.message, param="fork_of") from error
        adapter = 0 if self._lora_request is None else self._lora_request.lora_int_id
        if origin.asked.adapter != adapter:
            raise InvalidRequestError(
                f"the request {origin_id!r} is of another model than {self._head['model']!r}; a fork goes on with its "
                f"origin's model: name that",
                param="model",
            )
        index, priority = request.fork_index or 0, request.priority
        stream = await self._llm.fork(origin_id, params, self._id, index=index, priority=priority)
        self._streams.append(stream)
        prompt, skip = origin.prompt_token_ids, getattr(params, "skip_special_tokens", True)
        self._forked = Detokenizer(tokenizer, prompt, skip_special_tokens=skip).add(
            stream.prompt_token_ids[len(prompt) :]
        )

    @abstractmethod
    async def _turn(self, session: AsyncSession, params: SamplingParams) -> RequestStream:
        """Submits the request as a session's next turn."""

    @abstractmethod
    async def _prompts(self) -> Sequence[Prompt]:
        """Returns the prompts of a request that stands alone."""

    @abstractmethod
    def _choice(self, position: int, output: CompletionOutput) -> BaseModel:
        """Returns a whole choice, of the prompt at `position`."""

    @abstractmethod
    def _chunks(self, position: int, new: CompletionOutput) -> Iterable[str]:
        """Returns the events that say what is new."""

    @abstractmethod
    def _text_choice(self, index: int) -> BaseModel:
        """Returns a choice that brings nothing but a text, which is empty."""

    def _reading_size(self) -> int:
        """Returns how many choices could be written in the time that it takes to read the whole answer."""
        return 0

    def _beside(self, results: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns what a whole answer has beside its choices."""
        return {}

    async def _deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """Yields what is new of each prompt, with the prompt's position, as it comes."""
        if len(self._streams) == 1:  # without a task per output
            async for output in self._streams[0]:
                yield 0, output
            return
        outputs: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue(len(self._streams))

        async def read(position: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    await outputs.put((position, output))
                await outputs.put(None)
            except Exception as error:
                await outputs.put(error)

        readers: list[asyncio.Future[None]] = []
        try:
            for position, stream in enumerate(self._streams):
                readers.append(asyncio.ensure_future(read(position, stream)))
                if not len(readers) % STREAMS_AT_ONCE:
                    await asyncio.sleep(0)
            unended = len(readers)
            while unended:
                found = await outputs.get()
                if found is None:
                    unended -= 1
                elif isinstance(found, Exception):
                    raise found
                else:
                    yield found
        finally:
            unended_readers = [reader for reader in readers if not reader.done()]
            for reader in unended_readers:
                reader.cancel()
            await asyncio.gather(*unended_readers, return_exceptions=True)

    def figures(self) -> dict[str, Any]:
        """Returns what the call has come to so far, for the log."""
        requests = [stream.request for stream in self._streams]
        first = [request.metrics.first_token_time for request in requests]
        first_s = min((token_s for token_s in first if token_s is not None), default=None)
        return {
            "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
            "cached_tokens": sum(request.num_cached_tokens for request in requests),
            "completion_tokens": sum(len(each.output.token_ids) for request in requests for each in request.sequences),
            "first_token_ms": None if first_s is None else round((first_s - self._began_s) * 1000, 1),
            "broke_off": self._broke_off,
        }

    def times(self) -> list[RequestMetrics]:
        """Returns when what happened to each prompt's request."""
        return [stream.request.metrics for stream in self._streams]

    def _results(self) -> list[RequestOutput]:
        """Returns what each prompt has brought so far, in as many choices as were asked for."""
        results = [stream.whole() for stream in self._streams]
        for result in results:
            del result.outputs[self._num_choices :]  # a search brings its whole width
        return results

    def _usage_of(self, results: Sequence[RequestOutput]) -> Usage:
        requests = [stream.request for stream in self._streams if stream.request.asked.beam is None]
        sampled = sum(len(each.output.token_ids) for request in requests for each in request.sequences)
        return usage_of(results, sampled) if requests else usage_of(results)

    async def _close(self) -> None:
        """Gives back all that has been started, even if it is cancelled on the way."""
        if self._timer is not None:
            self._timer.cancel()
        try:
            for number, stream in enumerate(self._streams, 1):
                stream.close()
                if not number % STREAMS_AT_ONCE:
                    await asyncio.sleep(0)
        finally:
            for stream in self._streams:
                stream.close()

    def _forget_logprobs(self) -> None:
        """Frees log probabilities, in a thread where there are many."""
        requests = [stream.request for stream in self._streams]
        if sum(request.num_logprobs for request in requests) > MOST_HERE:
            asyncio.get_running_loop().run_in_executor(None, _forget_logprobs_of, requests)


def _forget_logprobs_of(requests: Sequence[RequestState]) -> None:
    for request in requests:
        request.forget_logprobs()


async def respond(
    kind: Callable[..., Call[Any]], llm: AsyncLLM, served: ServedModels, body: Any, request: Request
) -> Response:
    """Returns the answer to a body by a call of this kind, whole or as events; ends the call if its client goes first.
    Raises `ModelNotServedError`, and what the call raises."""
    model = served.name_for(body.model)
    request.state.call = call = kind(llm, body, model, request.state.tenant, served.adapter(model))
    if body.stream:
        return EventStream(await until_disconnect(request.receive, call.events()), call.write_to)
    return await until_disconnect(request.receive, call.answer())


async def _off_loop(size: int, function: Callable[..., T], *args: Any) -> T:
    """Returns what a function returns, which is called in a thread if there is much for it to do."""
    return await asyncio.to_thread(function, *args) if size > MOST_HERE else function(*args)


def usage_of(results: Sequence[RequestOutput], sampled: int | None = None) -> Usage:
    """Returns how many tokens the prompts of a call have, and its answers. sampled: tokens of all sequences, also of
    those that `best_of` leaves out; None counts the choices'."""
    prompt = sum(len(result.prompt_token_ids) for result in results)
    completion = sampled
    if completion is None:
        completion = sum(len(output.token_ids) for result in results for output in result.outputs)
    cached = PromptTokensDetails(cached_tokens=sum(result.num_cached_tokens for result in results))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=cached,
        completion_tokens_details=_drafts_of(results),
    )


def _drafts_of(results: Sequence[RequestOutput]) -> CompletionTokensDetails | None:
    """Returns what became of the drafts of a call; None if it had none."""
    counts = [result.metrics.drafts for result in results if result.metrics.drafts is not None]
    if not counts:
        return None
    accepted = sum(each.num_accepted_tokens for each in counts)
    return CompletionTokensDetails(
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=sum(each.num_draft_tokens for each in counts) - accepted,
    )
