"""A link between a front end and a replica past Ray: what goes over it, and what ends it, over real sockets."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
from simulated_fleet import SimulatedEngine, SimulatedReplica

from pagemill import SamplingParams
from pagemill.config import EngineConfig
from pagemill.distributed import replica as replica_module
from pagemill.distributed.direct import TOKEN_BYTES
from pagemill.distributed.messages import OUTBOUND, Offer
from pagemill.distributed.replica_link import ReplicaLink
from pagemill.engine.messages import EngineRequest

HOST = "127.0.0.1"


class Handle:
    """Calls a replica in this process, as a handle does. batches: what has come through it. told: offers, as changed on
    the way."""

    def __init__(self, replica, change):
        self.replica, self.change, self.batches, self.sent = replica, change, [], 0
        self.outputs = SimpleNamespace(remote=self._outputs)
        self.send = SimpleNamespace(remote=self._send)
        self.close = SimpleNamespace(remote=replica.close)

    def options(self, *, stream):
        return self

    async def _send(self, *arguments, replica):
        self.sent += 1
        await self.replica.send(*arguments, replica)

    async def _outputs(self, front_end, replica):
        async for batch in self.replica.outputs(front_end, replica):
            self.batches.append(batch)
            yield self.change(batch)


class User:
    def __init__(self):
        self.facts, self.ended, self.done, self.tokens = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0

    def note_facts(self, link, facts):
        self.facts.set()

    def note_held(self, link, held):
        pass

    def note_outputs(self, link, outputs):
        self.tokens += sum(len(each.new_token_ids) for each in outputs)
        if any(each.finish_reason for each in outputs):
            self.done.set()

    def note_end(self, link):
        self.ended.set()


def request(request_id, tokens):
    params = SamplingParams(max_tokens=tokens)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=[1, 2, 3], params=params, arrival_s=time.monotonic(), seed=5
    )


def changed(batch, **fields):
    """Returns a batch whose offer says something else."""
    outbound = OUTBOUND.decode(batch)
    messages = [
        msgspec.structs.replace(each, **fields) if isinstance(each, Offer) else each for each in outbound.messages
    ]
    return msgspec.msgpack.encode(msgspec.structs.replace(outbound, messages=messages))


def run(monkeypatch, scenario, change=lambda batch: batch):
    async def go():
        monkeypatch.setattr(replica_module, "ProcessClient", SimulatedEngine)
        replica, user = object.__new__(SimulatedReplica), User()
        await replica.__init__(EngineConfig(model="m"), None, None, HOST)
        handle = Handle(replica, change)
        link = ReplicaLink("r", "f", handle, user)
        try:
            await asyncio.wait_for(user.facts.wait(), 10)
            await asyncio.wait_for(scenario(replica, link, user, handle), 10)
        finally:
            await link.close()
            await replica_module.EngineReplica.__del__(replica)

    asyncio.run(go())


async def answered(link, user):
    link.send(request("q", 3))
    await user.done.wait()


def test_batches_go_past_ray_which_carries_the_offer_alone(monkeypatch):
    async def scenario(replica, link, user, handle):
        await answered(link, user)
        assert user.tokens
        assert handle.sent == 0
        ((offer,),) = (OUTBOUND.decode(batch).messages for batch in handle.batches)
        assert isinstance(offer, Offer)
        await link.close()
        assert user.ended.is_set()
        assert not replica.front_ends

    run(monkeypatch, scenario)


def test_requests_end_with_a_front_end_whose_connection_breaks(monkeypatch):
    async def scenario(replica, link, user, handle):
        link.send(request("q", 200))
        while not replica.engine.running:
            await asyncio.sleep(0.01)
        link._direct.abort()  # noqa: SLF001
        await user.ended.wait()
        while replica.engine.running or replica.front_ends:
            await asyncio.sleep(0.01)

    run(monkeypatch, scenario)


def test_the_last_words_of_a_replica_come_before_its_end(monkeypatch):
    async def scenario(replica, link, user, handle):
        for each in replica.front_ends.values():
            each.outbox.put(replica_module.Failure.of(replica_module.EngineDeadError("out of memory")))
            each.outbox.close()
        await user.ended.wait()
        assert "out of memory" in link.death.message

    run(monkeypatch, scenario)


@pytest.mark.parametrize("fields", [{"token": b"x" * TOKEN_BYTES}, {"port": 1}])
def test_ray_carries_all_where_no_connection_can_be_made(monkeypatch, fields):
    monkeypatch.setattr(replica_module, "CONNECT_S", 0.2)

    async def scenario(replica, link, user, handle):
        await answered(link, user)
        assert user.tokens
        assert handle.sent
        assert len(handle.batches) > 2
        assert not replica._direct._offers  # noqa: SLF001

    run(monkeypatch, scenario, lambda batch: changed(batch, **fields))
