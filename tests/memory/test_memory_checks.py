"""Wrong uses of the memory manager are refused, and its check names what is broken."""

from __future__ import annotations

import pytest
from stepped_memory import ROOT, SIZE, Engine, tokens_of

from pagemill.errors import MemoryInvariantError
from pagemill.memory.manager import MemoryManager


def test_wrong_uses_are_refused():
    memory = MemoryManager(8, SIZE, [None])
    table, _ = memory.open([1, 2, 3], [], ROOT, 0.0, 2)
    memory.reserve(table, 3)
    with pytest.raises(ValueError, match="4 are reserved"):
        memory.commit(table, 5, [1, 2, 3, 4, 5], [])
    memory.commit(table, 3, [1, 2, 3], [])
    with pytest.raises(ValueError, match="3 tokens are committed"):
        memory.commit(table, 2, [1, 2, 3], [])
    with pytest.raises(ValueError, match="only 3 tokens"):
        memory.fork(table, 4)
    memory.drain(1)
    with pytest.raises(ValueError, match="must rise"):
        memory.drain(1)
    memory.close(table, 0.0)
    with pytest.raises(KeyError):
        memory.close(table, 0.0)
    with pytest.raises(ValueError, match="frames"):
        MemoryManager(0, SIZE, [None])


def break_references(memory, table):
    memory.core.blocks.references[table.blocks[0][0]] += 1


def break_frame(memory, table):
    memory.core.blocks.frame[table.blocks[0][0]] = memory.core.blocks.frame[table.blocks[0][1]]


def break_free(memory, table):
    memory.core.frames.give([memory.core.blocks.frame[table.blocks[0][0]]])


def break_index(memory, table):
    memory.core.index.by_digest[0].popitem()


def break_children(memory, table):
    memory.core.index.children.popitem()


def break_policy(memory, table):
    memory.tenants["default"].policy.add(table.blocks[0][0], 0.0)


def break_length(memory, table):
    table.length = 100


def break_row(memory, table):
    memory.place(table, 1)
    memory.place(memory.fork(table, 4), 1)


def break_publishing(memory, table):
    table.length = 4


def break_group(memory, table):
    memory.core.blocks.group[table.blocks[0][0]] = 1


def break_hold(memory, table):
    memory.core.held.append((-1, table.tenant, []))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_references, "references"),
        (break_frame, "every frame"),
        (break_free, "every frame"),
        (break_index, "published if and only if"),
        (break_children, "children"),
        (break_policy, "cached if and only if"),
        (break_length, "committed tokens have blocks"),
        (break_row, "a row belongs to one table"),
        (break_publishing, "not published"),
        (break_group, "a block belongs to one group"),
        (break_hold, "retired step"),
    ],
)
def test_check_names_what_is_broken(damage, message):
    engine = Engine(16)
    table, _ = engine.prefill(tokens_of(9))
    engine.memory.check()
    damage(engine.memory, table)
    with pytest.raises(MemoryInvariantError, match=message):
        engine.memory.check()
