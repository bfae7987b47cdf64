"""A scheduler and the real memory manager over a simulated device, and requests whose tokens are known before."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
from simulated_device import VOCAB, SimulatedDevice, hidden_sum, likeliest, next_token

from eager_drafter import SeesTrees
from pagemill.errors import KVMemoryError
from pagemill.memory.digest import root_digest
from pagemill.memory.eviction import POLICIES
from pagemill.memory.manager import MemoryManager
from pagemill.memory.work import Load
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.sampling.random import sequence_seed
from pagemill.scheduling.beam import BeamSearch, Hypothesis, row_params
from pagemill.scheduling.forecast import TenantLengths
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Pinning, Request
from pagemill.scheduling.step_plan import StepResult

EOS = 7
LOWER = 1000
"""The first lower frame."""


def make_request(
    name,
    prompt,
    max_tokens,
    *,
    n=1,
    seed=1,
    priority=0,
    salt="",
    ignore_eos=False,
    arrival_s=0.0,
    pin=None,
    tenant="default",
    in_session=False,
    pooling=None,
):
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        params=SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos),
        seed=seed,
        priority=priority,
        arrival_s=arrival_s,
        root=root_digest(b"model", "f32", "sim", str(Namespace(tenant, salt))),
        max_len=len(prompt) + max(max_tokens, 1),
        pin=None if pin is None else Pinning(pin, Namespace(tenant, salt), 30.0),
        tenant=tenant,
        in_session=in_session,
        pooling=None if pooling is None else PoolingParams(pooling_type=pooling, normalize=False),
    )


def expected_vector(request: Request) -> float:
    """Returns what the simulated device gives for it."""
    tokens = request.prompt_token_ids
    if request.pooling.reads_all_tokens:
        return np.float32(hidden_sum(tokens, 0, len(tokens))[0] / len(tokens))
    return hidden_sum(tokens, len(tokens) - 1, len(tokens))[0]


def expected(request: Request, index: int) -> list[int]:
    tokens = list(request.prompt_token_ids)
    while request.samples and len(tokens) < request.max_len:
        tokens.append(next_token(sequence_seed(request.seed, index), tokens))
        if tokens[-1] == EOS and not request.params.ignore_eos:
            break
    return tokens[len(request.prompt_token_ids) :]


def make_search(name, prompt, max_tokens, width, *, salt="", tenant="default", **params):
    """A request for a beam search."""
    request = make_request(name, prompt, max_tokens, salt=salt, tenant=tenant)
    request.beam = BeamSearchParams(width, max_tokens, **params)
    request.params = row_params(request.beam, 1)
    return request


def expected_of_search(request: Request) -> list[Hypothesis]:
    search = BeamSearch(request.beam, frozenset([EOS]), request.max_len - len(request.prompt_token_ids))
    beams: list[list[int]] = [[]]
    while beams:
        candidates = [likeliest(request.prompt_token_ids + beam, request.params.logprobs) for beam in beams]
        beams = [[*beams[beam], token] for beam, token in search.advance(beams, candidates)]
    return search.hypotheses


class Oracle(SeesTrees):
    """Drafts what will come, wrong at a random place of some drafts, and the more of them the better.

    leaves: how often it leaves drafts to the device. branches: the most branches of a sequence's drafts.
    """

    answers = None

    def may_draft(self, rows) -> bool:
        return self.random.random() < 0.5

    def __init__(self, seed: int, most: int = 6, right: float = 0.8, leaves: float = 0.0, branches: int = 0) -> None:
        self.leaves = leaves
        self.branches = branches
        self.random = random.Random(seed)
        self.most = most
        self.right = right

    def propose(self, room, rows, budget, limit_s, branches):
        drafts = {}
        for sequence, most in room.items():
            tokens, seed = list(sequence.tokens), sequence_seed(sequence.request.seed, sequence.index)
            known = len(tokens)
            for _ in range(min(most, budget, self.random.randint(0, self.most))):
                right = self.random.random() < self.right
                tokens.append(next_token(seed, tokens) if right else self.random.randrange(VOCAB))
            if len(tokens) > known:
                left = self.leaves and self.random.random() < self.leaves
                first = [-1] * (len(tokens) - known) if left else tokens[known:]
                drafts[sequence] = [first, *self.branches_of(first, sequence.tokens, seed)]
                budget -= len(tokens) - known
        return drafts

    def branches_of(self, first, known, seed):
        """Paths that leave the first one somewhere, each for a token that may be right, as may be what follows it."""
        paths = []
        for _ in range(self.random.randint(0, self.branches)):
            path = first[: self.random.randrange(len(first))]
            left, length = first[0] < 0, self.random.randint(len(path) + 1, len(first))
            path.append(-2 if left else (next_token(seed, known + path), 8)[self.random.random() < 0.3])
            while len(path) < length:
                path.append(-1 if left else next_token(seed, known + path))
            if path != first[: len(path)]:
                paths.append(path)
        return paths

    def note_step(self, tokens, drafts, accepted, seconds, work):
        pass


class OffloadStore:
    """Takes what is evicted, and brings it back some steps later, except for what it loses on the way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.memory: MemoryManager | None = None
        self.blocks: dict[tuple[bytes, int], dict[int, bytes]] = {}
        self.under_way: list[tuple[int, Load]] = []
        self.arrived = self.asked = 0

    def stored(self, digests, found, preempted) -> int:
        assert self.memory is not None
        self.asked += 1
        reach = self.memory.reach(digests, self.blocks.__contains__)
        assert reach >= found
        return reach

    def step(self, bench: Bench, wait: bool = False) -> None:
        ready = [load for delay, load in self.under_way if delay == 0 or wait]
        self.under_way = [] if wait else [(delay - 1, load) for delay, load in self.under_way if delay]
        for load in ready:
            arrived = [self.random.random() < 0.9 for _ in load.blocks]
            for block, frame, whole in zip(load.blocks, load.frames, arrived, strict=True):
                if whole:
                    bench.device.frames[frame] = dict(self.blocks[block])
                    self.arrived += 1
                else:
                    self.blocks.pop(block, None)
                    bench.device.frames[frame] = {}
            bench.scheduler.finish_load(load.id, arrived, bench.now)

    def take(self, bench: Bench) -> None:
        for frame, name in bench.memory.take_saves():
            self.blocks[name.digest, name.group] = dict(bench.device.frames[frame])
        self.under_way += [(self.random.randrange(4), load) for load in bench.scheduler.take_loads()]


