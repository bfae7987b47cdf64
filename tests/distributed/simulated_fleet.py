"""A fleet in simulated time: the classes that serve, over engines, calls, a network and a Ray Serve that are simulated.

Real are `Fleet` with its router, flights and tenants, `ReplicaLink`, `Outbox`, `EngineReplica` and the messages' bytes;
`DirectServer` and `DirectConnection` too, over a network that is simulated (`simulated_network.py`), and all that
fetches blocks and serves them (`simulated_blocks.py`). An engine's token is a function of the request's seed and of all
tokens before it, and of any block whose bytes are another's, so any mistake changes it. Time passes only where nothing
else is to be done, so a run of minutes takes a fraction of a second, and a seed's run is always the same.
"""

import asyncio
import hashlib
import random
import selectors
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from types import SimpleNamespace

import msgspec
import simulated_blocks
from simulated_blocks import BLOCK_SIZE, FORMAT, EngineBlocks, SimulatedPool, content
from simulated_network import Network
from simulated_sockets import Links

from pagemill.config import EngineConfig
from pagemill.distributed import fleet as fleet_module
from pagemill.distributed import listing, outbox, replica_link
from pagemill.distributed import replica as replica_module
from pagemill.distributed.fleet import Fleet
from pagemill.distributed.replica import EngineReplica
from pagemill.engine.messages import EngineReady, EngineRequest, Held, Peering, SequenceOutput, name_in_memory
from pagemill.engine.queries import SetTenant
from pagemill.engine.stats import EngineStats
from pagemill.errors import EngineDeadError, EngineRestartingError, EngineStoppedError
from pagemill.frontend.supervisor import RestartLimits
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.namespace import Namespace

ROWS, STEP_S, PROMPT_PART = 3, 0.05, 8
FACTS = EngineReady(
    vocab_size=100, max_model_len=256, max_num_seqs=ROWS, longest_sequence=256, tenants=["default"],
    block_size=BLOCK_SIZE, num_frames=64, kv_bytes=1 << 20, eos_token_ids=[0], hidden_size=8, model="m", kv_format="f",
    fingerprint=bytes.fromhex(FORMAT.fingerprint), kv_format_name=FORMAT.kv_format, numerics=FORMAT.numerics,
)  # fmt: skip
SECRET = b"of all replicas of this fleet..."
STOP = 0
"""The token that ends an answer; one of 97 is it."""


def next_token(seed, index, tokens):
    digest = hashlib.blake2b(bytes(tokens), key=b"%d %d" % (seed, index), digest_size=4).digest()
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


