"""A link between a front end and a replica past Ray: what goes over it, and what ends it, over real sockets."""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest
from simulated_engine import SimulatedEngine
from simulated_fleet import SimulatedReplica

from pagemill import SamplingParams
from pagemill.config import EngineConfig
from pagemill.distributed import replica as replica_module
from pagemill.distributed.direct import MAX_BATCH_BYTES, MAX_STRANGERS, TOKEN_BYTES, DirectServer, connect
from pagemill.distributed.messages import OUTBOUND, Offer
from pagemill.distributed.replica_link import ReplicaLink
from pagemill.engine.messages import EngineRequest
from pagemill.engine.wire import HEADER

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


async def say_last_words(replica, link, user):
    """Lets a replica say what its engine died of, and sees that the front end learns it."""
    for each in replica.front_ends.values():
        each.outbox.put(replica_module.Failure.of(replica_module.EngineDeadError("out of memory")))
        each.outbox.close()
    await user.ended.wait()
    assert "out of memory" in link.death.message


def test_the_last_words_of_a_replica_come_before_its_end(monkeypatch):
    async def scenario(replica, link, user, handle):
        await say_last_words(replica, link, user)

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


def test_a_batch_that_cannot_be_sent_ends_nothing_before_the_last_words(monkeypatch):
    async def scenario(replica, link, user, handle):
        async def fail(batch):
            raise ConnectionResetError

        link._direct.send = fail  # noqa: SLF001
        link.send(request("q", 3))
        await asyncio.sleep(0.05)
        assert link.death is None
        await say_last_words(replica, link, user)

    run(monkeypatch, scenario)


def serve(scenario, host=HOST):
    async def go():
        server = DirectServer()
        await server.start(host)
        try:
            await asyncio.wait_for(scenario(server), 10)
        finally:
            server.close()

    asyncio.run(go())


def test_a_token_is_for_one_connection():
    async def scenario(server):
        offer, made = server.offer()
        assert await connect(offer)
        await made
        again = await connect(offer)
        assert await again.receive_first() is None

    serve(scenario)


def test_an_offer_has_the_address_that_the_replica_has_by_a_name():
    async def scenario(server):
        offer, made = server.offer()
        assert offer.host in ("127.0.0.1", "::1")
        assert await connect(offer)
        await made

    serve(scenario, "localhost")


def test_an_offer_that_has_been_given_up_is_for_none():
    async def scenario(server):
        offer, made = server.offer()
        made.cancel()
        connection = await connect(offer)
        assert await connection.receive_first() is None

    serve(scenario)


def test_those_who_say_no_token_keep_nobody_out_and_are_closed(monkeypatch):
    async def scenario(server):
        offer, made = server.offer()
        strangers = [await asyncio.open_connection(HOST, offer.port) for _ in range(MAX_STRANGERS + 8)]
        assert await connect(offer)
        await made
        for reader, _ in strangers[:9]:  # the oldest had to go
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await reader.readexactly(1)
        assert not strangers[-1][0].at_eof()
        for _, writer in strangers:
            writer.close()

    serve(scenario)


def test_a_batch_that_is_too_long_ends_the_connection_before_it_is_read():
    async def scenario(server):
        offer, made = server.offer()
        connection = await connect(offer)
        connection._writer.write(HEADER.pack(MAX_BATCH_BYTES + 1))  # noqa: SLF001
        assert await (await made).receive() is None

    serve(scenario)
