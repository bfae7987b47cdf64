"""A guarantee over two real engines: what a tenant uses of it in one, it has no right to in the other."""

from collections import Counter

import pytest
from drive import request

from pagemill.distributed.fleet_tenancy import FleetTenancy, Wanted
from pagemill.sampling.params import SamplingParams
from pagemill.tenant_limits import TenantLimits
from shallow import FRAME_BYTES

pytestmark = pytest.mark.shallow
FRAMES, GUARANTEED = 60, 30
LIMITS = {"calm": TenantLimits(guaranteed_blocks=GUARANTEED), "flood": TenantLimits()}


@pytest.mark.parametrize(("elsewhere", "preempted"), [(False, True), (True, False)])
def test_a_guarantee_that_is_used_in_another_engine_takes_nothing_from_a_flood(make_engine, elsewhere, preempted):
    names = ("a", "b")
    engines = {
        name: make_engine(max_model_len=512, max_num_seqs=8, kv_memory=FRAMES * FRAME_BYTES, tenants=LIMITS,
                          target_tpot_ms="off") for name in names
    }  # fmt: skip
    tenancy, came = FleetTenancy(LIMITS), Counter()

    def send(name, at, tenant, first, prompt, answer):
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        asked = request(name, [*range(first, first + prompt)], params, tenant=tenant)
        assert tenancy.place(name, Wanted.of(asked, engines[at].ready), names) == ""
        tenancy.note_sent(name, at)
        asked.guaranteed_here = tenancy.shares.guaranteed_here(at)
        engines[at].add_request(asked)

    def run(at, until):
        while not until():
            for output in engines[at].step():
                came[output.request_id] += len(output.new_token_ids)
                tenancy.note_tokens(output.request_id, output.num_cached_tokens, len(output.new_token_ids))
                if output.finish_reason is not None:
                    tenancy.end(output.request_id)

    if elsewhere:
        send("first", "a", "calm", 1000, GUARANTEED * 16 - 30, 20)
        run("a", lambda: came["first"] > 1)
    for number in range(3):  # three times 17 blocks, of which a fourth would need more than are left
        send(f"flood{number}", "b", "flood", 2000 + 1000 * number, 250, 20)
    run("b", lambda: all(came[f"flood{number}"] > 1 for number in range(3)))
    send("second", "b", "calm", 9000, 250, 8)
    run("b", lambda: came["second"] > 0)
    assert (engines["b"].stats().preemptions > 0) == preempted
    assert (min(came[f"flood{number}"] for number in range(3)) == 20) != preempted
    run("b", lambda: not engines["b"].has_work())
    assert [came[name] for name in ("flood0", "flood1", "flood2", "second")] == [20, 20, 20, 8]
    if elsewhere:
        run("a", lambda: not engines["a"].has_work())
        assert tenancy.shares.guaranteed_here("b") == {"calm": GUARANTEED}
