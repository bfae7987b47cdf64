"""Namespaces separate over a fleet: who gives another salt, or is another tenant, neither goes to where equal tokens
were computed, nor is told of their blocks, nor gets any."""

import asyncio
import logging

import pytest
from simulated_blocks import BLOCK_SIZE
from simulated_engine import answer
from simulated_fleet import Client, SimulatedRay, run

from pagemill import SamplingParams
from pagemill.engine.messages import EngineRequest
from pagemill.tenant_limits import TenantLimits

PROMPT = [*range(1, 81)]
WHOLE = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
LONG_S = 60.0
TWO_THAT_SHARE = 0
"""A seed by which the first two replicas give each other blocks."""


class Asking:
    """Asks a fleet of two replicas for answers to one prompt, and notes what the replicas are sent. A request's tenant
    is "default", and its salt "mine", unless it says otherwise."""

    def __init__(self, ray):
        self.ray, self.client, self.num_asked, self.sent = (
            ray,
            Client(ray, {"team": TenantLimits(max_running=8)}),
            0,
            {},
        )

    async def begin(self):
        for _ in range(2):
            self.note_sent((await self.ray.start()).replica.engine)
        await self.client.start()

    def note_sent(self, engine):
        submit = engine.submit

        def note(request):
            submit(request)
            self.sent[request.request_id.rpartition("/")[2]] = engine, request.held, engine.running[-1]

        engine.submit = note

    def ask(self, tenant="default", salt="mine", max_tokens=4):
        self.num_asked += 1
        request = EngineRequest(
            request_id=f"q{self.num_asked}#1", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=max_tokens),
            arrival_s=asyncio.get_running_loop().time(), seed=self.num_asked, tenant=tenant, cache_salt=salt,
        )  # fmt: skip
        self.client.submit(request)
        return request

    async def ended(self, *requests):
        """Returns, for each, the engine that it went to, what that was told of others' blocks, and how many tokens it
        found, once all have their answers."""
        await asyncio.sleep(LONG_S)
        assert all(self.client.tokens[each.request_id, 0] == answer(each, 0)[0] for each in requests)
        sent = [self.sent[each.request_id] for each in requests]
        return [(engine, held, sequence.num_found * BLOCK_SIZE) for engine, held, sequence in sent]

    @property
    def num_fetched(self):
        return self.ray.fetched()["fetched"]


async def scenario(ray, tenant, salt):
    fleet = Asking(ray)
    await fleet.begin()
    ((first, held, found),) = await fleet.ended(fleet.ask())
    assert (held, found) == (None, 0)
    assert await fleet.ended(fleet.ask()) == [(first, None, WHOLE)], "its own go where their blocks are"
    ((engine, held, found),) = await fleet.ended(fleet.ask(tenant, salt))
    assert engine is not first, "both are idle, and this one was used less"
    assert (held, found, fleet.num_fetched) == (None, 0, 0)

    own = await fleet.ended(*(fleet.ask(max_tokens=90) for _ in range(6)))
    assert [found for _, _, found in own] == [WHOLE] * len(own)
    told = {held.address for _, held, _ in own if held is not None}
    assert told == {first.facts.peer_address}, "the first that moves is told where its blocks are, and fetches them"
    assert (fetched := fleet.num_fetched) >= WHOLE // BLOCK_SIZE

    others = await fleet.ended(*(fleet.ask(tenant, f"{salt}, another", max_tokens=90) for _ in range(6)))
    assert {engine for engine, _, _ in others} == {engine for engine, _, _ in own}
    assert {(held, found) for _, held, found in others} == {(None, 0)}
    assert fleet.num_fetched == fetched
    await fleet.client.close()


@pytest.mark.parametrize(("tenant", "salt"), [("default", "yours"), ("default", ""), ("team", "mine")])
def test_who_is_of_another_namespace_finds_nothing_anywhere(monkeypatch, caplog, tenant, salt):
    caplog.set_level(logging.CRITICAL)
    ray = SimulatedRay(TWO_THAT_SHARE)
    run(monkeypatch, ray, lambda loop: scenario(ray, tenant, salt))
