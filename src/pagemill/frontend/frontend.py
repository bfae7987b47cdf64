"""Frontend: requests, turns of sessions, pins and queries, over any engine; `LLM` and `AsyncLLM` are its faces.

A request is prepared (checked and tokenized), started, and released. Coroutines wait for the worker and for the
engine's answers alone: where both are inline, they never wait.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.engine import queries
from pagemill.engine.kv_map import KVMap
from pagemill.engine.messages import AdapterInfo, EngineReady, PinInfo, SequenceInfo
from pagemill.engine.stats import EngineStats
from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    PinNotFoundError,
    RequestTooLargeError,
    shown,
)
from pagemill.frontend.client import EngineClient
from pagemill.frontend.input_processor import InputProcessor, Prompt, as_mapping, size_of
from pagemill.frontend.outputs import RunningRequest
from pagemill.frontend.rates import Charge, Rates
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.running_requests import RunningRequests
from pagemill.frontend.session_turns import SessionTurns
from pagemill.frontend.sleep import Sleep
from pagemill.frontend.worker import Worker
from pagemill.lora_request import LoRARequest, check_lora_request
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.sessions.record import SessionRecord
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits
from pagemill.text.tokenizer import Tokenizer

MAX_PIN_NAME = 128
MAX_TENANTS = 4096
"""Tenants that one engine knows: each has figures, which every answer of `/metrics` has."""

Params = SamplingParams | BeamSearchParams


class Frontend(RunningRequests):
    """One loaded engine's front end. All methods belong to one thread; `worker` runs what takes long."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        store: SessionStore,
        model: str,
        worker: Worker,
        tenants: Mapping[str, TenantLimits],
    ) -> None:
        """model: its name, which sessions keep. tenants: limits at the start."""
        super().__init__(client, tokenizer, Rates(tenants))
        self.tenants = dict(tenants)
        """Limits of the tenants as they are now; one that has never been set may be missing."""
        self.worker = worker
        self.inputs = InputProcessor(tokenizer, lambda: client.facts)
        self.turns = SessionTurns(store, self.inputs, model)
        self.sleep = Sleep(client)

    # --- requests ---

    def limits(self, tenant: str) -> TenantLimits:
        """Returns a tenant's limits as they stand."""
        return self.tenants.get(tenant, TenantLimits())

    def charge(self, tenant: str, num_prompts: int, width: int | None = None) -> Charge:
        """Counts the prompts of one call against its tenant's minute. Raises what `Rates.charge` does.

        width: sequences of each prompt, where all are started before any has ended: raises `RequestTooLargeError` if
        their tenant may not have so many running and waiting, even if it has no others.
        """
        limits, rows = self.limits(tenant), self.client.max_num_seqs
        if width is not None and limits.max_waiting and rows:  # else one alone is refused too, or waits for an engine
            most = limits.number("max_running", rows, least=1)
            running = max(1, (rows if most is None else min(most, rows)) // width)
            if num_prompts > (places := running + limits.max_waiting):
                raise RequestTooLargeError(
                    f"this has {num_prompts} prompts, and tenant {tenant!r} may have {running} of them running and "
                    f"{limits.max_waiting} waiting (max_waiting); send at most {places} at a time, or raise its limits",
                    param="prompt",
                )
        return self.rates.charge(tenant, num_prompts)

    async def prepare(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        charge: Charge | None = None,
        **how: Any,
    ) -> RequestState:
        """Returns a request that can be started. Takes and raises what `InputProcessor.process` does, and raises
        `RateLimitError` and `TooManyWaitingError`.

        lora_request: an adapter, which is loaded first if it is not loaded yet. charge: that of its call; None for a
        request of its own.
        """
        owner, request_id = Namespace(how.get("tenant", DEFAULT_TENANT)).tenant, self.new_request_id(request_id)
        if charge is None:
            self.rates.check(owner)
        self.worker.require_room(owner)
        if (adapter := await self._adapter(lora_request)) is not None:
            how["adapter"] = adapter.number
        size = size_of(prompt)
        request = await self.worker.run_for(owner, size, self.inputs.process, prompt, params, request_id, **how)
        request.charge = charge
        return request

    async def prepare_fork(
        self, origin: RequestState, index: int, params: Params | None, request_id: str | None, *, priority: int
    ) -> RequestState:
        """Returns a request that goes on from what a running one's sequence `index` has brought so far."""
        if not 0 <= index < len(origin.sequences):
            raise InvalidRequestError(
                f"the request {origin.request_id!r} has {len(origin.sequences)} sequences, and none with the index "
                f"{index}; name one from 0 to {len(origin.sequences) - 1}",
                param="index",
            )
        if origin.asked.beam is not None:
            raise InvalidRequestError(
                f"the request {origin.request_id!r} is a beam search, whose sequences are not known before its end; "
                f"wait for that"
            )
        tokens, space = origin.prompt_token_ids + origin.sequences[index].output.token_ids, origin.space
        prompt = {"prompt_token_ids": tokens, "cache_salt": space.cache_salt}
        how: dict[str, Any] = {"priority": priority, "tenant": space.tenant, "adapter": origin.asked.adapter}
        how["ends"] = origin.ends
        fork = await self.prepare(prompt, params, request_id, **how)
        fork.asked.fork_of = origin.engine_id, index
        return fork

    async def prepare_turn(
        self,
        name: str,
        space: Namespace,
        content: str | Sequence[int] | Sequence[Mapping[str, Any]],
        params: SamplingParams | None,
        wanted_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **how: Any,
    ) -> RequestState:
        """Returns the request of a session's next turn, which `end_turn` must follow.

        Takes and raises what `SessionTurns.begin` does. lora_request: as in `prepare`.
        """
        self.rates.check(space.tenant)
        self.worker.require_room(space.tenant)
        how["adapter"] = await self._adapter(lora_request)
        begun: list[RequestState] = []
        left, lock = False, threading.Lock()

        def begin() -> None:
            request = self.turns.begin(name, space, content, params, request_id, **how)
            with lock:
                begun.append(request)
                if left:  # while it was being begun
                    self.end_turn(request)

        request_id = self.new_request_id(wanted_id)
        try:
            await self.worker.run_for(space.tenant, size_of(content), begin)
        except BaseException:
            with lock:
                left = True
                for request in begun:
                    self.end_turn(request)
            raise
        return begun[0]

    def start(self, request: RequestState) -> None:
        """Sends a prepared request to the engine. Raises `InvalidRequestError` or `EngineDeadError`."""
        try:
            self.sleep.check_awake()
            request.charge = request.charge or self.rates.charge(request.space.tenant)
            request.charge.use(len(request.prompt_token_ids))
            self.begin(request)
        except BaseException as error:
            self.uncharge(request, error)
            self.end_turn(request)
            raise

    async def requests(self, space: Namespace) -> list[RunningRequest]:
        """Returns a namespace's requests that have not ended, and where their KV blocks lie between two steps."""
        found: dict[str, list[SequenceInfo]] = {}
        for sequence in (await self.client.ask(queries.SequencesQuery())).sequences:
            found.setdefault(sequence.request_id, []).append(sequence)
        return [
            RunningRequest(request.request_id, request.prompt_token_ids, found[request.engine_id])
            for request in self._running.values()
            if request.space == space and request.engine_id in found
        ]

    # --- sessions ---

    async def commit_turn(self, request: RequestState) -> None:
        """Appends a finished request's answer to its session, if it is a turn of one that has not ended."""
        if request.turn is not None:
            await self.worker.run(self.turns.commit, request)

    def end_turn(self, request: RequestState) -> None:
        """Gives the session of a turn back; one that was not committed leaves no trace."""
        if request.turn is not None:
            self.turns.store.release(request.turn.begun)

    async def kv_blocks(self, session: SessionRecord) -> dict[str, int]:
        """Returns, by tier, how many blocks the next turn of a session would find."""
        query = queries.BlocksQuery(session.token_ids, *session.space, adapter=session.adapter)
        return (await self.client.ask(query)).by_tier

    # --- pins ---

    async def prepare_pin(
        self, prompt: Prompt, name: str, expires_s: float | None, cache_salt: str, tenant: str
    ) -> RequestState:
        """Returns a request for the prompt's whole blocks, which become a pin. Raises `InvalidRequestError`."""
        is_name = isinstance(name, str) and 0 < len(name) <= MAX_PIN_NAME and name.isprintable()
        if not is_name or "/" in name or name in (".", ".."):
            raise InvalidRequestError(
                f"the pin's name is {shown(name)}; it must be 1 to {MAX_PIN_NAME} printable characters without a "
                f"slash, and not '.' or '..'",
                param="name",
            )
        is_number = isinstance(expires_s, (int, float)) and not isinstance(expires_s, bool)
        if expires_s is not None and not (is_number and 0 < expires_s < math.inf):
            raise InvalidRequestError(
                f"expires_s is {shown(expires_s)}; it must be above 0 seconds, or None to keep the pin",
                param="expires_s",
            )
        if Namespace(tenant, cache_salt).cache_salt:
            prompt = {**as_mapping(prompt), "cache_salt": cache_salt}
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
        request = await self.prepare(prompt, params, tenant=tenant)
        asked, size = request.asked, self.client.facts.block_size
        whole = len(asked.prompt_token_ids) // size * size
        if not whole:
            raise InvalidRequestError(
                f"pin {name!r} has {len(asked.prompt_token_ids)} tokens; blocks are shared whole, so pin {size} at "
                f"least",
                param="prompt",
            )
        del asked.prompt_token_ids[whole:]
        asked.pin, asked.pin_expires_s = name, expires_s
        return request

    async def pin_of(self, request: RequestState) -> PinInfo:
        """Returns the pin that a finished request became. Raises why it failed, or `PinNotFoundError`."""
        if request.error is not None:
            raise request.error
        name = request.asked.pin
        for pin in await self.pins():
            if (pin.tenant, pin.cache_salt, pin.name) == (*request.space, name):
                return pin
        raise PinNotFoundError(f"pin {name!r} has expired, or was unpinned, as soon as it was computed", param="name")

    async def pins(self) -> list[PinInfo]:
        """Returns all pins, in the order in which they came."""
        return (await self.client.ask(queries.PinsQuery())).pins

    async def unpin(self, name: str, space: Namespace) -> None:
        """Ends a pin. Raises `PinNotFoundError`."""
        await self.client.ask(queries.Unpin(name, *space))
        self.made_pins.remove(name, space)

    # --- the engine ---

    async def stats(self) -> EngineStats:
        """Returns a snapshot taken between two steps."""
        return await self.client.ask(queries.StatsQuery())

    async def _adapter(self, lora: LoRARequest | None) -> AdapterInfo | None:
        """Returns an adapter, which is loaded by then. Raises `InvalidRequestError` and `ModelLoadError` children."""
        if (lora := check_lora_request(lora)) is None:
            return None
        wanted = (lora.lora_name, lora.lora_int_id, lora.lora_path)
        for adapter in self.client.facts.adapters:
            if (adapter.name, adapter.number, adapter.path) == wanted:
                return adapter
        facts = await self.client.ask(queries.LoadAdapter(lora))
        return next(adapter for adapter in facts.adapters if adapter.number == lora.lora_int_id)

    async def reset_prefix_cache(self) -> bool:
        """See `LLM.reset_prefix_cache`."""
        return (await self.client.ask(queries.ResetPrefixCache())).done

    async def kv_map(self, space: Namespace | None, with_tree: bool) -> KVMap:
        """Returns what lies where in the KV memory, as a namespace may see it; None: as an admin may.

        Requests have the names that their callers know, unless they have just ended.
        """
        tenant, cache_salt = (None, "") if space is None else space
        found = await self.client.ask(queries.KVMapQuery(tenant, cache_salt, with_tree))
        for table in found.tables:
            if table.kind == "request" and (request := self._by_engine_id.get(table.name)) is not None:
                table.name = request.request_id
        return found

    async def resize_kv_memory(self, kv_memory: int | float | str | None) -> EngineReady:
        """See `LLM.resize_kv_memory`."""
        self.sleep.check_awake()
        return await self.client.ask(queries.ResizePool(kv_memory))

    async def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """See `LLM.set_tenant`."""
        limits = TenantLimits.read(name, limits)
        known = self.client.facts.tenants
        if name not in known and len(known) >= MAX_TENANTS:
            raise ConfigError(
                f"tenant {name!r} would be number {len(known) + 1}; there can be {MAX_TENANTS}; use one that is there",
                param="tenants",
            )
        await self.client.ask(queries.SetTenant(name, limits))
        self.tenants[name] = limits
        self.turns.store.set_limit(name, limits)
        self.rates.set_limits(name, limits)
        self.worker.limit(name, limits.max_waiting)
