"""Host memory over disk: a block is found in one of them at any time."""

import numpy as np
import pytest
from disk_blocks import RECORD, content, digest_of, name_of, store_of

from pagemill.errors import KVStoreError
from pagemill.kvcache.host_store import HostStore
from pagemill.kvcache.offload_tiers import LOOK_AHEAD, OffloadTiers, Sources


def write(tiers: OffloadTiers, indices) -> None:
    tiers.write([name_of(i) for i in indices], [content(i) for i in indices])


def found(tiers: OffloadTiers, indices) -> list[bool]:
    """What is found can be read, and is right."""
    out = np.zeros((len(indices), RECORD), dtype=np.uint8)
    blocks = [(digest_of(i), 0) for i in indices]
    there = [source is not None for source in tiers.read(blocks, out)]
    assert tiers.holds(blocks) == there
    for row, i in enumerate(indices):
        assert not there[row] or (out[row] == content(i)).all()
    return there


@pytest.mark.parametrize("fails", [False, True])
def test_blocks_on_their_way_from_host_memory_to_disk_are_found(tmp_path, monkeypatch, fails):
    disk = store_of(tmp_path)
    host = HostStore(3, RECORD)
    tiers = OffloadTiers([host, disk], RECORD)
    write(tiers, range(3))
    put, seen = disk.write, []

    def watched(*blocks):
        seen.append(found(tiers, range(5)))
        if fails:
            raise KVStoreError("the disk takes no more")
        return put(*blocks)

    monkeypatch.setattr(disk, "write", watched)
    if fails:
        with pytest.raises(KVStoreError):
            write(tiers, [3, 4])
    else:
        write(tiers, [3, 4])
    assert seen == [[True] * 5]
    assert found(tiers, range(5)) == [not fails, not fails, True, True, True]
    assert host.holds([(digest_of(i), 0) for i in range(5)]) == [False, False, True, True, True]


def test_what_comes_to_host_memory_and_leaves_it_is_told_once(tmp_path):
    tiers = OffloadTiers([HostStore(3, RECORD), store_of(tmp_path)], RECORD, records_changes=True)
    told: dict[int, bool] = {}

    def take():
        changed = tiers.take_changed()
        told.update(zip((digest for digest, _ in changed), tiers.in_memory(changed), strict=True))
        return len(changed)

    assert take() == 0
    tiers.announce([name_of(0)], [content(0)])
    assert tiers.in_memory([(digest_of(0), 0), (digest_of(1), 0)]) == [True, False]
    write(tiers, range(5))
    assert take() == 7  # two of the five have left
    assert told == {digest_of(i): i > 1 for i in range(5)}
    assert take() == 0


def test_nothing_is_told_of_a_tier_on_disk_alone(tmp_path):
    tiers = OffloadTiers([store_of(tmp_path)], RECORD, records_changes=True)
    tiers.announce([name_of(0)], [content(0)])
    assert tiers.in_memory([(digest_of(0), 0)]) == [False]
    write(tiers, range(2))
    assert tiers.take_changed() == []
    assert tiers.in_memory([(digest_of(0), 0)]) == [False]


def test_what_host_memory_holds_goes_to_disk_at_the_end(tmp_path):
    disk = store_of(tmp_path)
    tiers = OffloadTiers([HostStore(3, RECORD), disk], RECORD)
    write(tiers, range(5))
    assert tiers.holds([(digest_of(i), 0) for i in range(5)], lasting=True) == [True, True, False, False, False]
    tiers.sink(tiers.keepable([]), 2)
    disk.close()
    again = OffloadTiers([store_of(tmp_path)], RECORD)
    assert found(again, range(5)) == [True] * 5


def test_without_a_disk_what_made_room_is_gone():
    tiers = OffloadTiers([HostStore(3, RECORD)], RECORD)
    write(tiers, range(5))
    assert found(tiers, range(5)) == [False, False, True, True, True]


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_is_looked_up_in_few_pieces_and_no_block_of_it_twice(tmp_path, monkeypatch, order):
    disk, count = store_of(tmp_path), 3 * LOOK_AHEAD
    tiers = OffloadTiers([HostStore(3, RECORD), disk], RECORD)
    write(tiers, range(9))
    blocks = [(digest_of(i), 0) for i in range(count)]
    wanted, asked, holds = tiers.where(blocks), [], disk.holds
    monkeypatch.setattr(disk, "holds", lambda blocks: asked.append(blocks) or holds(blocks))
    sources = Sources(tiers.where, [digest for digest, _ in blocks])
    assert [sources[block] for block in blocks[::order]][::order] == wanted == [1] * 6 + [0] * 3 + [None] * (count - 9)
    assert len({block for part in asked for block in part}) == sum(map(len, asked)) == count - 3
    assert order < 0 or len(asked) == 3
