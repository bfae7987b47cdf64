"""Tenants over several replicas: limits hold for all of them together, and nobody is shut out by what another has
elsewhere."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.distributed.fleet_tenancy import ANYWHERE, FleetTenancy, Pinned, Wanted
from pagemill.distributed.tenant_shares import TenantShares, part_of
from pagemill.errors import TooManyWaitingError
from pagemill.memory.manager import MemoryManager
from pagemill.sampling.params import SamplingParams
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import Request
from pagemill.scheduling.step_plan import StepResult
from pagemill.tenant_limits import TenantLimits

REPLICAS = ("a", "b", "c")
LIMITS = {
    "rows": TenantLimits(max_running=4, max_waiting=0),
    "blocks": TenantLimits(max_blocks=12),
    "both": TenantLimits(max_running=3, max_blocks=20),
    "free": TenantLimits(max_running="75%", max_blocks="50%"),
}

acts = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "pin", "begin", "end", "lose", "rest", "limit"]),
        st.sampled_from(["rows", "rows", "blocks", "blocks", "both", "free", "unnamed"]),
        st.integers(1, 5),  # rows
        st.integers(1, 14),  # blocks
        st.integers(0, 100),  # which
    ),
    min_size=15,
    max_size=60,
)


class Model:
    """What a front end does with a `FleetTenancy`, and what replicas have."""

    def __init__(self):
        self.limits = dict(LIMITS)
        self.tenancy = FleetTenancy(self.limits)
        self.wanted, self.at = {}, {}
        self.pinned = dict.fromkeys([*LIMITS, "unnamed"], Pinned())
        self.taking = [*REPLICAS]
        self.begun, self.held = set(), set()

    def go(self, request_id, which=0):
        wanted, is_new = self.wanted[request_id], request_id not in self.at
        held = self.held_of(wanted.tenant)
        self.at[request_id] = None
        is_first = held[0] == request_id if request_id in held else not (held and is_new)
        room = self.room_for(wanted) if is_first else set()
        place = self.tenancy.place(request_id, wanted, self.taking, self.pinned[wanted.tenant])
        assert place in room if room else place is None
        (self.held.add if place is None else self.held.discard)(request_id)
        assert self.tenancy.is_behind(request_id) == (place is None and self.held_of(wanted.tenant)[0] != request_id)
        if place is not None and self.taking:
            assert place == ANYWHERE or place in self.taking
            self.at[request_id] = place or self.taking[which % len(self.taking)]
            self.tenancy.note_sent(request_id, self.at[request_id])
            if wanted.pins and self.tenancy.limits_blocks(wanted.tenant):
                home, blocks = self.pinned[wanted.tenant]
                self.pinned[wanted.tenant] = Pinned(home or self.at[request_id], blocks)
                assert self.pinned[wanted.tenant].replica == self.at[request_id], "pins have one home"
            self.check(request_id)

    def held_of(self, tenant):
        """Returns what is held back of a tenant, in the order in which it came."""
        return sorted((one for one in self.held if self.wanted[one].tenant == tenant), key=int)

    def room_for(self, wanted):
        """Returns the places where there is room for a request, any of which is right."""
        limits = self.limits.get(wanted.tenant, TenantLimits())
        others = [one for one, at in self.at.items() if at and self.wanted[one].tenant == wanted.tenant]
        home, pinned = self.pinned[wanted.tenant]
        most_rows = limits.max_running if isinstance(limits.max_running, int) else None
        if others and most_rows and sum(self.wanted[one].rows for one in others) + wanted.rows > most_rows:
            return set()
        if not isinstance(limits.max_blocks, int):
            return {ANYWHERE}
        home = home if wanted.pins or pinned else ""
        if sum(self.wanted[one].blocks for one in others) + pinned + wanted.blocks <= limits.max_blocks:
            return {home} & {*self.taking} if wanted.pins and home else {ANYWHERE}
        places = ({home} - {""}) | {self.at[one] for one in others}
        return ({*places} & {*self.taking} if len(places) == 1 else set()) if places else {ANYWHERE}

    def count_waiting(self, tenant, seats):
        """Returns how many of a tenant's sequences wait beside those that can begin."""
        own = [one for one in self.wanted if self.wanted[one].tenant == tenant]
        rows = {one: self.wanted[one].rows for one in self.wanted}
        begun = sum(rows[one] for one in own if one in self.begun)
        room = min(seats - sum(rows[one] for one in self.begun), self.limits[tenant].max_running - begun)
        return max(0, sum(rows[one] for one in own) - begun - max(0, room))

    def find_homes(self):
        """Gives pins that are in no replica one that takes requests."""
        for tenant, (home, blocks) in self.pinned.items():
            if blocks and not home and self.taking:
                self.pinned[tenant] = Pinned(self.taking[0], blocks)

    def end(self, request_id):
        wanted, at = self.wanted[request_id], self.at.pop(request_id)
        if wanted.pins and at == self.pinned[wanted.tenant].replica:
            self.pinned[wanted.tenant] = Pinned(at, self.pinned[wanted.tenant].blocks + wanted.blocks)
        own = [one for one in self.held_of(wanted.tenant) if one != request_id]
        self.held.discard(request_id)
        self.begun.discard(request_id)
        del self.wanted[request_id]
        for held in self.tenancy.end(request_id):
            assert held == own.pop(0)
            self.go(held)
            if self.at[held] is None:
                return
        assert not own, "each is tried until one has to stay"

    def check(self, request_id):
        """Sees that what has just been sent is within its tenant's limits."""
        mine = [one for one in self.at if self.at[one] and self.wanted[one].tenant == self.wanted[request_id].tenant]
        limits = self.limits.get(self.wanted[request_id].tenant, TenantLimits())
        if isinstance(limits.max_running, int) and len(mine) > 1:
            assert sum(self.wanted[one].rows for one in mine) <= limits.max_running
        home, pinned = self.pinned[self.wanted[request_id].tenant]
        places = {self.at[one] for one in mine} | ({home} if pinned else set())
        if isinstance(limits.max_blocks, int) and len(places) > 1:
            assert sum(self.wanted[one].blocks for one in mine) + pinned <= limits.max_blocks


