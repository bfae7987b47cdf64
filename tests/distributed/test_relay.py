"""What a front end outside Ray calls through a relay, while relays come and go."""

import asyncio
import sys
import tempfile
from pathlib import Path

import pytest

from pagemill.distributed import listing
from pagemill.distributed.relay import Relay, RelayedHandle
from pagemill.errors import EngineDeadError

pytestmark = pytest.mark.timeout(30)


class Remote:
    def __init__(self, remote):
        self.remote = remote


class Deployment:
    """What `Relay` calls of a handle: a replica that counts, and one that raises. called: what has come."""

    def __init__(self):
        self.called, self.streams_ended = [], 0
        self.send, self.wait_ready, self.outputs = Remote(self._send), Remote(self._ready), Remote(self._count)

    def options(self, *, stream):
        assert stream
        return self

    async def _ready(self, replica):
        pass

    async def _send(self, *arguments, replica):
        if replica == "broken":
            raise ValueError("no")
        self.called.append((*arguments, replica))

    async def _count(self, front_end, replica):
        assert replica in listing.kept
        try:
            for number in range(3 if front_end == "ends" else 1_000_000):
                await asyncio.sleep(0.001)
                yield b"%d" % number
        finally:
            self.streams_ended += 1


async def until(reached):
    while not reached():
        await asyncio.sleep(0.01)


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="pm-", dir="/tmp") as folder:
        yield str(Path(folder, "relay"))


@pytest.fixture
def listed(monkeypatch):
    """Gives the names of the replicas that the front end was told of, the latest last."""
    monkeypatch.setattr(listing, "watchers", [])
    return []


async def start(path):
    """Returns a relay's task, its deployment, and what tells it which replicas there are."""
    deployment, others = Deployment(), [*listing.watchers]
    relaying = asyncio.create_task(Relay(deployment).run(path))
    await until(lambda: Path(path).exists())
    (tell,) = (each for each in listing.watchers if each not in others)
    listing.watchers.remove(tell)  # in life they are in two processes
    return relaying, deployment, tell


def test_calls_and_streams_bring_what_replicas_return_and_raise(path, listed):
    async def scenario():
        relaying, deployment, tell = await start(path)
        relayed = RelayedHandle(path)
        listing.watchers.append(listed.append)
        await relayed.wait_ready.remote(replica=None)
        await until(lambda: listed == [set()])
        await relayed.send.remote("f", 1, b"batch", replica="a")
        assert deployment.called == [("f", 1, b"batch", "a")]
        with pytest.raises(EngineDeadError, match="ValueError"):
            await relayed.send.remote("f", 2, b"batch", replica="broken")
        ends = relayed.options(stream=True).outputs.remote("ends", replica="a")
        assert [each async for each in ends] == [b"0", b"1", b"2"]
        endless = relayed.outputs.remote("goes on", replica="a")
        assert await anext(endless) == b"0"
        await endless.aclose()
        await until(lambda: deployment.streams_ended == 2)  # the replica learns that nobody listens
        await until(lambda: not listing.kept)
        tell({"a", "b"})
        await until(lambda: listed[1:] == [{"a", "b"}])
        relaying.cancel()

    asyncio.run(scenario())


def test_all_calls_end_with_a_relay_and_the_next_one_takes_its_place(path, listed):
    async def scenario():
        first = await asyncio.create_subprocess_exec(sys.executable, "-c", RELAY, path)
        handle = RelayedHandle(path)
        listing.watchers.append(listed.append)
        await handle.wait_ready.remote(replica=None)
        await until(lambda: listed == [set()])
        waiting = asyncio.create_task(handle.send.remote("f", 1, b"never answered", replica="a"))
        await asyncio.sleep(0)
        first.kill()
        with pytest.raises(EngineDeadError):
            await waiting
        await until(lambda: listed == [set(), set()])
        with pytest.raises(EngineDeadError):
            await handle.send.remote("f", 2, b"nobody is there", replica="a")
        Path(path).unlink()
        relaying, deployment, _ = await start(path)
        await until(lambda: len(listed) == 3)
        await handle.send.remote("f", 3, b"again", replica="b")
        assert deployment.called == [("f", 3, b"again", "b")]
        relaying.cancel()
        await first.wait()

    asyncio.run(scenario())


RELAY = """
import asyncio, sys
from pagemill.distributed.relay import Relay

class Silent:
    class wait_ready:
        @staticmethod
        async def remote(replica): pass
    class send:
        @staticmethod
        async def remote(*arguments, replica): await asyncio.sleep(60)

asyncio.run(Relay(Silent).run(sys.argv[1]))
"""
