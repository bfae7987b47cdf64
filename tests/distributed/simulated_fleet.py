"""A fleet in simulated time: the classes that serve, over engines, calls, a network and a Ray Serve that are simulated.

Real are `Fleet` with its router, flights and tenants, `ReplicaLink`, `Outbox`, `EngineReplica` and the messages' bytes;
`DirectServer` and `DirectConnection` too, over a network that is simulated (`simulated_network.py`), and all that
fetches blocks and serves them (`simulated_blocks.py`). Engines are those of `simulated_engine.py`. Time passes only
where nothing else is to be done, so a run of minutes takes a fraction of a second, and a seed's run is always the same.
"""

import asyncio
import random
import selectors
from collections import Counter
from functools import partial
from types import SimpleNamespace

import simulated_blocks
from simulated_engine import SimulatedEngine
from simulated_network import Network
from simulated_sockets import Links

from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed import listing, outbox, replica_link
from pagemill.distributed import replica as replica_module
from pagemill.distributed.fleet import Fleet
from pagemill.distributed.replica import EngineReplica
from pagemill.engine.messages import Peering
from pagemill.engine.queries import SetTenant
from pagemill.errors import EngineDeadError, EngineRestartingError, EngineStoppedError
from pagemill.frontend.supervisor import RestartLimits

SECRET = b"of all replicas of this fleet..."


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Lets time pass only where every task waits for it."""

    class _Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            if timeout is None:
                raise AssertionError("nothing will ever happen any more")
            self.loop.now_s += timeout
            return []

    def __init__(self):
        selector = self._Selector()
        selector.loop, self.now_s = self, 1000.0
        super().__init__(selector)

    def time(self):
        return self.now_s


class FrontEndSeen(replica_module._FrontEnd):  # noqa: SLF001
    """Its first sign of life is in simulated time too."""

    def __init__(self):
        super().__init__()
        self.heard_s = asyncio.get_running_loop().time()


class SimulatedReplica(EngineReplica):
    def __del__(self):
        pass

    @property
    def engine(self):
        return self._client

    @property
    def front_ends(self):
        return self._front_ends


class Peer:
    """A replica as its callers see it. gone: set once it has been killed. whole: clear while a partition is between it
    and all others. reached: whether connections past Ray can be made. flowing: clear while these carry nothing.
    bytes_per_s: that go between it and other replicas."""

    def __init__(self, name, replica, network):
        self.name, self.replica, self.network = name, replica, network
        self.gone, self.whole, self.flowing, self.streams = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0
        self.heal()

    def heal(self):
        """Ends all that lies between it and others."""
        self.whole.set()
        self.flowing.set()
        self.delay_s, self.lost, self.reached, self.bytes_per_s = 0.002, 0.0, True, 1e6

    @property
    def blocks(self):
        return self.replica.engine.blocks

    def kill(self):
        self.gone.set()
        for task in [*self.replica._tasks, self.replica.engine._steps]:  # noqa: SLF001
            task.cancel()
        self.network.end_process(self)
        if self.blocks is not None:
            self.blocks.process.end()
            self.blocks.links.end_process(self.blocks.process)


class SimulatedRay:
    """A deployment's handle, the network, and Ray Serve's controller."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.peers, self.listed, self._numbers = {}, set(), 0
        self.network, self.links = Network(self.draw, self.peers), Links(self.draw, self.peers)
        self.wait_ready = SimpleNamespace(remote=self._wait_ready)
        self.send = SimpleNamespace(remote=self._send)
        self.close = SimpleNamespace(remote=self._close)
        self.outputs = SimpleNamespace(remote=self._outputs)

    def options(self, *, stream):
        assert stream
        return self

    async def start(self):
        """Starts a replica, and lists it. One of four has no connections past Ray; one of 20 gives no blocks, and one
        of 20 does not know the others' secret."""
        self._numbers += 1
        name, replica = f"r{self._numbers}", object.__new__(SimulatedReplica)
        secret = self.draw.choice([SECRET] * 18 + [b"another", None])
        peering = None if secret is None else Peering(secret, name)
        await replica.__init__(EngineConfig(model="m"), None, peering, name if self.draw.random() < 0.75 else None)
        self.peers[name] = peer = Peer(name, replica, self.network)
        self.list({*self.listed, peer.name})
        return peer

    def fetched(self):
        """Returns how many blocks have been fetched, and how many were wanted and did not come, by the reason."""
        figures = self._block_figures()
        failed = sum((Counter(each["fetches_failed"]) for each in figures), Counter())
        return failed + Counter(fetched=sum(each["blocks_fetched"] for each in figures))

    def served(self):
        """Returns how many blocks have been given to peers."""
        return sum(each["blocks_served"] for each in self._block_figures())

    def _block_figures(self):
        return [each.blocks.tiers.peers.figures() for each in self.peers.values() if each.blocks is not None]

    def list(self, names):
        self.listed = names
        for watcher in listing.watchers:
            watcher({*names})

    async def _wait_ready(self, replica):
        self.list(self.listed)

    def _called(self, name):
        peer = self.peers.get(name)
        if peer is None or (name not in self.listed and name not in listing.kept):
            raise EngineDeadError(f"replica {name} is gone")
        return peer

    async def _way(self, peer):
        """Passes a message's time on the way. Raises where its end is gone."""
        await asyncio.sleep(self.draw.uniform(0.5, 1.5) * peer.delay_s)
        await self._or_gone(peer, peer.whole.wait())

    async def _or_gone(self, peer, what):
        """Returns what something brings. Raises once the replica is gone, as far as one can see that."""
        gone, task = asyncio.ensure_future(peer.gone.wait()), asyncio.ensure_future(what)
        try:
            await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not peer.gone.is_set():
                return task.result()
            await peer.whole.wait()
            raise RuntimeError("the actor died")
        finally:
            gone.cancel()
            task.cancel()

    async def _lose(self, peer):
        if self.draw.random() < peer.lost:
            await asyncio.sleep(1e9)

    async def _send(self, front_end, number, batch, replica):
        peer = self._called(replica)
        await self._lose(peer)
        await self._way(peer)
        await peer.replica.send(front_end, number, batch, replica)
        await self._lose(peer)
        await self._way(peer)

    async def _close(self, front_end, replica):
        peer = self._called(replica)
        await self._lose(peer)
        await self._way(peer)
        await peer.replica.close(front_end, replica)

    async def _outputs(self, front_end, replica):
        peer = self._called(replica)
        await self._way(peer)
        peer.streams += 1
        stream, way = peer.replica.outputs(front_end, replica), asyncio.Queue()

        async def bring():
            async for each in stream:
                way.put_nowait(each)
            way.put_nowait(None)

        bringing = asyncio.create_task(bring())
        try:
            while (batch := await self._or_gone(peer, way.get())) is not None:
                await self._way(peer)
                yield batch
        finally:
            peer.streams -= 1
            if not peer.gone.is_set():  # Ray does not tell a replica that its caller is gone
                await asyncio.wait({bringing})