class Bench:
    """A scheduler, its memory and a device, with up to `depth` steps planned ahead of the commit.

    settles: commits all steps in flight where the scheduler does not plan ahead. foresees: admits what will fit later.
    """

    def __init__(
        self,
        *,
        frames=64,
        block_size=4,
        windows=(None,),
        max_num_seqs=8,
        budget=16,
        caching=True,
        depth=1,
        tier=None,
        policy="lru",
        lower=0,
        payback_steps=None,
        drafter=None,
        settles=False,
        foresees=False,
    ):
        self.tier = None if tier is None else OffloadStore(tier)
        order = POLICIES[policy](0.1)
        self.memory = MemoryManager(
            frames, block_size, list(windows), caching, order, tier is not None, streamed_frames=(LOWER, lower)
        )
        if payback_steps is not None:
            self.memory.compaction.payback_steps, self.memory.compaction.segment = payback_steps, 4
        if self.tier is not None:
            self.tier.memory = self.memory
        self.scheduler = Scheduler(
            self.memory,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            eos_token_ids=frozenset([EOS]),
            ageing_s=10.0,
            enable_prefix_caching=caching,
            stored=None if self.tier is None else self.tier.stored,
            swap_blocks=0 if self.tier is None else frames,
            compacts=payback_steps is not None,
            drafter=drafter,
        )
        if foresees:
            self.scheduler.state.lengths = TenantLengths()
        self.device = SimulatedDevice(block_size, list(windows))
        self.depth = depth
        self.settles = settles
        self.flights: deque[tuple[StepResult, int]] = deque()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.found: dict[str, list[Hypothesis]] = {}
        self.vectors: dict[str, float] = {}
        self.first_step: dict[str, int] = {}
        self.steps = self.drafted = 0
        self.now = 0.0

    def step(self, faulty=frozenset()) -> None:
        self.now += 1.0
        if self.tier is not None:
            self.tier.step(self)
        while self.settles and self.flights and not self.scheduler.plans_ahead:
            self.commit()
        plan = self.scheduler.schedule(self.now)
        if self.tier is not None:
            self.tier.take(self)
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            assert len(set(plan.rows.tolist())) == len(plan.rows)
            self.drafted += len(plan.draft_tokens)
            self.steps += 1
            self.device.apply(plan)
            self.flights.append((self.device.run(plan, faulty), plan.step))
        elif not self.flights and not self.scheduler.num_loading:
            assert not self.scheduler.has_work(), "nothing can run, and nothing will change that"
        if self.flights and (plan is None or len(self.flights) >= self.depth):
            self.commit()
        self.memory.check()
        waiting = [one for one in self.scheduler.sequences() if one.was_preempted and self.tier is not None]
        assert all(digest in self.memory.wanted for one in waiting for digest in one.digests[: one.scheduled // 4])
        assert len(self.memory.wanted) <= len({digest for one in waiting for digest in one.digests})
        for one in () if self.flights else self.scheduler.state.running:
            assert one.table.num_entries == -(-one.table.length // self.memory.block_size), "more than it has tokens"

    def commit(self) -> None:
        result, step = self.flights.popleft()
        self.take(self.scheduler.commit(result, self.now, step))

    def botch(self) -> None:
        """A step with a plan that the device cannot carry out."""
        while self.flights:
            self.commit()
        plan = self.scheduler.schedule(self.now)
        if self.tier is not None:
            self.tier.take(self)
        if plan is not None:
            self.device.botch(plan)
            self.take(self.scheduler.lose_plan(plan, RuntimeError("the device is gone"), self.now))
        self.memory.check()

    def lose(self, frames: set[int]) -> None:
        """A lower tier has lost what lay in these frames."""
        for frame in frames:
            self.device.frames[frame] = {}
        self.take(self.scheduler.lose(frames, RuntimeError("lost"), self.now))
        self.memory.check()

    def take(self, updates) -> None:
        for update in updates:
            key = (update.sequence.request.request_id, update.sequence.index)
            if update.tokens:
                self.outputs.setdefault(key, []).extend(update.tokens)
                self.first_step.setdefault(key[0], self.steps)
            if update.hypothesis is not None:
                self.found.setdefault(key[0], []).append(update.hypothesis)
            if update.finish_reason is not None:
                assert key not in self.reasons
                self.reasons[key] = update.finish_reason
                if update.finish_reason == "stop" and update.sequence.request.pooling is not None:
                    (self.vectors[key[0]],) = update.sequence.embedding

    def resize(self, frames, *, fails=False) -> None:
        """When all that is under way has ended. What lies in frames that go is lost. fails: the device does."""
        while self.flights:
            self.commit()
        if self.tier is not None:
            self.tier.step(self, wait=True)
        least, held = self.scheduler.least_frames, self.memory.num_frames - self.memory.num_available
        running, before = self.scheduler.num_running, self.memory.num_frames
        try:
            plan = self.scheduler.resize(frames, self.now)
        except KVMemoryError:
            assert frames != least  # larger ones may be refused too: guarantees that are shares are rounded
            self.scheduler.check_size(least)
            assert self.memory.num_frames - self.memory.num_available == held
            return
        assert self.memory.num_frames == frames
        assert self.scheduler.num_running == running or frames < held
        if self.tier is not None:
            self.tier.take(self)
        if fails:
            self.device.botch(plan)
            self.take(self.scheduler.undo_resize(plan, before, RuntimeError("the device is gone"), self.now))
            assert self.memory.num_frames == before
            self.memory.check()
            return
        self.device.apply(plan)
        self.scheduler.commit(StepResult(), self.now)
        for frame in [frame for frame in self.device.frames if frames <= frame < LOWER]:
            del self.device.frames[frame]
        self.memory.check()

    def run(self) -> None:
        self.run_steps()
        self.assert_all_free()

    def run_steps(self, limit=5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work():
                break
            self.step()
        assert not self.scheduler.has_work(), "it does not end"

    def assert_all_free(self) -> None:
        self.scheduler.pins.clear(self.now)
        assert self.scheduler.pins.num_frames == 0
        stats = self.memory.stats()
        assert stats.frames_active == stats.blocks_streamed == 0
        assert stats.frames_free + stats.frames_cached == stats.frames
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        for load in self.scheduler.tenants:
            assert load.running == load.waiting == load.late == load.rows == load.account.active == 0
        assert sorted(self.scheduler.state.batch.free_rows) == list(range(self.scheduler.state.max_num_seqs))
        assert len(self.scheduler.state.waiting) == len(self.scheduler.state.pending) == 0
