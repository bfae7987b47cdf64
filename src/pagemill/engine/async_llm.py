"""AsyncLLM: generation as async iterators, with the engine in a process of its own.

Everything here runs in one event loop, except tokenizing, which has a thread. The loop of this class takes what the
engine sends, detokenizes it and checks stop strings at once; a slow consumer finds all that has gathered in one delta.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from pagemill.config import config_for
from pagemill.engine.async_control import AsyncControl
from pagemill.engine.async_session import AsyncSession
from pagemill.engine.client import EngineClient, cause_of_death
from pagemill.engine.input_processor import InputProcessor, ProcessedInput, Prompt
from pagemill.engine.messages import (
    AbortRequests,
    EngineFault,
    EngineReady,
    EngineStats,
    FinishSequences,
    KVBlocks,
    LoadProgress,
    PinInfo,
    PinList,
    Refused,
    SequenceList,
    StepOutputs,
)
from pagemill.engine.output_processor import OutputProcessor, RequestState
from pagemill.engine.outputs import RequestOutput, RunningRequest
from pagemill.engine.pinning import pin_of, pin_request
from pagemill.engine.request_stream import RequestStream
from pagemill.engine.session_turns import SessionTurns
from pagemill.errors import EngineDeadError, InvalidRequestError, PagemillError, RequestNotFoundError, error_of
from pagemill.hub import resolve_model
from pagemill.namespace import Namespace
from pagemill.sampling.beam_search_params import BeamSearchParams
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import SessionRecord, SessionStore
from pagemill.tenant_limits import DEFAULT_TENANT
from pagemill.text.tokenizer import Tokenizer

T = TypeVar("T")


class AsyncLLM(AsyncControl):
    """Serves one model from a child process, which starts loading at once.

    Settings are `EngineConfig`'s. `on_progress(done, total)` is told how loading goes, in the event loop.
    Raises `ModelNotFoundError`, `ConfigError` and `UnknownArgumentError` here, everything else about
    the model from `ready()`.
    Use it as `async with AsyncLLM(model) as llm`, or call `shutdown()`.
    """

    def __init__(self, model: str, *, on_progress: Callable[[int, int], None] | None = None, **settings: Any) -> None:
        self.config = config_for("AsyncLLM", model, settings)
        self.config.model = str(resolve_model(model))
        self.load_progress: tuple[int, int] | None = None
        self._on_progress = on_progress
        self.on_request_end: Callable[[RequestState], None] | None = None
        """Told of each request when it has ended, in the event loop."""
        sessions = SessionStore.of(self.config)  # before a process is started: its file may be refused
        super().__init__(EngineClient(self.config), sessions)
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._loading_tokenizer = self._tokenizer_thread.submit(Tokenizer.load, self.config)
        self._input: InputProcessor | None = None
        self._output = OutputProcessor()
        self._streams: dict[str, RequestStream] = {}
        self._numbers = itertools.count()
        self._receiving: asyncio.Task[None] | None = None
        self._loaded = asyncio.Event()
        self._dead: PagemillError | None = None
        self._died = asyncio.Event()

    # --- life ---

    async def ready(self) -> EngineReady:
        """Waits until the model is loaded. Raises what kept it from loading, or `EngineDeadError`."""
        return (await self._inputs()).ready

    @property
    def is_ready(self) -> bool:
        return self._input is not None and self._dead is None

    @property
    def max_model_len(self) -> int | None:
        """None until the model is loaded."""
        return None if self._input is None else self._input.ready.max_model_len

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    async def wait_dead(self) -> PagemillError:
        """Waits until this engine can not serve any more, and says why."""
        await self._died.wait()
        assert self._dead is not None
        return self._dead

    @property
    def error(self) -> PagemillError | None:
        """Why this engine can not serve any more; None while it can."""
        return self._dead

    async def shutdown(self) -> None:
        """Ends the engine process and waits for it. What still runs gets `EngineDeadError`. May be called twice."""
        loaded = self.is_ready
        self._die(EngineDeadError("the engine was shut down"))
        await self._client.close(now=not loaded)
        if self._receiving is not None:
            self._receiving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiving
        self._tokenizer_thread.shutdown(wait=False, cancel_futures=True)
        self._sessions.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # --- requests ---

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> AsyncIterator[RequestOutput]:
        """Yields what is new, as it comes; the last output is `finished`. Leaving the iterator aborts the request.

        A beam search yields its sequences once, the best first, and so does `best_of`. A smaller `priority` is more
        urgent; `tenant` is whose the request is. Raises `InvalidRequestError`, `StepFailedError` or `EngineDeadError`.
        """
        stream = await self.submit(prompt, sampling_params, request_id, priority=priority, tenant=tenant)
        try:
            async for output in stream:
                yield output
        finally:
            stream.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
    ) -> RequestStream:
        """As `generate`, but the request is checked and under way when this returns."""
        return await self._submit(prompt, sampling_params, request_id, priority, tenant)

    async def fork(
        self,
        request_id: str,
        sampling_params: SamplingParams | BeamSearchParams | None = None,
        new_request_id: str | None = None,
        *,
        index: int = 0,
        priority: int = 0,
    ) -> RequestStream:
        """Another request that goes on from what a running one has brought so far, with parameters of its own.

        Its prompt is the running one's and the tokens of its sequence `index` (the stream's `prompt_token_ids` says
        which), its answer that of any request with this prompt. It shares all blocks, and takes none until the two
        diverge. Raises `RequestNotFoundError`, and `InvalidRequestError` for no sequence of it, or a beam.
        """
        state = self.running(request_id)
        if not 0 <= index < len(state.sequences):
            raise InvalidRequestError(
                f"the request {request_id!r} has {len(state.sequences)} sequences, and none with the index {index}; "
                f"name one from 0 on"
            )
        if state.searches:
            raise InvalidRequestError(
                f"the request {request_id!r} is a beam search, whose sequences are not known before its end; wait for "
                f"that"
            )
        tokens = state.prompt_token_ids + state.sequences[index].token_ids
        prompt = {"prompt_token_ids": tokens, "cache_salt": state.space.cache_salt}
        fork_of = state.engine_id, index
        return await self._submit(prompt, sampling_params, new_request_id, priority, state.space.tenant, fork_of)

    def running(self, request_id: str, space: Namespace | None = None) -> RequestState:
        """A request that has not ended; None: whosever it is. Raises `RequestNotFoundError`."""
        stream = self._streams.get(request_id)
        if stream is None or (space is not None and stream.state.space != space):
            raise RequestNotFoundError(
                f"no request {request_id!r} is running; to go on from one that has ended, give all of it as a prompt"
            )
        return stream.state

    async def requests(self, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> list[RunningRequest]:
        """Those of a namespace that have not ended, and where their KV blocks lie between two steps."""
        found = await self._sequences()
        states = [stream.state for stream in self._streams.values() if stream.state.space == (tenant, cache_salt)]
        return [
            RunningRequest(state.request_id, state.prompt_token_ids, found[state.engine_id])
            for state in states
            if state.engine_id in found
        ]

    async def _submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | BeamSearchParams | None,
        request_id: str | None,
        priority: int,
        tenant: str,
        fork_of: tuple[str, int] | None = None,
    ) -> RequestStream:
        arrival_s = time.monotonic()
        inputs = await self._inputs()
        request_id = self._new_request_id(request_id)
        params = sampling_params if sampling_params is not None else SamplingParams()
        processed = await self._tokenize(
            inputs.process, prompt, params, request_id, priority=priority, arrival_s=arrival_s, tenant=tenant
        )
        processed.request.fork_of = fork_of
        return self._start(processed)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, cache_salt: str = "", **template: Any
    ) -> Prompt:
        """A conversation as a prompt for `generate`; see `InputProcessor.render_chat`."""
        inputs = await self._inputs()
        return await self._tokenize(inputs.render_chat, messages, cache_salt=cache_salt, **template)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their iterators finish with `finish_reason` "abort". Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            stream = self._streams.get(name)
            if stream is not None:
                self._release(stream)
                stream.abort()

    def session(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> AsyncSession:
        """A conversation that goes on where its last turn ended, under a name of its own in this namespace."""
        return AsyncSession(self, name, Namespace(tenant, cache_salt))

    async def sessions(self, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> list[SessionRecord]:
        """The sessions of a namespace, the last used first."""
        turns = await self._session_turns()
        return await self._tokenize(turns.store.list, Namespace(tenant, cache_salt))

    async def pin(
        self,
        prompt: Prompt,
        *,
        name: str,
        expires_s: float | None = None,
        cache_salt: str = "",
        tenant: str = DEFAULT_TENANT,
    ) -> PinInfo:
        """As `LLM.pin`."""
        inputs = await self._inputs()
        request_id = self._new_request_id(None)
        processed = await self._tokenize(pin_request, inputs, prompt, request_id, name, expires_s, cache_salt, tenant)
        stream = self._start(processed)
        try:
            async for _ in stream:
                pass
        finally:
            stream.close()
        return pin_of(await self.pins(), name, Namespace(tenant, processed.request.cache_salt))

    async def tokenizer(self) -> Tokenizer:
        """The one that this engine uses."""
        return (await self._inputs()).tokenizer

    # --- inside ---

    async def _inputs(self) -> InputProcessor:
        if self._receiving is None and self._dead is None:
            self._receiving = asyncio.create_task(self._receive())
        await self._loaded.wait()
        if self._dead is not None:
            raise self._dead
        assert self._input is not None
        return self._input

    async def _tokenize(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """In the one thread that encodes: a long prompt must not hold up everybody's events."""
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._tokenizer_thread, functools.partial(function, *args, **kwargs))
        try:
            await asyncio.wait({work})
        finally:
            work.cancel()
        if work.cancelled():  # by `shutdown`, which leaves nothing in the thread's queue
            raise self._dead or EngineDeadError("the engine was shut down")
        return work.result()

    async def _session_turns(self) -> SessionTurns:
        return SessionTurns(self._sessions, await self._inputs(), Path(self.config.model).stem)

    def _new_request_id(self, wanted: str | None) -> str:
        request_id = f"request-{next(self._numbers)}" if wanted is None else wanted
        self._check_unused(request_id)
        return request_id

    def _start(self, processed: ProcessedInput) -> RequestStream:
        """Sends a request that has passed all checks to the engine."""
        self._check_unused(processed.request_id)
        if self._dead is not None or self._input is None:
            raise self._dead or EngineDeadError("the engine is not loaded")
        # Steps under way may still bring tokens of an earlier request of this name: the engine's is never used again.
        processed.request.request_id = f"{processed.request_id}#{next(self._numbers)}"
        self._client.send(processed.request)
        stream = RequestStream(self._output.add(processed, self._input.tokenizer), self._release)
        self._streams[processed.request_id] = stream
        return stream

    def _check_unused(self, request_id: str) -> None:
        if request_id in self._streams:
            raise InvalidRequestError(
                f"a request with the id {request_id!r} is still running; give each its own", param="request_id"
            )

    def _release(self, stream: RequestStream) -> None:
        """Forgets the request; one that the engine still runs is aborted. Its name may be another's by now."""
        if self._streams.get(stream.request_id) is not stream:
            return
        del self._streams[stream.request_id]
        self._output.remove(stream.state)
        if self.on_request_end is not None:
            self.on_request_end(stream.state)
        if not stream.state.finished:
            self._client.send(AbortRequests([stream.state.engine_id]))

    async def _receive(self) -> None:
        """Takes everything the engine sends, until it ends."""
        try:
            await self._client.connect()
            fault: EngineFault | None = None
            while (message := await self._client.receive()) is not None:
                match message:
                    case StepOutputs():
                        self._distribute(message)
                    case EngineStats() | PinList() | SequenceList() | KVBlocks():
                        self._answered(message)
                    case Refused():
                        self._answered(error_of(message.error_type, message.message, message.param))
                    case LoadProgress():
                        self.load_progress = (message.done, message.total)
                        if self._on_progress is not None:
                            self._on_progress(message.done, message.total)
                    case EngineReady() if self._loaded.is_set():
                        self._answered(message)
                    case EngineReady():
                        self._input = InputProcessor(await asyncio.wrap_future(self._loading_tokenizer), message)
                        self._loaded.set()
                    case EngineFault():
                        fault = message
            status = await self._client.wait()
            self._die(cause_of_death(fault, status, loaded=self._input is not None))
        except PagemillError as error:
            self._die(error)
            await self._client.close(now=True)
        except Exception as error:
            self._die(EngineDeadError(f"the front end failed: {type(error).__name__}: {error}"))
            await self._client.close(now=True)
            raise

    def _distribute(self, message: StepOutputs) -> None:
        update = self._output.process(message.outputs)
        if update.stopped:
            self._client.send(FinishSequences(update.stopped))
        for state in update.changed:
            stream = self._streams[state.request_id]
            if state.has_news:
                stream.wake()
            if state.finished:
                self._release(stream)

    def _die(self, error: PagemillError) -> None:
        if self._dead is not None:
            return
        self._dead = error
        self._died.set()
        self._loaded.set()
        streams, self._streams = self._streams, {}
        self._output = OutputProcessor()  # what the last steps still bring belongs to nobody
        for stream in streams.values():
            stream.wake(error)
        while self._asked:
            self._answered(error)