class Client:
    """A front end that lives once: it takes what a `Fleet` brings, and knows what it has asked for."""

    def __init__(self, ray, limits):
        self.ray = ray
        self.fleet = Fleet(EngineConfig(model="m", seed=1), ray, "least-work", RestartLimits())
        self.limits, self.asked, self.tokens, self.ends = limits, {}, {}, {}
        self.num_sent_again = 0
        self.made_pins = SimpleNamespace(requests=list)

    async def start(self):
        """Waits until one replica is there, and has been told of the tenants."""
        await self.fleet.load(lambda done, total: None)
        self._running = asyncio.create_task(self.fleet.run(self))
        for tenant, limits in self.limits.items():
            while not await self._told(SetTenant(tenant, limits)):
                await asyncio.sleep(0.5)

    async def _told(self, change):
        try:
            await self.fleet.ask(change)
        except (EngineDeadError, EngineRestartingError):  # no replica is there
            return False
        return True

    def submit(self, request):
        self.asked[request.request_id] = request
        self.fleet.submit(request)

    def receive(self, outputs):
        for tenant, limits in self.limits.items():
            assert self.sent(tenant) <= limits.max_running
        for each in outputs:
            at = each.request_id, each.index
            assert at not in self.ends, f"{at} has ended, and more comes"
            self.tokens.setdefault(at, []).extend(each.new_token_ids)
            if each.finish_reason is not None:
                self.ends[at] = each.error.error_type if each.error is not None else each.finish_reason

    async def close(self):
        await self.fleet.close()
        await asyncio.wait({self._running})
        assert isinstance(self._running.exception(), EngineStoppedError)

    def sent(self, tenant):
        """Returns how many of a tenant's sequences replicas have."""
        flights = [self.fleet._flights.get(one) for one in self.asked]  # noqa: SLF001
        return sum(one.asked.num_sequences for one in flights if one and one.replica and one.asked.tenant == tenant)

    def kill(self):
        """Ends the process: nothing is said to anybody."""
        listing.watchers.clear()
        listing.kept.clear()
        for link in [*self.fleet._links.values()]:  # noqa: SLF001
            for task in link._tasks:  # noqa: SLF001
                task.cancel()
        for task in [*self.fleet._tasks, self._running]:  # noqa: SLF001
            task.cancel()
        self.fleet.ended = EngineDeadError("killed")
        self.ray.network.end_process()


def run(monkeypatch, ray, scenario):
    """Runs a scenario in simulated time."""
    loop = SimulatedLoop()
    monkeypatch.setattr(asyncio, "start_server", ray.network.start_server)
    monkeypatch.setattr(asyncio, "open_connection", ray.network.open_connection)
    for module in (fleet_module, outbox, replica_link, replica_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    simulated_blocks.simulate(monkeypatch, loop, ray.links)
    monkeypatch.setattr(replica_module, "ProcessClient", partial(SimulatedEngine, links=ray.links))
    monkeypatch.setattr(replica_module, "_FrontEnd", FrontEndSeen)
    monkeypatch.setattr(listing, "watchers", [])
    monkeypatch.setattr(listing, "kept", set())
    try:
        loop.run_until_complete(scenario(loop))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