@settings(max_examples=100, deadline=None)
@given(acts)
def test_no_tenant_has_more_than_its_limits_over_all_replicas_and_nothing_waits_for_nobody(history):
    model = Model()
    for number, (act, tenant, rows, blocks, which) in enumerate(history):
        if act in ("add", "pin"):
            model.wanted[str(number)] = Wanted(tenant, rows, blocks, 10, 20, pins=act == "pin")
            model.go(str(number), which)
        elif act == "begin" and (sent := [one for one, at in model.at.items() if at]):
            begins = sent[which % len(sent)]
            model.begun.add(begins)
            model.tenancy.note_tokens(begins, 0, 1)
        elif act == "end" and model.at:
            model.end([*model.at][which % len(model.at)])
        elif act == "lose":
            gone = REPLICAS[which % 3]
            lost = [one for one, at in model.at.items() if at == gone]
            model.tenancy.shares.forget(gone)
            for one in lost:
                model.tenancy.note_sent(one, None)
                model.at[one] = None
            for tenant in [tenant for tenant, pinned in model.pinned.items() if pinned.replica == gone]:
                model.pinned[tenant] = Pinned("", model.pinned[tenant].blocks)
            model.find_homes()
            for one in [*lost, *(one for one, at in model.at.items() if at is None)]:
                model.go(one, which)
        elif act == "rest":
            model.taking = [one for at, one in enumerate(REPLICAS) if which >> at & 1]
            model.find_homes()
            for one in [one for one, at in model.at.items() if at is None]:
                model.go(one)
        elif act == "limit" and tenant == "rows":
            model.limits["rows"] = TenantLimits(max_running=rows, max_waiting=0)
            model.tenancy.set_limits("rows", model.limits["rows"])
            for one in [one for one, at in model.at.items() if at is None]:
                model.go(one)
        with pytest.raises(TooManyWaitingError, match=f"^{model.count_waiting('rows', which)} sequences"):
            model.tenancy.check("rows", which)
        held = model.tenancy.count_held()
        assert held == Counter(model.wanted[one].tenant for one in model.held for _ in range(model.wanted[one].rows))
        waits = Counter(model.wanted[one].tenant for one, at in model.at.items() if at is None)
        if model.taking:
            for tenant in held:  # what is held back waits for something that ends
                runs = any(at and model.wanted[one].tenant == tenant for one, at in model.at.items())
                assert runs or model.pinned[tenant].replica not in model.taking
            assert waits.keys() <= held.keys()
    model.taking = [*REPLICAS]
    model.find_homes()
    for one in [one for one, at in model.at.items() if at is None]:
        model.go(one)
    while model.at:
        model.end(next(one for one, at in model.at.items() if at))
    assert model.tenancy.count_held() == {}


