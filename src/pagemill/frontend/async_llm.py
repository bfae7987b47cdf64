"""AsyncLLM: generation as async iterators, with the engine in a process of its own.

Everything here runs in one event loop, except tokenizing, which has two threads. The loop of this class takes what the
engine sends, detokenizes it and checks stop strings at once; a slow consumer finds all that has gathered in one delta.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagemill.config import EngineConfig, Settings, config_for, takes_settings
from pagemill.engine.messages import EngineReady, PinInfo
from pagemill.errors import (
    EngineDeadError,
    EngineRestartingError,
    EngineStoppedError,
    InvalidRequestError,
    PagemillError,
    RequestNotFoundError,
)
from pagemill.fixed_arguments import OF_CALLS, takes_fixed
from pagemill.frontend.async_controls import AsyncControls
from pagemill.frontend.client import EngineKeeper, ServedEngine
from pagemill.frontend.frontend import Frontend, Params
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import RequestOutput, RunningRequest
from pagemill.frontend.pooling import EmbeddingRequestOutput, embedding_of
from pagemill.frontend.process_client import ProcessClient
from pagemill.frontend.rates import Charge, RateStatus
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.request_stream import RequestStream
from pagemill.frontend.session import AsyncSession
from pagemill.frontend.supervisor import RestartLimits, Supervisor
from pagemill.frontend.worker import WorkerThreads
from pagemill.hub import resolve_model
from pagemill.lora_request import LoRARequest
from pagemill.namespace import Namespace
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.sessions.record import SessionInfo
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits
from pagemill.text.tokenizer import Tokenizer


@dataclass(kw_only=True)
class _Arguments(Settings):
    """Declares the arguments of `AsyncLLM`; there is no instance."""

    on_progress: Callable[[int, int], None] | None = None
    max_engine_restarts: int = 3
    engine_restart_window_s: float = 300.0


class AsyncLLM(AsyncControls):
    """Serves one model from a child process, which starts loading at once.

    Settings are `EngineConfig`'s. `on_progress(done, total)` is told how loading goes, in the event loop.
    `RestartLimits` say how often a process that dies is started again. Requests that had given nothing yet are sent
    to the new one, the others end with `EngineRestartingError`.
    Raises `ModelNotFoundError`, `ConfigError` and `UnknownArgumentError` here, everything else about the model from
    `ready()`. Every coroutine waits until the model is loaded, and raises `EngineDeadError` once the engine is gone.
    Use it as `async with AsyncLLM(model) as llm`, or call `shutdown()`.
    """

    @takes_settings(_Arguments)
    def __init__(
        self,
        model: str,
        *,
        on_progress: Callable[[int, int], None] | None = None,
        max_engine_restarts: int = 3,
        engine_restart_window_s: float = 300.0,
        **settings: Any,
    ) -> None:
        restarts = RestartLimits(
            max_engine_restarts=max_engine_restarts, engine_restart_window_s=engine_restart_window_s
        )
        self.config = config_for("AsyncLLM", model, settings)
        self.model = model
        """The model as the caller named it."""
        self.config.model = str(resolve_model(model))
        self.load_progress: tuple[int, int] | None = None
        self.on_request_end: list[Callable[[RequestState], None]] = []
        """Each is called in the event loop with each request when it has ended."""
        self._on_progress = on_progress
        self._sessions = SessionStore.of(self.config)  # before a process is started: its file may be refused
        self._client, self._supervisor = self.start_engine(restarts)
        self._worker = WorkerThreads()
        for tenant, limits in self.config.tenants.items():
            self._worker.limit(tenant, limits.max_waiting)
        self._loading_tokenizer = self._worker.submit(Tokenizer.load, self.config)
        self._frontend: Frontend | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded = asyncio.Event()
        self._died = asyncio.Event()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> AsyncLLM:
        """Returns what `AsyncLLM(model, ...)` does with these settings."""
        settings = {field.name: getattr(engine_args, field.name) for field in fields(EngineConfig)}
        return cls(settings.pop("model"), **settings)

    def start_engine(self, restarts: RestartLimits) -> tuple[ServedEngine, EngineKeeper]:
        """Starts an engine with the settings in `config`. Returns its client, and who keeps it running."""
        client = ProcessClient(self.config)
        return client, Supervisor(client, restarts, self.note_progress)

    # --- life ---

    async def ready(self) -> EngineReady:
        """Waits until the model is loaded, and returns what the engine is now. Raises what kept it from loading."""
        return (await self._ready()).client.facts

    @property
    def is_ready(self) -> bool:
        """True while requests are answered; False while the model loads, and while another engine is started."""
        return self._frontend is not None and self.error is None and self.restarting is None

    @property
    def restarting(self) -> EngineRestartingError | None:
        """What became of the engine in whose place another is being started; None where none is."""
        return self._client.interrupted

    @property
    def restarts(self) -> tuple[int, int]:
        """Returns how many engines took the place of one that had died, and how many requests were sent to them."""
        return self._supervisor.num_restarts, 0 if self._frontend is None else self._frontend.num_sent_again

    @property
    def facts(self) -> EngineReady | None:
        """The engine's facts, or the last ones before it died; None until the model is loaded."""
        return None if self._frontend is None else self._client.facts

    @property
    def max_model_len(self) -> int | None:
        """The engine's limit; None until the model is loaded."""
        return None if self.facts is None else self.facts.max_model_len

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    @property
    def error(self) -> PagemillError | None:
        """Why this engine cannot serve any more; None while it can."""
        return self._client.ended

    @property
    def is_running(self) -> bool:
        """True while this engine can serve, or will once it is loaded or started again."""
        return self.error is None

    @property
    def errored(self) -> bool:
        """True once it cannot serve any more, see `error`."""
        return self.error is not None

    async def respond(self) -> None:
        """Returns once the engine and the tokenizer's threads have answered, between two steps and two prompts."""
        frontend = await self._ready()
        await asyncio.gather(frontend.stats(), self._worker.respond())

    async def wait_dead(self) -> PagemillError:
        """Waits until this engine cannot serve any more, and returns why."""
        await self._died.wait()
        assert self.error is not None
        return self.error

    async def shutdown(self) -> None:
        """Ends the engine process and waits for it. What still runs gets `EngineDeadError`. May be called twice."""
        loaded = self.is_ready
        self._die(EngineStoppedError())
        try:
            await self._client.close(now=not loaded)
            if self._receiving is not None:
                self._receiving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._receiving
        finally:
            self._worker.close()
            self._sessions.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # --- requests ---

    @takes_fixed(OF_CALLS, InvalidRequestError)
    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answer as it comes; the last output is `finished`. Leaving the iterator aborts the request.

        Each output holds all that has come so far, unless `SamplingParams.output_kind` asks for something else. A beam
        search yields its sequences once, the best first, and so does `best_of`. A smaller `priority` is more
        urgent; `tenant` is whose the request is; `lora_request` is its LoRA adapter, which the engine loads with its
        first request. Raises `InvalidRequestError`, `StepFailedError` or `EngineDeadError`.
        """
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request}
        stream = await self.submit(prompt, sampling_params, request_id, **how)
        with contextlib.closing(stream):
            async for output in stream:
                yield output

    @takes_fixed(OF_CALLS, InvalidRequestError)
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        lora_request: LoRARequest | None = None,
        cache_salt: str = "",
        **template: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answer to a conversation as `generate` does. `template` goes to the chat template, see
        `LLM.chat`, and what is wrong with it is raised as there."""
        prompt = await self.render_chat(messages, cache_salt=cache_salt, tenant=tenant, **template)
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request}
        answer = self.generate(prompt, sampling_params, request_id, **how)
        async with contextlib.aclosing(answer):
            async for output in answer:
                yield output

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        lora_request: LoRARequest | None = None,
        charge: Charge | None = None,
    ) -> RequestStream:
        """Returns the answer as `generate` yields it, once the request is checked and under way. charge: that of the
        call that it belongs to, see `charge`."""
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request, "charge": charge}
        how["arrival_s"] = time.monotonic()
        frontend = await self._ready()
        return RequestStream(frontend, await frontend.prepare(prompt, sampling_params, request_id, **how))

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = DEFAULT_TENANT,
        lora_request: LoRARequest | None = None,
        charge: Charge | None = None,
    ) -> EmbeddingRequestOutput:
        """Returns the embedding of a prompt; see `LLM.embed`. Raises what `generate` raises. charge: as in `submit`."""
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request, "charge": charge}
        how["arrival_s"] = time.monotonic()
        frontend = await self._ready()
        pooling = PoolingParams() if pooling_params is None else pooling_params
        request = await frontend.prepare(prompt, None, request_id, pooling=pooling, **how)
        with contextlib.closing(RequestStream(frontend, request)) as stream:
            async for _ in stream:
                pass
        return embedding_of(request)

    async def charge(self, num_prompts: int, *, width: int | None = None, tenant: str = DEFAULT_TENANT) -> Charge:
        """Counts the prompts of one call against its tenant's limits per minute, all at once, before the first of them
        is submitted within the charge's context.

        width: sequences of each, where all prompts are submitted before any has ended. Raises `RateLimitError` if not
        all can begin now, `InvalidRequestError` children if they never can, and counts nothing.
        """
        return (await self._ready()).charge(tenant, num_prompts, width)

    async def fork(
        self,
        request_id: str,
        sampling_params: Params | None = None,
        new_request_id: str | None = None,
        *,
        index: int = 0,
        priority: int = 0,
    ) -> RequestStream:
        """Returns the answer to another request, which goes on from what a running one has brought so far.

        Its prompt is the running one's and the tokens of its sequence `index` (the stream's `prompt_token_ids` says
        which), its answer that of any request with this prompt. It shares all blocks, and takes none until the two
        diverge. Raises `RequestNotFoundError`, and `InvalidRequestError` for no sequence of it, or a beam.
        """
        frontend, origin = await self._ready(), self.running(request_id)
        fork = await frontend.prepare_fork(origin, index, sampling_params, new_request_id, priority=priority)
        return RequestStream(frontend, fork)

    def running(self, request_id: str, space: Namespace | None = None) -> RequestState:
        """Returns a request that has not ended, of any namespace if that is None. Raises `RequestNotFoundError`."""
        if self._frontend is None:
            raise RequestNotFoundError(
                f"no request {request_id!r} is running: the model is being loaded; wait for ready()"
            )
        return self._frontend.running(request_id, space)

    async def requests(self, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> list[RunningRequest]:
        """Returns a namespace's requests that have not ended, and where their KV blocks lie between two steps."""
        return await (await self._ready()).requests(Namespace(tenant, cache_salt))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their iterators finish with `finish_reason` "abort". Unknown ids are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if self._frontend is not None:
                with contextlib.suppress(RequestNotFoundError):
                    self._frontend.abort(self._frontend.running(name))

    # --- sessions and pins ---

    def session(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> AsyncSession:
        """Returns a conversation that goes on where its last turn ended, under a name of its own in this namespace."""
        return AsyncSession(self._ready, name, Namespace(tenant, cache_salt))

    async def sessions(
        self, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT, all_namespaces: bool = False
    ) -> list[SessionInfo]:
        """Returns the sessions of a namespace, or of all, the last used first."""
        frontend = await self._ready()
        space = None if all_namespaces else Namespace(tenant, cache_salt)
        return await frontend.worker.run(frontend.turns.store.list, space)

    async def pin(
        self,
        prompt: Prompt,
        *,
        name: str,
        expires_s: float | None = None,
        cache_salt: str = "",
        tenant: str = DEFAULT_TENANT,
    ) -> PinInfo:
        """See `LLM.pin`."""
        frontend = await self._ready()
        request = await frontend.prepare_pin(prompt, name, expires_s, cache_salt, tenant)
        with contextlib.closing(RequestStream(frontend, request)) as stream:
            async for _ in stream:
                pass
        return await frontend.pin_of(request)

    # --- the engine: see also `AsyncControls` ---

    def rates(self, tenant: str) -> dict[str, RateStatus]:
        """Returns a tenant's limits on requests and tokens per minute as they stand, those that it has."""
        return {} if self._frontend is None else self._frontend.rates.status(tenant)

    def limits(self, tenant: str) -> TenantLimits:
        """Returns a tenant's limits as they stand; none until the model is loaded."""
        return TenantLimits() if self._frontend is None else self._frontend.limits(tenant)

    # --- inside ---

    async def _ready(self) -> Frontend:
        loop = asyncio.get_running_loop()
        if self._loop not in (None, loop):
            raise InvalidRequestError(
                "this AsyncLLM is used in one event loop, and was called from another; make one for each loop"
            )
        self._loop = loop
        if self._receiving is None and self.error is None:
            self._receiving = asyncio.create_task(self._receive())
        await self._loaded.wait()
        if self.error is not None:
            raise self.error
        assert self._frontend is not None
        return self._frontend

    async def _receive(self) -> None:
        """Takes everything the engine sends, until it ends."""
        try:
            await self._client.load(self.note_progress)
            tokenizer = await asyncio.wrap_future(self._loading_tokenizer)
            name, tenants = Path(self.config.model).stem, self.config.tenants
            frontend = Frontend(self._client, tokenizer, self._sessions, name, self._worker, tenants)
            frontend.on_request_end = self._request_ended
            self._frontend = frontend
            self._loaded.set()
            await self._supervisor.run(frontend)
        except PagemillError as error:
            self._die(error)
            await self._client.close(now=self._frontend is None)
        except Exception as error:
            self._die(EngineDeadError(f"the front end failed: {type(error).__name__}: {error}"))
            await self._client.close()
            raise

    def _request_ended(self, request: RequestState) -> None:
        for callback in self.on_request_end:
            self._call(callback, request)

    def note_progress(self, done: int, total: int) -> None:
        """Takes how loading goes."""
        self.load_progress = (done, total)
        if self._on_progress is not None:
            self._call(self._on_progress, done, total)

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        """Calls what callers gave; what it raises is the event loop's to tell, and ends nothing."""
        asyncio.get_running_loop().call_soon(callback, *args)

    def _die(self, error: PagemillError) -> None:
        if self.error is not None:
            return
        self._client.end(error)
        self._died.set()
        self._loaded.set()
        if self._frontend is not None:
            self._frontend.fail(error)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