@dataclass(eq=False)
class Running:
    """A sequence. parts: how many steps its prompt takes yet, the one that brings the first token included. load: of
    its blocks, which is under way. is_corrupt: whether a block was used whose bytes are another's."""

    request: EngineRequest
    index: int
    tokens: list[int]
    root: bytes
    digests: list[bytes] = field(default_factory=list)
    has_begun: bool = False
    parts: int = 0
    load: int | None = None
    num_found: int = 0
    num_published: int = 0
    is_corrupt: bool = False

    @property
    def at(self):
        return self.request.request_id, self.index

    def name_blocks(self):
        extend_chain(self.digests, self.root, self.tokens, BLOCK_SIZE)

    @property
    def of_prompt(self):
        """Returns the digests of what it may find: its last token is computed in any case."""
        return self.digests[: (len(self.tokens) - 1) // BLOCK_SIZE]


class SimulatedEngine:
    """Does what a `ProcessClient` does: one token for each of `ROWS` sequences in each step, first come, first served.

    What it has computed lies in a pool, and it fetches what peers have. pace: seconds of its steps over those of
    others. claims: whether it tells of blocks before it has them.
    """

    pace, claims = 1.0, False

    def __init__(self, config, on_held=None, peering=None, links=None):
        self.facts, self._on_held = FACTS, on_held
        self.running = []
        self.tenants = {"default": None}
        self.taken, self.wrong = set(), []
        self._came, self._outputs = asyncio.Event(), asyncio.Queue()
        self._steps = None
        self.blocks = None if peering is None else EngineBlocks(links, peering, self.wrong)
        self._pool = SimulatedPool() if self.blocks is None else self.blocks.pool
        if self.blocks is not None:
            self.facts = msgspec.structs.replace(FACTS, peer_address=self.blocks.address)

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
        space = Namespace(request.tenant, request.cache_salt)
        root = namespace_root(space, FACTS.fingerprint, FACTS.kv_format_name, FACTS.numerics)
        for index in range(request.params.n):
            self.running.append(Running(request, index, [*request.prompt_token_ids, *request.answered], root))
            self.running[-1].name_blocks()
        digests = self.running[-1].digests
        if self.blocks is not None:
            self.blocks.note_held(request, root, digests)
        if self.claims:
            self._pool.changed |= dict.fromkeys(digests, True)
        self._came.set()

    def abort(self, request_ids):
        self.running = [one for one in self.running if one.request.request_id not in request_ids]

    def finish(self, sequences):
        self.running = [one for one in self.running if one.at not in sequences]

    def pose(self, query):
        answered = asyncio.get_running_loop().create_future()
        if isinstance(query, SetTenant):
            self.tenants[query.name] = query.limits
            answered.set_result(self.facts)
        else:
            answered.set_result(EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 0)))
        return answered

    async def receive(self):
        return await self._outputs.get()

    async def close(self):
        self._steps.cancel()
        if self.blocks is not None:
            await self.blocks.close()

    async def _run(self):
        while True:
            self._came.clear()
            if not self.running and (self.blocks is None or not self.blocks.loading):
                await self._came.wait()
            await asyncio.sleep(STEP_S * self.pace)
            outputs = self._step()
            self._tell()
            if outputs:
                self._outputs.put_nowait(outputs)

    def _step(self):
        outputs = []
        self._end_loads()
        for one in [*islice(filter(self._is_ready, self.running), ROWS)]:
            one.parts -= 1
            if one.parts > 0:
                continue
            token = next_token(one.request.seed, one.index, one.tokens)
            one.tokens.append((token + one.is_corrupt) % 97)
            self._publish(one)
            num_answered = len(one.tokens) - len(one.request.prompt_token_ids)
            reason = "length" if num_answered == one.request.params.max_tokens else None
            reason = "stop" if one.tokens[-1] == STOP else reason
            request_id, index = one.at
            outputs.append(
                SequenceOutput(
                    request_id=request_id, index=index, new_token_ids=one.tokens[-1:], finish_reason=reason,
                    num_cached_tokens=one.num_found * BLOCK_SIZE,
                )
            )  # fmt: skip
        self.finish({(each.request_id, each.index) for each in outputs if each.finish_reason})
        return outputs

    def _tell(self):
        token_s, step_s = STEP_S * self.pace / PROMPT_PART, STEP_S * self.pace
        told, self._pool.changed = self._pool.changed, {}
        stored, removed = (
            b"".join(name_in_memory(digest) for digest, is_here in told.items() if is_here is how)
            for how in (True, False)
        )
        fetch_s = {}
        if self.blocks is not None:
            self.blocks.note_step(step_s, token_s)
            fetch_s = self.blocks.tiers.fetch_times()
        self._on_held(
            Held(stored=stored, removed=removed, token_s=token_s, tokens=10**6, step_s=step_s, fetch_s=fetch_s)
        )

    def _is_ready(self, one):
        """Returns whether a sequence can be computed. It begins with what others have of it."""
        if not one.has_begun:
            one.has_begun, one.load = True, self.blocks and self.blocks.load(one.of_prompt)
            if one.load is None:
                self._find(one)
        return one.load is None

    def _end_loads(self):
        over = self.blocks.finished() if self.blocks is not None else ()
        for one in self.running if over else ():
            if one.load in over:
                one.load = None
                self._find(one)

    def _find(self, one):
        """Lets a sequence begin with the blocks of it that are here."""
        found = self._pool.find(one.of_prompt)
        if any((record != content(digest)).any() for digest, record in zip(one.digests, found, strict=False)):
            self.wrong.append("a block was used whose bytes are another's")
            one.is_corrupt = True
        one.parts = -(-(len(one.tokens) - len(found) * BLOCK_SIZE) // PROMPT_PART)
        one.num_found = one.num_published = len(found)

    def _publish(self, one):
        """Keeps a sequence's blocks that are full by now."""
        one.name_blocks()
        for digest in one.digests[one.num_published :]:
            if (frame := self._pool.take()) is not None:
                self._pool.frames[frame] = 0x5A if one.is_corrupt else content(digest)
                self._pool.publish(digest, frame)
        one.num_published = len(one.digests)


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
