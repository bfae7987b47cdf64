"""The scheduler and the real memory manager over a simulated device: random loads, and a model with the answers."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import deque
from itertools import chain, combinations, count, repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_device import VOCAB, SimulatedDevice, hidden_sum, likeliest, next_token

from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    KVMemoryError,
    PinLimitError,
    PoolTooSmallError,
    RequestTooLargeError,
)
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.eviction import POLICIES
from pagemill.memory.manager import MemoryManager
from pagemill.memory.work import Load
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.sampling.random import sequence_seed
from pagemill.scheduling import preemption
from pagemill.scheduling.beam import BeamSearch, Hypothesis, row_params
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Pinning, Request
from pagemill.scheduling.step_plan import StepResult
from pagemill.tenant_limits import TenantLimits

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
    """Of the simulated device."""
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


class Oracle:
    """Drafts what will come, wrong at a random place of some drafts, and the more of them the better.

    leaves: how often it leaves drafts to the device.
    """

    answers = None

    def may_draft(self, rows) -> bool:
        return self.random.random() < 0.5

    def __init__(self, seed: int, most: int = 6, right: float = 0.8, leaves: float = 0.0) -> None:
        self.leaves = leaves
        self.random = random.Random(seed)
        self.most = most
        self.right = right

    def propose(self, room, rows, budget, limit_s):
        drafts = {}
        for sequence, most in room.items():
            tokens, seed = list(sequence.tokens), sequence_seed(sequence.request.seed, sequence.index)
            known = len(tokens)
            for _ in range(min(most, budget, self.random.randint(0, self.most))):
                right = self.random.random() < self.right
                tokens.append(next_token(seed, tokens) if right else self.random.randrange(VOCAB))
            if len(tokens) > known:
                left = self.leaves and self.random.random() < self.leaves
                drafts[sequence] = [-1] * (len(tokens) - known) if left else tokens[known:]
                budget -= len(tokens) - known
        return drafts

    def verified(self, sequence, proposed, accepted):
        assert 0 <= accepted <= proposed

    def note_step(self, tokens, drafts, accepted, seconds, work):
        pass


class OffloadStore:
    """Takes what is evicted, and brings it back some steps later, except for what it loses on the way."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.memory: MemoryManager | None = None
        self.blocks: dict[tuple[bytes, int], dict[int, bytes]] = {}
        self.under_way: list[tuple[int, Load]] = []
        self.arrived = 0

    def stored(self, digests, found, preempted) -> int:
        assert self.memory is not None
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

    settles: commits all steps in flight where the scheduler does not plan ahead.
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
            compacts=payback_steps is not None,
            drafter=drafter,
        )
        self.device = SimulatedDevice(block_size, list(windows))
        self.depth = depth
        self.settles = settles
        self.flights: deque[StepResult] = deque()
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}
        self.found: dict[str, list[Hypothesis]] = {}
        self.vectors: dict[str, float] = {}
        self.first_step: dict[str, int] = {}
        self.digests: set[bytes] = set()
        self.steps = self.drafted = 0
        self.now = 0.0

    def step(self, faulty=frozenset()) -> None:
        self.now += 1.0
        if self.tier is not None:
            self.tier.step(self)
        while self.settles and self.flights and not self.scheduler.plans_ahead:
            self.commit()
        plan = self.scheduler.schedule(self.now)
        self.digests.update(digest for one in self.scheduler.sequences() for digest in one.digests)
        if self.tier is not None:
            self.tier.take(self)
        if plan is not None:
            assert plan.num_tokens <= self.scheduler.max_num_batched_tokens
            assert len(set(plan.rows.tolist())) == len(plan.rows)
            self.drafted += len(plan.draft_tokens)
            self.steps += 1
            self.device.apply(plan)
            self.flights.append(self.device.run(plan, faulty))
        elif not self.flights and not self.scheduler.num_loading:
            assert not self.scheduler.has_work(), "nothing can run, and nothing will change that"
        if self.flights and (plan is None or len(self.flights) >= self.depth):
            self.commit()
        self.memory.check()
        for one in () if self.flights else self.scheduler.state.running:
            assert one.table.num_entries == -(-one.table.length // self.memory.block_size), "more than it has tokens"

    def commit(self) -> None:
        self.take(self.scheduler.commit(self.flights.popleft(), self.now))

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
            assert frames < least
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
            assert load.running == load.waiting == load.rows == load.account.active == 0
        assert sorted(self.scheduler.state.batch.free_rows) == list(range(self.scheduler.state.max_num_seqs))
        assert not any(map(self.scheduler.state.pending.owned, self.digests))


prefixes = st.sampled_from([[], [1] * 9, [1] * 9 + [2] * 8, [3, 4] * 10])
prompts = st.builds(lambda a, b: (a + b) or [5], prefixes, st.lists(st.integers(0, VOCAB - 1), max_size=12))
requests = st.lists(
    st.tuples(
        prompts,
        st.integers(0, 20),
        st.integers(1, 3),
        st.integers(0, 3),
        st.integers(0, 2),
        st.sampled_from("ab"),
        st.sampled_from([None, None, False, True, "never"]),
        st.sampled_from(["default", "default", "one", "other"]),
    ),
    min_size=1,
    max_size=10,
)


tenant_limits = st.builds(
    TenantLimits,
    guaranteed_blocks=st.sampled_from(["0%", "0%", "20%", "50%"]),
    max_blocks=st.sampled_from([None, None, "60%", "100%"]),
    max_blocks_per_session=st.sampled_from([None, "30%"]),
    idle_timeout_s=st.sampled_from([None, 2.0]),
    max_running=st.sampled_from([None, 1, 2, 3]),
    weight=st.sampled_from([1, 3.0]),
)
scripts = st.lists(
    st.tuples(
        st.integers(0, 6),
        st.sampled_from(
            [
                "add",
                "add",
                "abort",
                "fault",
                "finish",
                "fork",
                "resize",
                "resize",
                "resize fails",
                "botch",
                "pin",
                "pin",
                "unpin",
                "limits",
                "talk",
                "lose",
            ]
        ),
        st.integers(0, 9),
    ),
    max_size=20,
)


@settings(max_examples=120, deadline=None)
@given(
    loads=requests,
    script=scripts,
    frames=st.integers(19, 40),
    windows=st.sampled_from([(None,), (5,), (None, 6), (3, 9, None)]),
    max_num_seqs=st.integers(3, 6),
    budget=st.sampled_from([6, 17, 64]),
    caching=st.booleans(),
    depth=st.sampled_from([1, 2, 3]),
    tier=st.one_of(st.none(), st.integers(0, 99)),
    limits=st.lists(tenant_limits, min_size=2, max_size=2),
    policy=st.sampled_from([*POLICIES]),
    lower=st.sampled_from([0, 0, 8, 60]),
    payback_steps=st.sampled_from([None, 0.1, 2]),
    drafts=st.one_of(st.none(), st.integers(0, 99)),
    leaves=st.sampled_from([0.0, 0.5, 1.0]),
    settles=st.booleans(),
)
def test_any_load_gives_the_tokens_of_a_lone_run(
    loads,
    script,
    frames,
    windows,
    max_num_seqs,
    budget,
    caching,
    depth,
    settles,
    tier,
    limits,
    policy,
    lower,
    payback_steps,
    drafts,
    leaves,
):
    """Same request, same tokens: beside others, of other tenants too, with preemptions, prefix hits, forks, beams,
    requests that sample nothing, embeddings, drafts right and wrong, the device's own among them, faults, aborts, steps
    ahead, pins, turns of sessions, limits that change, idle blocks that go, a pool that shrinks and grows, blocks that
    are streamed or moved together, and blocks that go to a lower tier and come back or get lost, lower frames that lose
    what they hold, a device that fails between steps. In the end every block is free."""
    bench = Bench(
        frames=frames * len(windows),
        windows=windows,
        max_num_seqs=max_num_seqs,
        budget=budget,
        caching=caching,
        depth=depth,
        settles=settles,
        tier=tier,
        policy=policy,
        lower=lower,
        payback_steps=payback_steps,
        drafter=None if drafts is None else Oracle(drafts, leaves=leaves),
    )
    waiting = [
        make_request(
            f"r{i}",
            prompt,
            most,
            n=n if most else 1,
            seed=seed,
            priority=priority,
            salt=salt,
            tenant=tenant,
            pooling=None if most else (None, "MEAN", "LAST")[n - 1],
        )
        if stopping is None or not most
        else make_search(f"r{i}", prompt, min(most, 9), n, salt=salt, tenant=tenant, early_stopping=stopping)
        for i, (prompt, most, n, seed, priority, salt, stopping, tenant) in enumerate(loads)
    ]
    names = ("one", "other")
    for name, each in zip(names, limits, strict=True):
        bench.scheduler.set_tenant(name, each)
    all_requests = list(waiting)
    disturbed: set[str] = set()
    numbers = count()

    def add() -> None:
        if waiting:
            request = waiting.pop()
            request.arrival_s = bench.now
            try:
                bench.scheduler.add(request)
            except RequestTooLargeError:
                promised = sum(tenant.guaranteed_blocks for tenant in bench.memory.tenants)
                least = min(bench.memory.num_frames - promised, bench.memory.tenants[request.tenant].max_blocks)
                most = bench.scheduler.tenants[request.tenant].limits.max_running or max_num_seqs
                assert least < frames * len(windows) or bench.scheduler.pins.num_frames or most < request.width[1]
                waiting.insert(0, request)

    def fork(name: str) -> None:
        origin = bench.scheduler.state.requests[name][-1]
        if origin.group is None and 0 < origin.num_output_tokens < 8:
            tenant = origin.request.tenant
            salt = "ab"[origin.request.root != root_digest(b"model", "f32", "sim", str(Namespace(tenant, "a")))]
            child = make_request(
                f"fork{len(all_requests)}", origin.tokens, 6, n=pick % 2 + 1, seed=pick, salt=salt, tenant=tenant
            )
            child.arrival_s = bench.now
            with contextlib.suppress(RequestTooLargeError):
                bench.scheduler.add(child, (name, origin.index))
                all_requests.append(child)

    def talk(pick: int) -> None:
        """The next turn of a session, which begins with all that an earlier request has said."""
        over = [r for r in all_requests if bench.reasons.get((r.request_id, 0)) in ("stop", "length") and not r.beam]
        if over:
            last = over[pick % len(over)]
            tokens = last.prompt_token_ids + bench.outputs.get((last.request_id, 0), []) + [8, 9]
            turn = make_request(f"turn{len(all_requests)}", tokens, 5, tenant=last.tenant, in_session=True)
            turn.root, turn.arrival_s = last.root, bench.now
            with contextlib.suppress(RequestTooLargeError):
                bench.scheduler.add(turn)
                all_requests.append(turn)

    def pin(pick: int) -> None:
        prompt, _, _, _, _, salt, _, tenant = loads[pick % len(loads)]
        whole = prompt[: len(prompt) // 4 * 4]
        if whole:
            name = f"pin{next(numbers)}"
            with contextlib.suppress(InvalidRequestError):  # no caching, or no room
                bench.scheduler.add(make_request(name, whole, 1, salt=salt, pin="xy"[pick % 2], tenant=tenant))

    for steps, action, pick in script:
        for _ in range(steps):
            bench.step()
        live = bench.scheduler.request_ids()
        if action == "add":
            add()
        elif action == "fault":
            bench.step(frozenset([pick % max_num_seqs]))
        elif action == "talk":
            talk(pick)
        elif action == "pin":
            pin(pick)
        elif action == "unpin":
            for tenant, salt in itertools.product(names, "ab"):
                bench.scheduler.pins.unpin("xy"[pick % 2], Namespace(tenant, salt), bench.now)
        elif action in ("resize", "resize fails"):
            bench.resize((pick * 4 + 4) * len(windows), fails=action == "resize fails")
        elif action == "botch":
            bench.botch()
        elif action == "lose":
            bench.lose({frame for frame in bench.memory.streamed.numbers if pick < 5 or frame % 5 == pick % 5})
        elif action == "limits":
            with contextlib.suppress(ConfigError):
                bench.scheduler.set_tenant(names[pick % 2], limits[pick // 2 % 2])
            bench.memory.check()
        elif live:
            name = live[pick % len(live)]
            if action != "fork":
                disturbed.add(name)
            if action == "abort":
                bench.scheduler.abort(name, bench.now)
            elif action == "fork":
                fork(name)
            else:
                bench.scheduler.finish(name, 0, bench.now)
            bench.memory.check()
    bench.run_steps()
    bench.scheduler.pins.clear(bench.now)
    for name in names:
        bench.scheduler.set_tenant(name, TenantLimits())
    bench.resize(max(frames * len(windows), bench.scheduler.least_frames))
    while waiting:
        add()
    bench.run()
    for name in ("default", *names):
        bench.scheduler.set_tenant(name, TenantLimits(idle_timeout_s=1.0))
    bench.scheduler.expire(bench.now + 1)
    bench.memory.check()
    assert bench.memory.stats().frames_free == bench.memory.num_frames
    for request in all_requests:
        if request.beam is not None:
            reasons = [bench.reasons.get((request.request_id, index)) for index in range(request.beam.beam_width)]
            if "error" in reasons:
                assert set(reasons) == {"error"}
            elif request.request_id not in disturbed:
                assert bench.found[request.request_id] == expected_of_search(request)
                assert reasons == [found.finish_reason for found in bench.found[request.request_id]]
            continue
        for index in range(request.params.n):
            tokens = bench.outputs.get((request.request_id, index), [])
            want = expected(request, index)
            if request.request_id in disturbed or bench.reasons.get((request.request_id, index)) == "error":
                assert tokens == want[: len(tokens)]
            else:
                assert tokens == want
                if request.pooling is not None:
                    assert bench.reasons[request.request_id, 0] == "stop"
                    assert bench.vectors[request.request_id] == expected_vector(request)
                    continue
                assert bench.reasons[request.request_id, index] == ("stop" if want[-1:] == [EOS] else "length")


def test_a_device_that_fails_while_frames_go_ends_what_was_being_moved_and_nothing_else():
    bench = Bench(frames=64, budget=64)
    bench.scheduler.add(make_request("low", [1] * 8, 1, pin="low"))
    bench.run_steps()
    cached = make_request("cached", [2] * 16, 1, ignore_eos=True)
    running = [make_request(f"r{i}", [3 + i] * 10, 12, ignore_eos=True) for i in range(3)]
    for request in (*running, make_request("high", [9] * 8, 1, pin="high"), cached):
        bench.scheduler.add(request)
    for _ in range(2):
        bench.step()
    gone = set(range(20, 64))

    def lies_there(table) -> bool:
        return bench.memory.lies_in(table, gone)

    lost = {one.request.request_id for one in bench.scheduler.state.running if lies_there(one.table)}
    assert lost == {"r2"}
    assert [pin.name for pin in bench.scheduler.pins.list() if lies_there(pin.table)] == ["high"]
    assert any(frame in gone for frame, _ in bench.memory.cached_blocks())
    bench.resize(20, fails=True)
    assert {name for (name, _), reason in bench.reasons.items() if reason == "error"} == lost
    assert [pin.name for pin in bench.scheduler.pins.list()] == ["low"]
    for request in (make_request("again", cached.prompt_token_ids, 2, seed=3), make_request("behind", [9] * 9, 2)):
        bench.scheduler.add(request)
        running.append(request)
    bench.run()
    assert all(bench.outputs[r.request_id, 0] == expected(r, 0) for r in running if r.request_id not in lost)


def test_a_device_that_fails_to_take_edits_of_a_table_ends_its_sequence():
    """Two forks compute the same block at once, and the second to commit it is to take the first one's."""
    bench = Bench(frames=32, budget=64)
    origin = make_request("origin", [1] * 9, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    bench.step()
    child = make_request("child", bench.scheduler.state.requests["origin"][0].tokens, 19, ignore_eos=True)
    bench.scheduler.add(child, ("origin", 0))
    while not bench.memory.core.pending.edits:
        bench.step()
    bench.resize(40, fails=True)
    assert bench.reasons == {("child", 0): "error"}
    bench.run()
    assert bench.outputs["origin", 0] == expected(origin, 0)


def test_a_device_that_fails_to_take_the_tokens_of_beams_ends_their_search():
    bench = Bench(frames=32, budget=64)
    other = make_request("other", [2] * 9, 6, ignore_eos=True)
    for request in (make_search("search", [1] * 9, 6, 2, ignore_eos=True), other):
        bench.scheduler.add(request)
    bench.step()
    bench.step()
    bench.resize(40, fails=True)
    assert bench.reasons == {("search", 0): "error", ("search", 1): "error"}
    bench.run()
    assert bench.outputs["other", 0] == expected(other, 0)


@pytest.mark.parametrize(("watermark", "enters"), [(0, True), (4, True), (5, False)])
def test_who_enters_beside_others_leaves_a_block_for_each_and_the_watermark(watermark, enters):
    """Of 12 blocks the first holds 4, and the second wants 3."""
    bench = Bench(frames=12, budget=64)
    bench.scheduler.add(make_request("first", [1] * 15, 2, ignore_eos=True))
    bench.step()
    bench.scheduler.controller.watermark = watermark
    bench.scheduler.add(make_request("second", [2] * 11, 2, ignore_eos=True))
    bench.step()
    assert (bench.first_step.get("second") == 2) == enters
    bench.run()
    assert bench.first_step["second"] == 3 - enters


def test_who_runs_alone_needs_no_watermark():
    bench = Bench(frames=12, budget=64)
    bench.scheduler.controller.watermark = 12
    bench.scheduler.add(make_request("alone", [1] * 40, 8, ignore_eos=True))
    bench.run()
    assert len(bench.outputs["alone", 0]) == 8


def test_right_drafts_take_fewer_steps_and_wrong_ones_as_many():
    steps = []
    for drafter in (None, Oracle(0, right=1.0), Oracle(0, right=0.0)):
        bench, request = Bench(drafter=drafter), make_request("r", range(20, 29), 30, ignore_eos=True)
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs["r", 0] == expected(request, 0)
        steps.append(bench.steps)
        counts = bench.scheduler.drafts
        assert counts.proposed == bench.drafted
        assert sum(counts.by_position) == counts.accepted == 30 - bench.steps
    plain, right, wrong = steps
    assert right <= plain // 2
    assert plain // 2 < wrong <= plain


def test_drafts_that_the_device_did_not_propose_are_not_counted():
    bench, request = Bench(drafter=Oracle(0, leaves=1.0)), make_request("r", range(20, 29), 60, ignore_eos=True)
    bench.scheduler.add(request)
    bench.run()
    assert bench.outputs["r", 0] == expected(request, 0)
    counts = bench.scheduler.drafts
    assert 0 < counts.proposed < bench.drafted
    assert sum(counts.by_position) == counts.accepted == 60 - bench.steps


@pytest.mark.parametrize("limits", [TenantLimits(), TenantLimits(max_blocks=6)])
@pytest.mark.parametrize("right", [0.0, 1.0])
def test_drafts_take_what_is_left_and_preempt_nobody(right, limits):
    """Two sequences that fill the pool, or their tenant's part of it, to the last block, whatever is drafted."""
    bench = Bench(frames=6 if limits.max_blocks is None else 30, budget=9, drafter=Oracle(2, right=right))
    bench.scheduler.set_tenant("one", limits)
    requests = [make_request(f"r{i}", [20 + i] * 4, 8, tenant="one", ignore_eos=True) for i in range(2)]
    for request in requests:
        bench.scheduler.add(request)
    bench.run()
    assert [bench.outputs[request.request_id, 0] for request in requests] == [expected(one, 0) for one in requests]
    assert bench.drafted > 0
    assert bench.scheduler.preemptions == 0


def test_what_is_accepted_behind_the_end_is_cut():
    for max_tokens in range(1, 40):
        bench, request = Bench(drafter=Oracle(1)), make_request("r", [1, 2, 3], max_tokens, seed=4)
        bench.scheduler.add(request)
        bench.run()
        assert bench.outputs["r", 0] == expected(request, 0)
        assert bench.reasons["r", 0] == ("stop" if bench.outputs["r", 0][-1] == EOS else "length")
    assert bench.outputs["r", 0][-1] == EOS, "the seed is to end it"


@pytest.mark.parametrize(
    ("tokens", "logprobs"), [([], None), ([4, 4], None), ([4], []), ([4], [TokenLogprobs([4], [0.0], 1)] * 2)]
)
def test_a_result_that_the_plan_does_not_allow_is_refused(tokens, logprobs):
    bench = Bench()
    bench.scheduler.add(make_request("r", [1, 2, 3], 9))
    plan = bench.scheduler.schedule(0.0)
    StepResult([[4]], [None]).check(plan)
    with pytest.raises(ValueError, match="accept"):
        StepResult([tokens], [logprobs]).check(plan)
    with pytest.raises(ValueError, match="zip"):
        StepResult().check(plan)


def test_prefix_computed_by_another_request_is_waited_for():
    bench = Bench(budget=64)
    shared = [1, 2, 3, 4] * 8
    for i in range(4):
        bench.scheduler.add(make_request(f"r{i}", [*shared, 10 + i], 3, ignore_eos=True))
    bench.run()
    once = len(shared) + 4 * 3
    assert bench.device.computed_tokens == once


def test_what_a_request_generates_is_found_while_it_runs_and_afterwards():
    bench = Bench(frames=64, block_size=4, budget=64)
    bench.scheduler.add(make_request("first", [1] * 5, 30, ignore_eos=True))
    while len(bench.outputs.get(("first", 0), [])) < 12:
        bench.step()
    for name in ("beside", "after"):
        tokens = [1] * 5 + bench.outputs["first", 0]
        found = bench.scheduler.prefix_hit_tokens
        bench.scheduler.add(make_request(name, tokens, 1, ignore_eos=True))
        bench.step()
        assert bench.scheduler.prefix_hit_tokens - found >= (len(tokens) - 2) // 4 * 4, name
        bench.run()


def test_waiting_requests_with_other_prompts_pass_those_that_wait_for_a_prefix():
    bench = Bench(budget=8)
    shared = [1, 2, 3, 4] * 8
    bench.scheduler.add(make_request("owner", [*shared, 9], 2, ignore_eos=True))
    bench.scheduler.add(make_request("same", [*shared, 8], 2, ignore_eos=True))
    bench.scheduler.add(make_request("other", [30, 31], 2, ignore_eos=True))
    bench.run()
    assert bench.first_step["other"] <= bench.first_step["same"]


def test_a_fork_takes_no_block_until_it_diverges():
    bench = Bench(frames=32, budget=64)
    bench.scheduler.add(make_request("r", [1] * 10, 6, n=3, ignore_eos=True))
    bench.step()
    assert bench.memory.stats().frames_active == 3
    bench.step()
    assert bench.memory.stats().frames_active == 5  # two of the three wrote into the shared partial block: two copies
    assert bench.memory.stats().copies == 2
    bench.run()


def test_a_running_sequence_forks_into_another_request_without_a_block():
    bench = Bench(frames=32, budget=64)
    origin = make_request("origin", [1] * 10, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    for _ in range(4):
        bench.step()
    held = bench.memory.stats().frames_active
    prompt = bench.scheduler.state.requests["origin"][0].tokens.copy()
    assert len(prompt) == 14
    child = make_request("child", prompt, 9, n=2, seed=9)
    bench.scheduler.add(child, ("origin", 0))
    assert bench.memory.stats().frames_active == held
    assert bench.scheduler.num_running == 2
    computed = bench.device.computed_tokens
    bench.step()
    assert bench.device.computed_tokens == computed + 2
    bench.run()
    assert bench.outputs["origin", 0] == expected(origin, 0)
    assert [bench.outputs["child", i] for i in range(2)] == [expected(child, i) for i in range(2)]


@pytest.mark.parametrize("why", ["ended", "no row", "another namespace", "other tokens", "preempted"])
def test_a_fork_of_what_is_not_running_is_a_prompt_like_others(why):
    bench = Bench(frames=32, budget=64, max_num_seqs=1 if why == "no row" else 4)
    origin = make_request("origin", [1] * 10, 20, ignore_eos=True)
    bench.scheduler.add(origin)
    for _ in range(4):
        bench.step()
    prompt = bench.scheduler.state.requests["origin"][0].tokens.copy()
    if why == "ended":
        bench.scheduler.abort("origin", bench.now)
    elif why == "preempted":
        preemption.preempt(bench.scheduler.state, bench.scheduler.state.requests["origin"][0], bench.now)
    elif why == "other tokens":
        prompt[-2] += 1
    child = make_request("child", prompt, 5, salt="x" if why == "another namespace" else "", ignore_eos=True)
    running = bench.scheduler.num_running
    bench.scheduler.add(child, ("origin", 0))
    assert bench.scheduler.num_running == running
    bench.run()
    assert bench.outputs["child", 0] == expected(child, 0)


def test_beams_share_all_but_the_blocks_they_have_written_apart():
    bench = Bench(frames=32, budget=64)
    request = make_search("r", [1] * 16, 8, 3, ignore_eos=True)
    bench.scheduler.add(request)
    saved = 0
    for _ in range(7):
        bench.step()
        beams = bench.scheduler.state.requests["r"]
        assert len(beams) == 3
        tables = [beam.table.blocks[0].tolist() for beam in beams]
        for (one, first), (other, second) in combinations(zip(beams, tables, strict=True), 2):
            common = [a == b for a, b in zip(one.tokens, other.tokens, strict=True)].index(False)
            assert first[: common // 4] == second[: common // 4]
        distinct = len(set(chain(*tables)))
        assert bench.memory.stats().frames_active == distinct
        saved += sum(map(len, tables)) - distinct
    assert saved >= 7 * 2 * 4
    bench.run()
    assert bench.found["r"] == expected_of_search(request)


def test_a_preempted_search_computes_what_its_beams_share_once():
    bench = Bench(frames=15, budget=64, caching=False, max_num_seqs=4)
    older = make_request("older", [2] * 20, 30, ignore_eos=True)
    request = make_search("r", [1] * 16, 12, 3, ignore_eos=True)
    bench.scheduler.add(older)
    bench.scheduler.add(request)
    for _ in range(12):
        if bench.scheduler.preemptions == 0:
            bench.step()
    (leader,) = bench.scheduler.state.requests["r"]
    common, before = len(leader.tokens), bench.device.computed_tokens - len(bench.outputs["older", 0])
    assert 16 <= common < len(leader.group.parked[0])
    for _ in range(40):
        if leader.group.parked:
            bench.step()
    assert not leader.group.parked
    assert bench.device.computed_tokens - len(bench.outputs["older", 0]) == before + common
    bench.run()
    assert bench.found["r"] == expected_of_search(request)
    assert bench.outputs["older", 0] == expected(older, 0)


def test_a_parked_group_names_only_the_blocks_that_its_beams_have_in_common():
    bench = Bench(frames=32, budget=64)
    bench.scheduler.add(make_search("r", [1] * 16, 12, 3, ignore_eos=True))
    bench.step()
    (leader, *_) = bench.scheduler.state.requests["r"]
    while len(leader.tokens) % 4:  # its last block is then full, and no other beam's
        bench.step()
        leader = leader.group.beams[0]
    assert len(leader.digests) == len(leader.tokens) // 4
    preemption.preempt(bench.scheduler.state, leader, bench.now)
    (leader,) = bench.scheduler.state.requests["r"]
    assert len(leader.digests) == len(leader.tokens) // 4 < len(leader.group.parked[0]) // 4
    bench.run()


@pytest.mark.parametrize(
    ("going_on", "goes_on"), [(-0.2, {False: True, "never": True}), (-5.0, {False: False, "never": True}), (-9.0, {})]
)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_a_search_with_all_its_hypotheses_ends_when_it_may(going_on, goes_on, early_stopping):
    search = BeamSearch(BeamSearchParams(2, 10, early_stopping=early_stopping), frozenset([EOS]), 10)
    first = TokenLogprobs([0, EOS, 1, 2], [0.0, -1.0, -1.5, -2.0], 1)
    assert search.advance([[]], [first]) == [(0, 1), (0, 2)]
    second = TokenLogprobs([0, EOS, 3, 4], [0.0, -0.1, going_on, -9.0], 1)
    third = TokenLogprobs([0, 5, EOS, 6], [0.0, -9.5, -9.6, -9.7], 1)
    chosen = search.advance([[1], [2]], [second, third])
    assert bool(chosen) == goes_on.get(early_stopping, False)
    assert [found.token_ids for found in search.hypotheses] == [[1, EOS], [EOS]]
    assert [found.score for found in search.hypotheses] == [pytest.approx(-1.6 / 2), -1.0]


def test_a_spare_candidate_does_not_end_a_search():
    search = BeamSearch(BeamSearchParams(2, 10), frozenset([EOS]), 10)
    candidates = TokenLogprobs([0, 1, 2, EOS], [0.0, -1.0, -1.5, -1.6], 1)
    assert search.advance([[]], [candidates]) == [(0, 1), (0, 2)]
    assert search.hypotheses == []


def test_first_come_first_served_within_a_class():
    bench = Bench(max_num_seqs=2, budget=8)
    for i in range(6):
        bench.scheduler.add(make_request(f"r{i}", [10 + i, 20 + i], 4, ignore_eos=True, arrival_s=0.0))
    bench.run()
    order = sorted(bench.first_step, key=lambda name: (bench.first_step[name], name))
    assert order == [f"r{i}" for i in range(6)]


def test_urgent_class_goes_first_but_ageing_lets_nobody_starve():
    bench = Bench(max_num_seqs=1, budget=8)
    bench.scheduler.add(make_request("patient", [5, 6], 2, priority=2, ignore_eos=True, arrival_s=0.0))
    for i in range(60):
        bench.scheduler.add(make_request(f"urgent{i}", [10, i], 2, ignore_eos=True, arrival_s=float(i)))
    bench.run()
    overtakers = [name for name, step in bench.first_step.items() if step < bench.first_step["patient"]]
    assert len(overtakers) == 20  # those that arrived within 2 classes * 10 s after it
    assert "urgent0" in overtakers


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 3), st.integers(1, 12), st.integers(4, 40))
def test_bounded_wait(priority, max_num_seqs, max_tokens, prompt_len):
    """Under a stream of more urgent requests without end, a request of any class starts within a bound of steps."""
    bench = Bench(frames=80, max_num_seqs=max_num_seqs, budget=16)
    prompt = list(range(prompt_len))
    bench.scheduler.add(make_request("low", prompt, max_tokens, priority=priority, ignore_eos=True, arrival_s=0.0))
    bound = 10.0 * priority + (max_num_seqs + 2) * (max_tokens + prompt_len)
    while ("low", 0) not in bench.reasons:
        arrival = make_request(
            f"u{bench.now}", [*prompt, bench.steps], max_tokens, ignore_eos=True, arrival_s=bench.now
        )
        bench.scheduler.add(arrival)
        bench.step()
        assert bench.now <= bound + 10.0 * priority * (max_tokens + prompt_len), "starved"


def test_when_blocks_run_out_the_youngest_is_preempted_and_recomputed():
    bench = Bench(frames=10, block_size=4, max_num_seqs=4, budget=32, caching=False)
    for i in range(3):
        bench.scheduler.add(make_request(f"r{i}", [10 + i] * 4, 20, ignore_eos=True))
    bench.run()
    assert bench.scheduler.preemptions > 0
    for i in range(3):
        assert bench.outputs[f"r{i}", 0] == expected(make_request(f"r{i}", [10 + i] * 4, 20, ignore_eos=True), 0)
    assert list(bench.reasons) == [("r0", 0), ("r1", 0), ("r2", 0)]


def test_a_sequence_that_waits_for_memory_counts_as_one_look_up():
    bench = Bench(frames=6, block_size=4, max_num_seqs=4, budget=32)
    bench.scheduler.add(make_request("runs", [1] * 4, 14, ignore_eos=True))
    bench.scheduler.add(make_request("waits", [2] * 17, 2, ignore_eos=True))
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert bench.first_step["waits"] > 10
    assert (bench.scheduler.prefix_queried_tokens, bench.scheduler.prefix_hit_tokens) == (21, 0)


def test_what_can_never_fit_is_refused_at_once():
    bench = Bench(frames=4, block_size=4, max_num_seqs=2)
    with pytest.raises(RequestTooLargeError, match=r"may grow to 20 tokens, which takes 5 KV blocks .* the pool has 4"):
        bench.scheduler.add(make_request("big", [1] * 10, 10))
    unsaid = make_request("long", [1] * 17, 1)
    unsaid.params.max_tokens = None
    for request, param in ((make_request("big", [1] * 10, 10), "max_tokens"), (unsaid, "prompt")):
        with pytest.raises(PoolTooSmallError) as caught:
            bench.scheduler.add(request)
        assert (caught.value.param, caught.value.blocks) == (param, 5)
        assert ("max_tokens" in caught.value.message) == (param == "max_tokens"), "who gave none cannot lower it"
    with pytest.raises(RequestTooLargeError, match="n is 3, but max_num_seqs"):
        bench.scheduler.add(make_request("wide", [1], 1, n=3))
    with pytest.raises(RequestTooLargeError, match="beam_width is 3, but max_num_seqs"):
        bench.scheduler.add(make_search("wide", [1], 1, 3))
    with pytest.raises(RequestTooLargeError, match="takes 5 KV blocks"):
        bench.scheduler.add(make_search("search", [1] * 4, 6, 2))
    bench.scheduler.add(make_search("just", [1] * 4, 5, 2))
    bench.scheduler.add(make_request("fits", [1] * 10, 7, ignore_eos=True))
    bench.run()
    assert len(bench.outputs["fits", 0]) == 7


def test_a_pinned_prefix_is_never_computed_again():
    bench = Bench(frames=20, budget=64)
    prefix = [1, 2, 3, 4] * 5
    bench.scheduler.add(make_request("pin", prefix, 1, pin="system"))
    bench.run_steps()
    assert [(pin.name, pin.num_tokens) for pin in bench.scheduler.pins.list()] == [("system", 20)]
    assert bench.memory.stats().frames_active == bench.scheduler.pins.num_frames == 5
    for i in range(4):
        bench.scheduler.add(make_request(f"flood{i}", [20 + i] * 40, 2, ignore_eos=True))
    bench.run_steps()
    computed = bench.device.computed_tokens
    bench.scheduler.add(make_request("r", [*prefix, 7, 8], 2, ignore_eos=True))
    bench.run_steps()
    assert bench.device.computed_tokens - computed == 3
    bench.now += 30
    bench.scheduler.add(make_request("later", [5], 1))
    bench.run_steps()
    assert bench.scheduler.pins.list() == []
    bench.assert_all_free()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_pin_whose_request_ends_first_pins_nothing(steps):
    bench = Bench(frames=20, budget=8)
    bench.scheduler.add(make_request("pin", [1, 2, 3, 4] * 5, 1, pin="system"))
    for _ in range(steps):
        bench.step()
    assert bench.scheduler.pins.num_frames == 5
    bench.scheduler.abort("pin", bench.now)
    assert bench.scheduler.pins.num_frames == 0
    bench.run_steps()
    assert bench.scheduler.pins.list() == []


def test_pins_and_requests_never_shut_each_other_out():
    bench = Bench(frames=20, budget=64)
    bench.scheduler.add(make_request("large", [9] * 44, 5, ignore_eos=True))  # 12 blocks
    with pytest.raises(
        PinLimitError,
        match=r"leaves too little: the request 'large' .* takes 12 blocks, .* could count on 11, of which pins hold 9",
    ):
        bench.scheduler.add(make_request("pin", [1, 2, 3] * 12, 1, pin="a"))
    with pytest.raises(PinLimitError, match=r"11 would be pinned, over max_pinned_share \(0.5\) of the pool, 10 of 20"):
        bench.scheduler.add(make_request("pin", [1, 2] * 22, 1, pin="a"))
    bench.scheduler.add(make_request("pin", [1, 2] * 14, 1, pin="a"))
    with pytest.raises(RequestTooLargeError, match=r"takes 14 KV blocks .* has 20, of which pins hold 7"):
        bench.scheduler.add(make_request("larger", [8] * 52, 5))
    with pytest.raises(PinLimitError, match="12 would be pinned"):
        bench.scheduler.add(make_request("second", [3] * 20, 1, pin="b"))
    bench.run_steps()
    assert bench.scheduler.least_frames == 7
    with pytest.raises(KVMemoryError, match="pins hold 7"):
        bench.scheduler.resize(6, bench.now)
    bench.scheduler.add(make_request("again", [1, 2] * 16, 1, pin="a"))  # in the place of the first: one block more
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 8
    bench.scheduler.pins.unpin("a", Namespace(), bench.now)
    bench.scheduler.add(make_request("larger", [8] * 52, 5))
    bench.run()


@pytest.mark.parametrize("lower", [0, 4])
def test_a_pinned_prefix_counts_once_for_who_begins_with_it(lower):
    bench = Bench(frames=20, budget=16, lower=lower)
    prefix = [1, 2] * 14  # 7 blocks
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    most = (20 + lower) * 4 + 1
    with pytest.raises(RequestTooLargeError, match=r"takes 14 KV blocks of 4 tokens beside 7 pinned, but the pool has"):
        bench.scheduler.add(make_request("larger", prefix + [9] * 2, most + 1 - 30))
    with pytest.raises(RequestTooLargeError, match=r"takes 20 KV blocks of 4 tokens, but the pool has 20, of which"):
        bench.scheduler.add(make_request("other", [9] * 30, most - 30))
    full = make_request("full", prefix + [9] * 2, most - 30, ignore_eos=True)
    bench.scheduler.add(full)
    unsaid = make_request("unsaid", prefix + [8] * 2, 200, ignore_eos=True)
    unsaid.params.max_tokens = None
    bench.scheduler.add(unsaid)
    with pytest.raises(KVMemoryError, match=r"'full' .* takes 13 blocks, .* could count on 12"):
        bench.scheduler.resize(19, bench.now)
    bench.run_steps()
    assert unsaid.max_len == most
    for request in (full, unsaid):
        assert bench.outputs[request.request_id, 0] == expected(request, 0)
    bench.assert_all_free()


@pytest.mark.parametrize(
    ("windows", "pinned", "most"), [((None, 6), 7 + 2, 32 * 4 + 1), ((40, None), 7 + 7, 20 * 4 + 1), ((6,), 2, 500)]
)
def test_with_windows_too_a_pinned_prefix_counts_once_for_who_goes_on_behind_it(windows, pinned, most):
    bench = Bench(frames=40, windows=windows, budget=16)
    prefix = [1, 2] * 14
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == pinned
    full = make_request("full", prefix + [9] * 2, most - 30, ignore_eos=True)
    bench.scheduler.add(full)
    if windows != (6,):
        with pytest.raises(RequestTooLargeError):
            bench.scheduler.add(make_request("larger", prefix + [9] * 2, most + 1 - 30))
        with pytest.raises(RequestTooLargeError):
            bench.scheduler.add(make_request("leaves it", prefix[:-1] + [9] * 3, most - 30))
        with pytest.raises(KVMemoryError, match="'full'"):
            bench.scheduler.resize(39, bench.now)
    bench.run()
    assert bench.outputs["full", 0] == expected(full, 0)


def test_who_leaves_one_of_the_pins_that_it_begins_with_fits_whichever_of_them_ends():
    bench = Bench(frames=40, windows=(None, 6), budget=16)
    prefix = [1, 2] * 14
    for name, prompt in (("short", prefix), ("long", prefix + [3] * 8)):
        bench.scheduler.add(make_request(name, prompt, 1, pin=name))
        bench.run_steps()
    request = make_request("goes on elsewhere", prefix + [3] * 4 + [9], 120 - 33, ignore_eos=True)
    with pytest.raises(RequestTooLargeError):
        bench.scheduler.add(request)
    bench.scheduler.pins.unpin("long", Namespace(), bench.now)
    bench.scheduler.add(request)
    with pytest.raises(PinLimitError, match="leaves too little"):
        bench.scheduler.add(make_request("again", prefix + [3] * 8, 1, pin="long"))
    bench.scheduler.pins.unpin("short", Namespace(), bench.now)
    bench.run()
    assert bench.outputs["goes on elsewhere", 0] == expected(request, 0)


def test_who_finds_a_pin_and_goes_on_with_less_than_a_step_needs_no_more_than_is_new():
    bench = Bench(frames=23, windows=(None, 40), budget=64)
    prefix = [1, 2] * 22
    bench.scheduler.pins.share = 0.95
    bench.scheduler.add(make_request("pin", prefix, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 11 + 10
    request = make_request("r", [*prefix, 9], 3, ignore_eos=True)
    bench.scheduler.add(request)
    bench.run()
    assert bench.outputs["r", 0] == expected(request, 0)


@pytest.mark.parametrize("windows", [(None,), (None, 6), (40, None)])
def test_who_begins_with_a_pin_fits_without_it_too(windows):
    """Whatever becomes of the pin: it ends, or its request does before it is there."""
    bench = Bench(frames=20 * len(windows), windows=windows, budget=16)
    prefix = [1, 2] * 14
    for ending in ("unpin", "abort"):
        bench.scheduler.add(make_request(f"pin-{ending}", prefix, 1, pin="p"))
        if ending == "unpin":
            bench.run_steps()
        full = make_request(f"full-{ending}", [*prefix, 9], 81 - 29, ignore_eos=True)
        bench.scheduler.add(full)
        bench.step()
        bench.scheduler.abort(f"pin-{ending}", bench.now)
        bench.scheduler.pins.unpin("p", Namespace(), bench.now)
        bench.run()
        assert bench.outputs[full.request_id, 0] == expected(full, 0)


def test_with_windows_a_pinned_prefix_counts_in_full():
    """A prompt that leaves the pin before its end finds nothing of it: its window's blocks are not there."""
    bench = Bench(frames=24, budget=64, windows=(None, 6))
    bench.scheduler.add(make_request("pin", [1, 2] * 14, 1, pin="p"))
    bench.run_steps()
    assert bench.scheduler.pins.num_frames == 9
    with pytest.raises(RequestTooLargeError, match=r"takes 16 KV blocks .* of which pins hold 9"):
        bench.scheduler.add(make_request("larger", [1, 2] * 10 + [9] * 9, 4))
    bench.scheduler.add(make_request("fits", [1, 2] * 10 + [9] * 7, 2, ignore_eos=True))
    bench.run()


def run_one_after_another(tier_loses) -> Bench:
    """A prompt of eight blocks; one that needs all frames but one; the first again."""
    bench = Bench(frames=17, tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: next(tier_loses)  # type: ignore[method-assign]
    first = [1, 2, 3, 4] * 8 + [9]
    for name, prompt in (("first", first), ("flood", list(range(20)) * 3), ("again", first)):
        bench.scheduler.add(make_request(name, prompt, 2, ignore_eos=True))
        bench.run()
    assert bench.outputs["again", 0] == bench.outputs["first", 0]
    return bench


def test_what_was_evicted_is_loaded_instead_of_computed():
    bench = run_one_after_another(repeat(0.0))
    assert bench.tier is not None
    assert bench.tier.arrived == 7
    assert bench.device.computed_tokens == 34 + 61 + 2


def test_what_a_load_lost_is_computed():
    bench = run_one_after_another(chain([0.0] * 3, [1.0], repeat(0.0)))
    assert bench.device.computed_tokens == 34 + 61 + 34 - 4 * 4


def test_of_a_prompt_whose_windows_went_down_what_the_pool_still_has_is_not_loaded():
    """What a window has left is evicted first, the full blocks before it are in the pool: both together are found."""
    bench = Bench(frames=20, windows=(None, 12), tier=1)
    assert bench.tier is not None
    bench.tier.random.random = lambda: 0.0  # type: ignore[method-assign]
    first = make_request("first", [1, 2, 3, 4] * 6 + [9], 2, ignore_eos=True)
    bench.scheduler.add(first)
    bench.run()
    digests: list[bytes] = []
    extend_chain(digests, first.root, first.prompt_token_ids, 4)
    others = count()
    while bench.memory.peek(digests, first.root) == 6:
        bench.scheduler.add(make_request(f"other{next(others)}", [10 + next(others)] * 5, 1))
        bench.run()
    lacking = bench.memory.missing(digests)
    assert bench.memory.peek(digests, first.root) == 0
    assert 0 < len(lacking) < 4, "most of it is in the pool"
    computed = bench.device.computed_tokens
    bench.scheduler.add(make_request("again", first.prompt_token_ids, 2, ignore_eos=True))
    bench.run()
    assert bench.outputs["again", 0] == expected(first, 0)
    assert bench.tier.arrived == len(lacking)
    assert bench.device.computed_tokens - computed == 1 + 1
