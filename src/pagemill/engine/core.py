"""EngineCore: one synchronous loop over schedule, run and commit, which drives an executor."""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import partial

from pagemill.config import EngineConfig
from pagemill.engine import faults, intake, watching
from pagemill.engine.adapters import Adapters
from pagemill.engine.build import build, frames_taken
from pagemill.engine.kv_map import KVMap
from pagemill.engine.messages import (
    EngineReady,
    EngineRequest,
    Held,
    KVBlocks,
    Peering,
    PinInfo,
    PinList,
    SequenceInfo,
    SequenceList,
    SequenceOutput,
)
from pagemill.engine.outputs import outputs_of
from pagemill.engine.preparing import Prepared, Preparing
from pagemill.engine.publishing import Publisher
from pagemill.engine.queries import BlocksQuery, KVMapQuery
from pagemill.engine.stats import EngineStats
from pagemill.engine.step_loop import StepLoop
from pagemill.engine.tenant_stats import tenant_stats
from pagemill.engine.tiers import blocks_by_tier, find_by_tier, tier_figures
from pagemill.errors import EngineDeadError, InvalidRequestError, PinNotFoundError, TooFewBlocksError
from pagemill.executor.interface import Executor
from pagemill.executor.load import open_executor
from pagemill.kvcache.sizing import num_frames
from pagemill.lora_request import LoRARequest
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.memory.manager import Residency
from pagemill.namespace import Namespace
from pagemill.scheduling.sequence import SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan, StepResult
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits

LOAD_WAIT_S = 0.05
"""How long a step with nothing to compute waits for blocks from lower tiers, before messages are looked at again."""
PREPARING_WAIT_S = 0.001
"""How long such a step waits where requests are being prepared."""


