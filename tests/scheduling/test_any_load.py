"""Random loads of the scheduler and the real memory manager over a simulated device, and a model with the answers."""

from __future__ import annotations

import contextlib
import itertools
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_bench import EOS, Bench, Oracle, expected, expected_of_search, expected_vector, make_request, make_search
from simulated_device import VOCAB

from pagemill.errors import ConfigError, InvalidRequestError, RequestTooLargeError
from pagemill.memory.digest import root_digest
from pagemill.memory.eviction import POLICIES
from pagemill.namespace import Namespace
from pagemill.tenant_limits import TenantLimits

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
                "not finite",
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
    branches=st.sampled_from([0, 1, 3]),
    settles=st.booleans(),
    foresees=st.booleans(),
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
    foresees,
    tier,
    limits,
    policy,
    lower,
    payback_steps,
    drafts,
    leaves,
    branches,
):
    """Same request, same tokens: beside others, of other tenants too, with preemptions, prefix hits, forks, beams,
    requests that sample nothing, embeddings, drafts right and wrong, branched, the device's own among them, faults,
    aborts, steps ahead, pins, turns of sessions, limits that change, idle blocks that go, a pool that shrinks and
    grows, blocks that are streamed or moved together, and blocks that go to a lower tier and come back or get lost,
    lower frames that lose what they hold, a device that fails between steps. In the end every block is free."""
    bench = Bench(
        frames=frames * len(windows),
        windows=windows,
        max_num_seqs=max_num_seqs,
        budget=budget,
        caching=caching,
        depth=depth,
        settles=settles,
        foresees=foresees,
        tier=tier,
        policy=policy,
        lower=lower,
        payback_steps=payback_steps,
        drafter=None if drafts is None else Oracle(drafts, leaves=leaves, branches=branches),
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
        elif action == "not finite":
            bench.device.not_finite.add(pick % max_num_seqs)
            bench.step()
            bench.device.not_finite.clear()
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
