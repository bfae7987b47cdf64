"""An engine in simulated time: rows, steps, blocks in a pool, and what peers have, without a model.

A token is a function of the request's seed and of all tokens before it, and of any block whose bytes are another's, so
any mistake changes it.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field
from itertools import islice

import msgspec
from simulated_blocks import BLOCK_SIZE, FORMAT, EngineBlocks, SimulatedPool, content

from pagemill.engine.messages import EngineReady, EngineRequest, Held, SequenceOutput, name_in_memory
from pagemill.engine.queries import SetTenant
from pagemill.engine.stats import EngineStats
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.namespace import Namespace

ROWS, STEP_S, PROMPT_PART = 3, 0.05, 8
FACTS = EngineReady(
    vocab_size=100, max_model_len=256, max_num_seqs=ROWS, longest_sequence=256, tenants=["default"],
    block_size=BLOCK_SIZE, num_frames=64, kv_bytes=1 << 20, kv_memory=1 << 20, eos_token_ids=[0], hidden_size=8,
    model="m", kv_format="f",
    fingerprint=bytes.fromhex(FORMAT.fingerprint), kv_format_name=FORMAT.kv_format, numerics=FORMAT.numerics,
)  # fmt: skip
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