class EngineCore:
    """Requests in as token ids, outputs out as token ids, one step at a time. Not thread-safe.

    A fault in a step fails the requests that cause it and no other. Raises `ModelLoadError` or `ConfigError` children
    if the engine cannot be built.

    progress(done, total): bytes of weights, called while they load.
    executor: what runs the model; None for what the settings ask for.
    publishes: whether `take_held` tells which blocks come and go, and what work takes.
    peering: how it gives blocks to other engines and fetches theirs; None: it does not.

    scheduler, memory: what the loop drives beside the executor.
    tiers: offload stores and the transfers to and from them; None without any.
    ready: the facts about the engine, brought up to date by what changes them.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Callable[[int, int], None] | None = None,
        executor: Executor | None = None,
        publishes: bool = False,
        peering: Peering | None = None,
    ) -> None:
        self.config = config
        self.executor = open_executor(config, progress) if executor is None else executor
        self._adapters = Adapters(config, self.executor)
        try:
            self.memory, self.tiers, self.scheduler, self._streamed = build(config, self.executor, publishes, peering)
        except BaseException:
            self.executor.close()
            raise
        try:
            self._warm_up = self.executor.warm_up()
        except BaseException:
            if self.tiers is not None:
                self.tiers.close()
            self.executor.close()
            raise
        self._frames_at_start = self.memory.num_frames
        self._gave_back = False
        """True while the pool is as small as "used" has made it."""
        self.ready = self._describe()
        self._random = random.Random(config.seed)
        self._preparing = Preparing(self.executor, self._root_of, self._schedule)
        self._ended: list[SequenceUpdate] = []
        """Ends between two steps, which the next step tells."""
        self._publisher = Publisher(self.memory, self.tiers, config.max_num_batched_tokens) if publishes else None
        self._loop = StepLoop(self.executor, self.scheduler, self._save_evicted, self._start_loads, self._note_step)
        self._stalled_s = 0.0
        self._was_stuck = False
        self._steps = self._prompt_tokens = self._generated_tokens = 0

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises `InvalidRequestError` children, and then holds nothing of it.

        What it says of its fleet counts at once, and of requests that are refused too: it is not said again.
        """
        self.scheduler.note_served_elsewhere(request.served_elsewhere)
        self.scheduler.tenants.note_parts(request.guaranteed_here)
        if request.request_id in self.scheduler.state.requests or request.request_id in self._preparing:
            raise InvalidRequestError(
                f"request id {request.request_id!r} is in use; give each request its own", param="request_id"
            )
        if request.seed is None and request.params.seed is None:
            request.seed = self._random.getrandbits(63)  # here: requests may be prepared in any order
        self._preparing.add(request)

    def _schedule(self, request: EngineRequest, prepared: Prepared) -> None:
        """Hands a request to the scheduler, which holds what is prepared for it. Raises as `add_request` does."""
        root = self._root_of(request)
        asked = intake.scheduled(request, self.ready, seed=request.seed or 0, root=root, prepared=prepared)
        try:
            self.scheduler.add(asked, request.fork_of)
        except TooFewBlocksError as error:
            at_start = self._frames_at_start
            if self._gave_back and error.blocks <= self.scheduler.tenants.may_have(asked.tenant, at_start, error.limit):
                raise intake.may_come_again(error.blocks, self.memory.num_frames, at_start) from None
            raise
        self._prompt_tokens += len(request.prompt_token_ids)
        if self.tiers is not None:
            self.tiers.note_held(request, root)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests and takes back what they hold; unknown ids are ignored."""
        request_ids = [*request_ids]
        self._preparing.drop(request_ids)
        for request_id in request_ids:
            self.scheduler.abort(request_id, time.monotonic())

    def finish(self, sequences: Iterable[tuple[str, int]]) -> None:
        """Ends sequences `(request_id, index)` whose stop string the front end has seen; unknown ones are ignored."""
        for request_id, index in sequences:
            self.scheduler.finish(request_id, index, time.monotonic())

    def set_tenant(self, name: str, limits: TenantLimits) -> EngineReady:
        """Makes a tenant known, or changes its limits, as `set_tenants` does."""
        return self.set_tenants({name: limits})

    def set_tenants(self, changed: Mapping[str, TenantLimits]) -> EngineReady:
        """Makes tenants known, or changes their limits, all at once, between two steps. Returns what the engine is now.

        Raises `ConfigError`, and changes nothing, for what the pool or requests under way do not allow.
        """
        self.scheduler.set_tenants(changed)
        return self._refresh()

    def load_adapter(self, lora: LoRARequest) -> EngineReady:
        """Loads a LoRA adapter unless it is loaded, between two steps. Returns what the engine is now.

        Raises `InvalidRequestError` and `ModelLoadError` children, and then loads nothing.
        """
        self._drain()
        self._adapters.require(lora)
        return self._refresh()

    def has_work(self) -> bool:
        return bool(self._ended or self._preparing) or self.scheduler.has_work()

    def rest(self) -> float | None:
        """Ends pins that have expired, and cached blocks that nobody has used for too long.

        Returns in how many seconds to call it again, and `take_held` behind it; None if time alone changes nothing
        more.
        """
        now = time.monotonic()
        due = self.scheduler.expire(now)
        self._save_evicted()
        if self._publisher is not None:
            due = min(due, now + self._publisher.again_s())
        return None if due == math.inf else max(0.0, due - now)

    def step(self) -> list[SequenceOutput]:
        """Plans a step, runs it and commits it. Returns what it brought; nothing if there was no work.

        Where the executor overlaps steps, the one planned before is committed instead, and there is work as long as one
        is in flight.
        """
        self._finish_loads(0.0)
        refused = self._preparing.pass_on()
        begun = time.monotonic()
        updates, self._ended = self._ended, []
        updates += self._loop.settle() + self._end_lost(set(), begun)
        brought = self._loop.run(partial(self.scheduler.schedule, begun), begun)
        if brought is None:
            self._save_evicted()
            updates += self._loop.drain() if self._loop.in_flight else self._wait_for_loads(begun)
            return refused + self._outputs(updates)
        updates += brought
        self._was_stuck = False
        if self.config.check_invariants:
            self.memory.check()
        return refused + self._outputs(updates)

    def _note_step(self, plan: StepPlan, seconds: float, ran_s: float) -> None:
        """Counts a step that is over, and tells those who learn from it how long it took (see `StepLoop`)."""
        self._steps += 1
        generating = plan.num_generating
        self.scheduler.note_step(plan, seconds)
        if self._publisher is not None:
            self._publisher.note_step(seconds, plan.num_tokens - generating, generating)
        if self.tiers is not None:
            self.tiers.note_step(plan, ran_s)

    def _wait_for_loads(self, now: float) -> list[SequenceUpdate]:
        """Waits a little for blocks from lower tiers, since nothing can be computed without them.

        Ends the request whose turn it is if nothing could run twice in a row, and no load is under way.
        """
        self._start_loads()
        stuck = self.scheduler.has_work() and not self.scheduler.num_loading
        ended = self.scheduler.give_up(faults.stuck(), now) if stuck and self._was_stuck else []
        self._was_stuck = stuck
        begin = time.monotonic()
        self._finish_loads(LOAD_WAIT_S)
        self._stalled_s += time.monotonic() - begin
        if self._preparing and not self.scheduler.has_work():
            time.sleep(PREPARING_WAIT_S)
        return ended

    def take_held(self) -> Held | None:
        """Returns what whoever routes requests here is to know since the last call; None if it knows all."""
        return None if self._publisher is None else self._publisher.take()

    def resize(self, kv_memory: int | float | str | None) -> EngineReady:
        """Gives the KV pool another size, and returns the engine's facts.

        kv_memory: as in the settings; "used" for what the present requests need; None for the size at the start.

        Cached blocks that no longer fit are evicted, and sequences are preempted if they must be. Raises ConfigError or
        KVMemoryError, and changes nothing, for a size that cannot be. Raises ResizeFailedError if the device fails on
        the way: the pool keeps its size, and what needs blocks that were to be moved has ended.
        """
        if kv_memory is None:
            frames = self._frames_at_start
        elif kv_memory == "used":
            frames = self.scheduler.least_frames
        else:
            frame_bytes, (free, total) = self.executor.facts.frame_bytes, self.executor.memory()
            taken = frames_taken(self.executor.facts, self._streamed)
            free += (self.memory.num_frames + taken) * frame_bytes
            frames = max(1, num_frames(frame_bytes, 0, free=free, total=total, kv_memory=kv_memory) - taken)
        self._drain()
        self._end_loads()
        self.scheduler.check_size(frames)
        before = self.memory.num_frames
        if frames > before:
            self.executor.resize(frames)
        plan = self.scheduler.resize(frames, time.monotonic())
        try:
            self._save_evicted()
            lost = self.executor.apply(plan)
            if frames < before:
                self.executor.resize(frames)
        except BaseException as error:
            ended, refusal = faults.undo_resize(self.scheduler, plan, before, error)
            self._ended += ended
            if isinstance(error, EngineDeadError):
                raise
            self.executor.resize(before)
            if not isinstance(error, Exception):
                raise
            raise refusal from error
        now = time.monotonic()
        self._ended += self._end_lost(set(lost), now) + self.scheduler.commit(StepResult(), now, plan.step)
        self._gave_back = kv_memory == "used"
        return self._refresh()

    def reset_prefix_cache(self) -> bool:
        """Forgets the answers that drafts come from, and all cached blocks of the pool, which go nowhere. Returns False
        while requests or pins hold blocks: then all blocks stay."""
        self._drain()
        self._save_evicted()
        done = self.memory.reset()
        if (drafter := self.scheduler.drafter) is not None and drafter.answers is not None:
            drafter.answers.clear()
        return done

    def pins(self) -> PinList:
        """Returns what is pinned now."""
        now, pins = time.monotonic(), self.scheduler.pins
        pins.expire(now)
        infos = [
            PinInfo(
                name=pin.name,
                tenant=pin.space.tenant,
                cache_salt=pin.space.cache_salt,
                num_tokens=pin.num_tokens,
                num_blocks=len(pin.blocks),
                expires_in_s=None if pin.expires_s is None else pin.expires_s - now,
            )
            for pin in pins.list()
        ]
        self._refresh()
        return PinList(infos)

    def unpin(self, name: str, space: Namespace) -> PinList:
        """Ends a pin, and returns those that are left. Raises PinNotFoundError."""
        now, pins = time.monotonic(), self.scheduler.pins
        pins.expire(now)
        if not pins.unpin(name, space, now):
            raise PinNotFoundError(f"there is no pin {name!r}; it may have expired; see the list of pins", param="name")
        return self.pins()

    def sequences(self) -> SequenceList:
        """Returns the sequences that have not finished, and where their blocks lie."""
        memory, infos = self.memory, []
        for one in self.scheduler.sequences():
            places = Residency(0, 0) if one.table is None else memory.residency(one.table)
            infos.append(
                SequenceInfo(
                    request_id=one.request.request_id,
                    index=one.index,
                    running=one.table is not None,
                    num_tokens=len(one.tokens),
                    kv_blocks=blocks_by_tier(self._streamed, places),
                )
            )
        return SequenceList(infos)

    def kv_blocks(self, request: BlocksQuery) -> KVBlocks:
        """Returns where the blocks lie that a prompt beginning with these tokens would find."""
        digests: list[bytes] = []
        extend_chain(digests, self.root(request, request.adapter), request.token_ids, self.memory.block_size)
        tiers = None if self.tiers is None else self.tiers.offload
        return KVBlocks(find_by_tier(self.memory, self._streamed, tiers, digests))

    def kv_map(self, request: KVMapQuery) -> KVMap:
        """Returns what lies where in the KV memory, as somebody may see it. Raises `InvalidRequestError` children."""
        view = None
        if request.tenant is not None:
            adapters = [b"", *(adapter.digest for adapter in self._adapters.infos())]
            roots = {self.root(request, adapter) for adapter in adapters}
            view = watching.View(self.memory.tenants[request.tenant], roots)
        return watching.kv_map(self.memory, self.scheduler, self.stats(), self._streamed.tier, view, request.with_tree)

    def stats(self) -> EngineStats:
        """Returns counters since the start, and the state now."""
        memory, compaction, drafts = self.memory, self.memory.compaction, self.scheduler.drafts
        answers = None if self.scheduler.drafter is None else self.scheduler.drafter.answers
        below = {} if self.tiers is None else self.tiers.offload.blocks_by_tenant()
        graphs = self.executor.graphs()
        return EngineStats(
            **asdict(memory.stats()),
            **memory.occupancy()._asdict(),
            **memory.scatter()._asdict(),
            **tier_figures(self.tiers),
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            preemptions=self.scheduler.preemptions,
            step_prompt_tokens=self.scheduler.controller.prompt_tokens,
            running_limit=self.scheduler.controller.max_running,
            watermark_blocks=self.scheduler.controller.watermark,
            preempted_tokens_recomputed=self.scheduler.state.recomputed_tokens,
            preempted_tokens_swapped_in=self.scheduler.state.loading.swapped_in_tokens,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            draft_rows=drafts.num_drafts,
            draft_tokens=drafts.num_draft_tokens,
            accepted_tokens=drafts.num_accepted_tokens,
            draft_branches=drafts.num_branches,
            accepted_branches=drafts.num_accepted_branches,
            drafted_per_position=drafts.num_draft_tokens_per_pos.copy(),
            accepted_per_position=drafts.num_accepted_tokens_per_pos.copy(),
            draft_source_requests=0 if answers is None else answers.num_requests,
            draft_source_tokens=0 if answers is None else answers.num_tokens,
            prefix_queried_tokens=self.scheduler.prefix_queried_tokens,
            prefix_hit_tokens=self.scheduler.prefix_hit_tokens,
            compaction_copies=compaction.copies,
            compactions=compaction.sequences,
            stalled_s=self._stalled_s,
            block_bytes=self.executor.facts.frame_bytes,
            graphs=graphs.number,
            graph_bytes=graphs.nbytes,
            tier_blocks={tier: sum(held.values()) for tier, held in below.items()},
            tenants={one.account.name: tenant_stats(one, below) for one in self.scheduler.tenants},
        )

    def close(self) -> None:
        """Ends every request, and keeps what can be found again, if there is a tier that outlives the process."""
        self.abort([*self._preparing, *self.scheduler.request_ids()])
        with contextlib.suppress(EngineDeadError):
            self._drain()
        self.scheduler.pins.clear(time.monotonic())
        try:
            if self.tiers is not None:
                while self.tiers.transfers.loading:
                    self._finish_loads(LOAD_WAIT_S)
                self._save_evicted()
                if self.tiers.offload.lasting:
                    self.tiers.keep(self.memory.cached_blocks())
                self.tiers.close()
                self.tiers = None
        finally:
            self.executor.close()

    def _drain(self) -> None:
        """Takes in what is in flight, between two steps."""
        self._ended += self._loop.drain()

    def _save_evicted(self) -> None:
        """Copies evicted blocks out of their frames, before the device does anything."""
        saves = self.memory.take_saves()
        if self.tiers is not None:
            self.tiers.save(saves)

    def _start_loads(self) -> None:
        """Begins loads into frames, after the device has copied out of these what was there before."""
        for load in self.scheduler.take_loads():
            if self.tiers is not None and not self.tiers.load(load):
                self.scheduler.finish_load(load.id, [False] * len(load.blocks), time.monotonic())

    def _end_loads(self) -> None:
        """Waits for all loads: those under way, and those that a plan has begun which came to nothing. No step is in
        flight."""
        if self.scheduler.num_loading and self.memory.has_copies:
            only_edits = partial(self.scheduler.state.batch.plan, {})
            self._ended += (self._loop.run(only_edits, time.monotonic()) or []) + self._loop.drain()
        while self.scheduler.num_loading:
            self._start_loads()
            self._finish_loads(LOAD_WAIT_S)

    def _finish_loads(self, wait_s: float) -> None:
        """Takes in the loads that are over; waits up to `wait_s` seconds for one."""
        if self.tiers is not None and self.tiers.transfers.loading:
            for load, arrived in self.tiers.transfers.finished(wait_s).items():
                self.scheduler.finish_load(load, arrived, time.monotonic())

    def _refresh(self) -> EngineReady:
        """Brings `ready` up to date, and returns it."""
        self.ready = self._describe()
        return self.ready

    def _describe(self) -> EngineReady:
        """Returns the engine's facts, with the pool, the pins and the limits as they are now."""
        facts, num_frames = self.executor.facts, self.memory.num_frames
        return EngineReady(
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            longest_sequence=self.scheduler.longest_sequence(facts.max_model_len),
            tenants=[one.account.name for one in self.scheduler.tenants],
            block_size=self.memory.block_size,
            num_frames=num_frames,
            num_groups=len(self.memory.windows),
            kv_bytes=num_frames * facts.frame_bytes,
            kv_memory=(num_frames + frames_taken(facts, self._streamed)) * facts.frame_bytes,
            eos_token_ids=sorted(facts.eos_token_ids),
            hidden_size=facts.hidden_size,
            has_head=facts.has_head,
            model=facts.description,
            kv_format=f"{facts.kv.name}{self._streamed.description}",
            host_bytes=0 if self.tiers is None else self.tiers.host_bytes,
            adapters=self._adapters.infos(),
            fingerprint=facts.fingerprint,
            peer_address="" if self.tiers is None or self.tiers.peers is None else self.tiers.peers.address,
            kv_format_name=facts.kv_format,
            numerics=facts.numerics,
            tells_disk=self.tiers is not None and self.tiers.watch is not None,
            disk="" if self.tiers is None else self.tiers.where,
            warm_up=self._warm_up,
        )

    def root(self, request: EngineRequest | BlocksQuery | KVMapQuery, adapter: bytes = b"") -> bytes:
        """Returns the digest in which the chain of a request's blocks begins. adapter: its adapter's digest, if any."""
        facts, space = self.executor.facts, Namespace(request.tenant or DEFAULT_TENANT, request.cache_salt)
        return namespace_root(space, facts.fingerprint, facts.kv_format, facts.numerics, adapter)

    def _root_of(self, request: EngineRequest) -> bytes:
        return self.root(request, self._adapters.digest(request.adapter))

    def _end_lost(self, frames: set[int], now: float) -> list[SequenceUpdate]:
        return faults.end_lost(self.executor, self.scheduler, frames, now)

    def _outputs(self, updates: list[SequenceUpdate]) -> list[SequenceOutput]:
        outputs = outputs_of(updates, self.memory)
        self._generated_tokens += sum(len(output.new_token_ids) for output in outputs)
        return outputs