class Sized(Wanted):
    """Counts how often anybody looks at what a request takes."""

    looks = 0

    def __getattribute__(self, name):
        if name in ("rows", "blocks"):
            Sized.looks += 1
        return super().__getattribute__(name)


class Id(str):
    """Counts how often it is compared with others."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other):
        Id.compared += 1
        return super().__eq__(other)


@pytest.mark.parametrize("count", [20, 500])
def test_what_is_done_for_a_request_does_not_grow_with_those_of_its_tenant(count):
    tenancy = FleetTenancy({"team": TenantLimits(max_running=count, max_blocks=count, max_waiting=9 * count)})
    ids = [Id(number) for number in range(2 * count)]
    for one in ids:
        if tenancy.place(one, Sized("team", 1, 1, 10, 20), REPLICAS) is not None:
            tenancy.note_sent(one, "a")
    assert tenancy.count_held() == {"team": count}
    Sized.looks = Id.compared = 0
    tenancy.check("team", 12)
    assert [*tenancy.end(Id(2 * count - 2))] == [str(count)]
    assert tenancy.place(ids[-1], Sized("team", 1, 1, 10, 20), REPLICAS) is None
    tenancy.note_sent(ids[0], None)
    assert tenancy.place(ids[0], Sized("team", 1, 1, 10, 20), REPLICAS) == ANYWHERE
    assert Sized.looks + Id.compared < 40


@pytest.mark.parametrize("taking", [REPLICAS, ()])
def test_requests_that_are_held_back_go_in_the_order_in_which_they_came(taking):
    model, sent = Model(), []
    model.taking = [*taking]
    for number in range(6):
        model.wanted[str(number)] = Wanted("rows", 2, 1, 10, 20)
        model.go(str(number))
    model.taking = [*REPLICAS]
    for one in [*model.at]:
        model.go(one)
    while model.at:
        sent += [one for one, at in model.at.items() if at and one not in sent]
        model.end(next(one for one, at in model.at.items() if at))
    assert sent == ["0", "1", "2", "3", "4", "5"]


def test_max_waiting_counts_what_waits_at_all_replicas_and_here():
    tenancy = FleetTenancy({"team": TenantLimits(max_running=2, max_waiting=3)})
    for number in range(5):
        tenancy.check("team", 12)
        place = tenancy.place(str(number), Wanted("team", 1, 1, 10, 20), REPLICAS)
        if place is not None:
            tenancy.note_sent(str(number), "abc"[number % 3])
    with pytest.raises(TooManyWaitingError, match="3 sequences of tenant 'team' wait, over all replicas"):
        tenancy.check("team", 12)
    tenancy.note_tokens("0", 0, 1)
    assert [*tenancy.end("0")] == ["2"], "which has not gone"
    tenancy.check("team", 12)
    tenancy.check("other", 12)


@given(st.integers(0, 100), st.lists(st.integers(0, 60), min_size=1, max_size=5))
def test_what_is_guaranteed_over_all_replicas_is_used_once_and_is_there_where_it_is_wanted_first(guaranteed, used):
    parts = [part_of(guaranteed, here, sum(used) - here) for here in used]
    assert all(0 <= part <= guaranteed for part in parts)
    assert sum(map(min, parts, used)) <= guaranteed
    if sum(used) <= guaranteed:
        assert all(part - here == guaranteed - sum(used) for part, here in zip(parts, used, strict=True))


def test_a_replica_is_told_what_is_left_of_a_guarantee_when_that_changes():
    tenancy = FleetTenancy({"team": TenantLimits(guaranteed_blocks=50), "share": TenantLimits(guaranteed_blocks="9%")})
    shares = tenancy.shares

    def begin(name, at, prompt, blocks):
        assert tenancy.place(name, Wanted("team", 1, blocks, prompt, 10 * blocks), REPLICAS) == ANYWHERE
        tenancy.note_sent(name, at)
        tenancy.note_tokens(name, 0, 1)

    assert shares.guaranteed_here("a") == {"team": 50}
    assert shares.guaranteed_here("a") == {}
    begin("q0", "a", 199, 40)
    assert shares.guaranteed_here("a") == {}, "what it has here is its own"
    assert shares.guaranteed_here("b") == {"team": 30}
    tenancy.note_tokens("q0", 0, 100)
    assert shares.guaranteed_here("b") == {"team": 20}
    begin("q1", "b", 299, 50)
    assert (shares.guaranteed_here("a"), shares.guaranteed_here("b")) == ({"team": 25}, {"team": 25})
    assert shares.guaranteed_here("c") == {"team": 0}
    tenancy.set_limits("team", TenantLimits(guaranteed_blocks=60))
    assert shares.guaranteed_here("c") == {"team": 0}, "other limits begin anew there"
    shares.forget("b")
    tenancy.note_sent("q1", None)
    assert shares.guaranteed_here("a") == {"team": 60}
    assert shares.guaranteed_here("c") == {"team": 30}
    tenancy.end("q1")
    tenancy.end("q0")
    assert shares.guaranteed_here("c") == {"team": 60}
    tenancy.set_limits("team", TenantLimits(guaranteed_blocks="10%"))
    assert shares.guaranteed_here("c") == {}


def test_a_guarantee_that_is_used_in_one_replica_preempts_nobody_in_another():
    """Another tenant fills a pool beyond its own guarantee; the first wants its blocks there."""
    scheduler, taken = engine(frames=40, rows=4), []
    scheduler.set_tenant("calm", TenantLimits(guaranteed_blocks=20))
    for number in range(2):
        scheduler.add(asked(f"flood{number}", "flood", 60, 20, number), None)
    step(scheduler, 0)
    step(scheduler, 1)
    for now, part in ((2, 0), (4, 20)):
        scheduler.tenants.note_parts({"calm": part, "nobody": 3})
        if not now > 2:
            scheduler.add(asked("calm", "calm", 40, 8, 9), None)
        taken += [[*step(scheduler, now)], scheduler.preemptions]
    assert taken == [["flood0", "flood1"], 0, ["flood0", "calm"], 1]


PROMPT, ANSWER = 20, 12


def asked(name, tenant, prompt, most, number):
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    tokens = [*range(number * 1000, number * 1000 + prompt)]
    return Request(name, tokens, params, number, 0, number, tenant.encode(), prompt + most, tenant=tenant)


def step(scheduler, now):
    """Runs a step. Returns the requests that were in it."""
    plan = scheduler.schedule(now)
    ran = [entry.sequence.request.request_id for entry in scheduler.state.batch.flights[-1].entries]
    count = len(plan.sample_from)
    scheduler.commit(StepResult([[1]] * count, [None] * count), now)
    return ran


def engine(frames=400, rows=2):
    scheduler = Scheduler(
        MemoryManager(frames, 4, [None]),
        max_num_seqs=rows,
        max_num_batched_tokens=32 * rows,
        eos_token_ids=frozenset(),
        ageing_s=10,
    )
    for tenant in ("calm", "flood"):
        scheduler.set_tenant(tenant, TenantLimits())
    return scheduler


def served(tells):
    """Returns the tokens that two tenants get of three engines, one of which both want, and two one of them alone.

    tells: whether replicas are told what their tenants have elsewhere.
    """
    engines = {name: engine() for name in REPLICAS}
    tenancy, draw, number, got = FleetTenancy({}), random.Random(3), 0, Counter()
    under_way = {("calm", "a"): 0, ("flood", "a"): 0, ("flood", "b"): 0, ("flood", "c"): 0}
    for now in range(800):
        for (tenant, at), count in under_way.items():
            for _ in range(6 - count):
                number += 1
                prompt = [draw.randrange(1000) for _ in range(PROMPT)]
                assert tenancy.place(str(number), Wanted(tenant, 1, 9, PROMPT, PROMPT + ANSWER), REPLICAS) == ANYWHERE
                tenancy.note_sent(str(number), at)
                params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
                engines[at].add(
                    Request(
                        str(number), prompt, params, number, 0, now, tenant.encode(), PROMPT + ANSWER, tenant=tenant
                    )
                )
                if tells:
                    engines[at].note_served_elsewhere(tenancy.shares.served_elsewhere(at))
            under_way[tenant, at] = 6
        for at, one in engines.items():
            plan = one.schedule(now)
            count = len(plan.sample_from)
            for update in one.commit(StepResult([[1]] * count, [None] * count), now):
                request = update.sequence.request
                tenancy.note_tokens(request.request_id, 0, 1)
                got[request.tenant, at] += 1
                if update.finish_reason is not None:
                    under_way[request.tenant, at] -= 1
                    got[request.tenant, at] += PROMPT
                    tenancy.end(request.request_id)
    return got


def test_a_tenant_that_works_in_one_replica_gets_what_others_have_elsewhere_taken_into_account():
    alone, told = served(False), served(True)
    assert alone["calm", "a"] < 0.17 * alone.total()  # half of one of three, as long as each is fair by itself
    assert told["calm", "a"] > 0.24 * told.total()  # three quarters of it: the other tenant has the two others
    assert told["flood", "a"] > 0.03 * told.total()
    assert told.total() == alone.total()


@pytest.mark.parametrize(
    ("calm_at", "elsewhere", "told"),
    [
        ("a", {"flood": 240}, {"flood": 240}),
        ("ab", {"flood": 240}, {"flood": 60}),
        ("abc", {"flood": 240}, {}),  # each is fair by itself
        ("a", {"flood": 200, "calm": 100}, {}),  # by weight as much
        ("a", {"flood": 260, "calm": 100}, {"flood": 60}),
        ("ab", {"flood": 260, "calm": 100}, {"flood": 15}),
        ("ab", {"flood": 100, "calm": 100}, {}),  # the flood is behind, and has requests in all
        ("", {"flood": 240, "calm": 30}, {}),
    ],
)
def test_a_replica_makes_up_for_its_part_of_a_lead(calm_at, elsewhere, told):
    """The flood has twice the weight, and requests in all three."""
    shares = TenantShares({"calm": TenantLimits(weight=0.5), "flood": TenantLimits()})
    for tenant, at in (("calm", calm_at), ("flood", "abc")):
        for replica in at:
            shares.note_requests(tenant, replica, 2)
            shares.note_requests(tenant, replica, -1)
        shares.note_computed(tenant, "a", 1)
    assert shares.served_elsewhere("a") == {}
    for tenant, tokens in elsewhere.items():
        shares.note_computed(tenant, "b", tokens - 60 if tenant == "flood" else tokens)
        shares.note_computed(tenant, "c", 60 if tenant == "flood" else 0)
        shares.note_computed(tenant, "a", 1000)
    assert shares.served_elsewhere("a") == told
