"""Pins in a fleet: made everywhere, or in one replica where a limit counts."""

from recorded_fleet import RecordedLink, request, run, settle

from pagemill.distributed import fleet as fleet_module
from pagemill.engine.messages import AbortRequests, SequenceOutput
from pagemill.engine.queries import SetTenant, Unpin
from pagemill.errors import InvalidRequestError
from pagemill.tenant_limits import TenantLimits


def make_pin(fleet, links):
    """Returns who of two replicas has made a pin, the other, and the copy that it is to make."""
    fleet.submit(request("pin#1", pin="system"))
    (main,) = [link for link in links.values() if link.requests]
    (other,) = [link for link in links.values() if not link.requests]
    main.bring("pin#1", finish_reason="length")
    (copy,) = other.sent
    return main, other, copy


def test_a_pin_is_made_elsewhere_once_it_has_been_made_and_refusals_are_logged(monkeypatch, caplog):
    async def scenario(fleet, links, frontend):
        main, other, copy = make_pin(fleet, links)
        assert (copy.pin, main.requests) == ("system", ["pin#1"])
        assert copy.request_id != "pin#1"
        error = SequenceOutput(request_id=copy.request_id, index=0, new_token_ids=[], finish_reason="error")
        error.error = fleet_module.refusals(copy, InvalidRequestError("too large"))[0].error
        fleet.note_outputs(other, [error])
        assert "too large" in caplog.text
        fleet.submit(request("pin#2", pin="other"))
        (at,) = [link for link in links.values() if "pin#2" in link.requests]
        fleet.abort(["pin#2"])
        assert [link for link in links.values() if any(isinstance(each, AbortRequests) for each in link.sent)] == [at]

    run(monkeypatch, scenario, names=("a", "b"))


def test_a_copy_of_a_pin_that_is_unpinned_before_it_is_made_is_ended(monkeypatch):
    async def scenario(fleet, links, frontend):
        _, other, copy = make_pin(fleet, links)
        await fleet.ask(Unpin("system", "default", ""))
        other.asked.clear()
        other.bring(copy.request_id, finish_reason="length")
        await settle()
        assert other.asked == [Unpin("system", "default", "")]

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_that_have_expired_leave_no_home(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        fleet.submit(request("short", tenant="team", pin="short", pin_expires_s=0.0))
        next(link for link in links.values() if link.requests).bring("short", finish_reason="length")
        await fleet.ask(SetTenant("team", TenantLimits()))
        fleet.submit(request("pin", tenant="team", pin="system"))
        next(link for link in links.values() if "pin" in link.requests).bring("pin", finish_reason="length")
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        await settle()
        assert len([link for link in links.values() if Unpin("system", "team", "") in link.asked]) == 1

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_of_a_tenant_whose_blocks_are_limited_are_in_one_replica_and_count_there(monkeypatch):
    async def scenario(fleet, links, frontend):
        def pins_at():
            return {name: [one.pin for one in link.sent if getattr(one, "pin", None)] for name, link in links.items()}

        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        for name in ("pin#1", "pin#2"):  # each a block of 16 tokens, and two while it is computed
            fleet.submit(request(name, tenant="team", pin=name))
            home = next(link for link in links.values() if name in link.requests)
            home.bring(name, finish_reason="length")
        assert pins_at() == {name: ["pin#1", "pin#2"] if link is home else [] for name, link in links.items()}
        for number in range(3):  # two blocks each, and then four
            asked = request(f"q{number}", tenant="team")
            asked.prompt_token_ids = [1] * (40 if number == 2 else 20)
            fleet.submit(asked)
        at = {name: [one for one in link.requests if one[0] == "q"] for name, link in links.items()}
        assert sorted(one for mine in at.values() for one in mine) == ["q0", "q1"], "the third waits"
        assert len({name for name, mine in at.items() if mine}) == 2
        fleet.abort([one for name, mine in at.items() if name != home.name for one in mine])
        assert home.requests[-1] == "q2", "where the pins are, that replica keeps the limit"
        home.die()
        (other,) = [link for link in links.values() if link is not home]
        assert pins_at()[other.name] == ["pin#1", "pin#2"], "they have another home"
        await fleet.ask(Unpin("pin#1", "team", ""))
        await fleet.ask(Unpin("pin#2", "team", ""))
        fleet.note_listed({"b", "c"} if other.name == "b" else {"a", "c"})
        await settle()
        third = RecordedLink.opened[-1]
        third.come()
        await settle()
        assert [one for one in third.sent if getattr(one, "pin", None)] == []

    run(monkeypatch, scenario, names=("a", "b"))


def test_pins_move_to_one_replica_where_a_limit_comes_and_to_all_where_it_goes(monkeypatch):
    async def scenario(fleet, links, frontend):
        await fleet.ask(SetTenant("team", TenantLimits()))
        fleet.submit(request("pin", tenant="team", pin="system"))
        next(link for link in links.values() if link.requests).bring("pin", finish_reason="length")
        assert [len(link.sent) for link in links.values()] == [1, 1]
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks=6)))
        await settle()
        unpinned = [name for name, link in links.items() if Unpin("system", "team", "") in link.asked]
        assert len(unpinned) == 1
        await fleet.ask(SetTenant("team", TenantLimits(max_blocks="50%")))
        assert [len(link.sent) for name, link in links.items() if name in unpinned] == [2]

    run(monkeypatch, scenario, names=("a", "b"))
