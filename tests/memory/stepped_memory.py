"""Engine: a memory manager, driven by hand as a scheduler would, and the tokens that tests give it."""

from __future__ import annotations

from pagemill.memory.block_table import BlockTable
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.manager import MemoryManager

ROOT = root_digest(b"model", "float32 16", "reference", "")
OTHER = root_digest(b"model", "float32 16", "reference", "another namespace")
SIZE = 4


class Engine:
    """Does to the manager what a scheduler does, one sequence and one step at a time."""

    def __init__(self, frames: int, windows=(None,), **settings) -> None:
        self.memory = MemoryManager(frames, SIZE, windows, **settings)
        self.now = 0.0
        self.steps = 0

    def open(self, tokens, root=ROOT, limit=None):
        self.now += 1
        digests: list[bytes] = []
        extend_chain(digests, root, tokens, SIZE)
        return self.memory.open(tokens, digests, root, self.now, len(tokens) - 1 if limit is None else limit)

    def step(self, table: BlockTable, tokens, up_to: int):
        digests: list[bytes] = []
        extend_chain(digests, table.root, tokens[:up_to], SIZE)
        assert self.memory.reserve(table, up_to) is None
        self.steps += 1
        work = self.memory.drain(self.steps)
        self.memory.commit(table, up_to, tokens, digests)
        self.memory.retire(self.steps)
        self.memory.check()
        return work

    def prefill(self, tokens, root=ROOT, chunk=1000):
        table, found = self.open(tokens, root)
        for end in range(found + chunk, len(tokens) + chunk, chunk):
            self.step(table, tokens, min(end, len(tokens)))
        return table, found

    def close(self, table) -> None:
        self.now += 1
        self.memory.close(table, self.now)
        self.memory.check()

    def frames(self, table, group=0):
        return [self.memory.core.blocks.frame[block] for block in table.blocks[group]]


def tokens_of(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def found_whole(engine: Engine, first: int) -> int:
    digests: list[bytes] = []
    extend_chain(digests, ROOT, tokens_of(12, first), SIZE)
    return engine.memory.peek(digests, ROOT)
