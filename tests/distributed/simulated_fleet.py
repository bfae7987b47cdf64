"""A fleet in simulated time: the classes that serve, over engines, calls, a network and a Ray Serve that are simulated.

Real are `Fleet` with its router, flights and tenants, `ReplicaLink`, `Outbox`, `EngineReplica` and the messages' bytes;
`DirectServer` and `DirectConnection` too, over a network that is simulated (`simulated_network.py`). An engine's token
is a function of the request's seed and of all tokens before it, so any mistake changes it. Time passes only where
nothing else is to be done, so a run of minutes takes a fraction of a second, and a seed's run is always the same.
"""

import asyncio
import hashlib
import random
import selectors
from types import SimpleNamespace

from simulated_network import Network

from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed import listing, outbox, replica_link
from pagemill.distributed import replica as replica_module
from pagemill.distributed.fleet import Fleet
from pagemill.distributed.replica import EngineReplica
from pagemill.engine.messages import DIGEST_BYTES, EngineReady, Held, SequenceOutput
from pagemill.engine.queries import SetTenant
from pagemill.engine.stats import EngineStats
from pagemill.errors import EngineDeadError, EngineRestartingError, EngineStoppedError
from pagemill.frontend.supervisor import RestartLimits

ROWS, STEP_S, PROMPT_PART = 3, 0.05, 8
FACTS = EngineReady(
    vocab_size=100, max_model_len=256, max_num_seqs=ROWS, longest_sequence=256, tenants=["default"], block_size=4,
    num_frames=64, kv_bytes=1 << 20, eos_token_ids=[0], hidden_size=8, model="m", kv_format="f",
)  # fmt: skip
STOP = 0
"""The token that ends an answer; one of 97 is it."""


def next_token(seed, index, tokens):
    digest = hashlib.blake2b(repr((seed, index, tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % 97


def answer(request, index):
    """Returns the tokens of an undisturbed run, and why they end."""
    tokens = [*request.prompt_token_ids]
    for _ in range(request.params.max_tokens):
        tokens.append(next_token(request.seed, index, tokens))
        if tokens[-1] == STOP:
            return tokens[len(request.prompt_token_ids) :], "stop"
    return tokens[len(request.prompt_token_ids) :], "length"


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


class SimulatedEngine:
    """Does what a `ProcessClient` does: one token for each of `ROWS` sequences in each step, first come, first served.

    pace: seconds of its steps over those of others.
    """

    pace = 1.0

    def __init__(self, config, on_held=None, peering=None):
        self.facts, self._on_held = FACTS, on_held
        self.running = []
        self.tenants = {"default": None}
        self.taken, self.wrong = set(), []
        self._came, self._outputs = asyncio.Event(), asyncio.Queue()
        self._steps = None

    async def load(self, on_progress):
        self._steps = asyncio.create_task(self._run())

    def submit(self, request):
        self.wrong += [f"{request.request_id} came twice"] * (request.request_id in self.taken)
        self.wrong += [f"nobody has told of {request.tenant}"] * (request.tenant not in self.tenants)
        parts = request.guaranteed_here.items()
        self.wrong += [
            f"{each} of a guarantee" for each in parts if not 0 <= each[1] <= self.tenants[each[0]].guaranteed_blocks
        ]
        self.taken.add(request.request_id)
        for index in range(request.params.n):
            tokens = [*request.prompt_token_ids, *request.answered]
            self.running.append([request.request_id, index, request, tokens, -(-len(tokens) // PROMPT_PART)])
        self._came.set()

    def abort(self, request_ids):
        self.running = [one for one in self.running if one[0] not in request_ids]

    def finish(self, sequences):
        self.running = [one for one in self.running if (one[0], one[1]) not in sequences]

    def pose(self, query):
        answered = asyncio.get_running_loop().create_future()
        if isinstance(query, SetTenant):
            self.tenants[query.name] = query.limits
            answered.set_result(self.facts)
        else:
            stats = dict.fromkeys(EngineStats.__struct_fields__, 0)
            answered.set_result(EngineStats(**stats | {"tenants": {}, "tiers": {}}))
        return answered

    async def receive(self):
        return await self._outputs.get()

    async def close(self):
        self._steps.cancel()

    async def _run(self):
        while True:
            self._came.clear()
            if not self.running:
                await self._came.wait()
            await asyncio.sleep(STEP_S * self.pace)
            outputs, stored = [], b""
            for one in self.running[:ROWS]:
                request_id, index, request, tokens, one[4] = *one[:4], one[4] - 1
                if one[4] > 0:
                    continue
                tokens.append(next_token(request.seed, index, tokens))
                num_answered = len(tokens) - len(request.prompt_token_ids)
                reason = "length" if num_answered == request.params.max_tokens else None
                reason = "stop" if tokens[-1] == STOP else reason
                outputs.append(
                    SequenceOutput(request_id=request_id, index=index, new_token_ids=[tokens[-1]], finish_reason=reason)
                )
                stored += hashlib.blake2b(repr(tokens).encode(), digest_size=DIGEST_BYTES).digest()
            ended = {(each.request_id, each.index) for each in outputs if each.finish_reason}
            self.running = [one for one in self.running if (one[0], one[1]) not in ended]
            self._on_held(Held(stored=stored, token_s=STEP_S * self.pace / PROMPT_PART, step_s=STEP_S * self.pace))
            if outputs:
                self._outputs.put_nowait(outputs)


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
    and them. reached: whether connections past Ray can be made. flowing: clear while these carry nothing."""

    def __init__(self, name, replica, network):
        self.name, self.replica, self.network, self.reached = name, replica, network, True
        self.gone, self.whole, self.flowing, self.streams = asyncio.Event(), asyncio.Event(), asyncio.Event(), 0
        self.whole.set()
        self.flowing.set()
        self.delay_s, self.lost = 0.002, 0.0

    def kill(self):
        self.gone.set()
        for task in [*self.replica._tasks, self.replica.engine._steps]:  # noqa: SLF001
            task.cancel()
        self.network.end_process(self)


class SimulatedRay:
    """A deployment's handle, the network, and Ray Serve's controller."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.peers, self.listed, self._numbers = {}, set(), 0
        self.network = Network(self.draw, self.peers)
        self.wait_ready = SimpleNamespace(remote=self._wait_ready)
        self.send = SimpleNamespace(remote=self._send)
        self.close = SimpleNamespace(remote=self._close)
        self.outputs = SimpleNamespace(remote=self._outputs)

    def options(self, *, stream):
        assert stream
        return self

    async def start(self):
        """Starts a replica, and lists it. One of four has no connections past Ray."""
        self._numbers += 1
        name, replica = f"r{self._numbers}", object.__new__(SimulatedReplica)
        await replica.__init__(EngineConfig(model="m"), None, None, name if self.draw.random() < 0.75 else None)
        self.peers[name] = peer = Peer(name, replica, self.network)
        self.list({*self.listed, peer.name})
        return peer

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
    monkeypatch.setattr(replica_module, "ProcessClient", SimulatedEngine)
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
