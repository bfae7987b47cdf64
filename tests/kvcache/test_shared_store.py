"""Blocks in a folder that several processes share without knowing of each other: found, made room for, never wrong."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from disk_blocks import FORMAT, RECORD, content, digest_of, name_of, read
from hypothesis import settings
from test_tier_tenants import CAPACITY, DiskTier

from pagemill.errors import KVStoreError
from pagemill.kvcache import shared_store
from pagemill.kvcache.shared_store import SharedStore
from pagemill.kvcache.store_format import HEAD_BYTES

BLOCK = HEAD_BYTES + RECORD


@pytest.fixture(autouse=True)
def looks_when_told(monkeypatch):
    monkeypatch.setattr(shared_store, "LOOK_EVERY_S", 3600.0)
    monkeypatch.setattr(shared_store, "TOUCH_S", -1.0)


def shared(folder, blocks: int = 100) -> SharedStore:
    return SharedStore(folder, FORMAT, blocks * BLOCK)


def write(store: SharedStore, indices, group: int = 0, tenant: str = "default") -> int:
    names = [name_of(i, group)._replace(tenant=tenant) for i in indices]
    return store.write(names, [content(i, group) for i in indices])


def files(store: SharedStore) -> list:
    return sorted(path for path in store.folder.glob("*/*/*") if path.is_file())


class SharedTier(DiskTier):
    def open(self):
        return shared(self.folder, CAPACITY)

    def teardown(self) -> None:
        assert len(files(self.store)) == len(self.store.names())
        super().teardown()


TestSharedTier = SharedTier.TestCase
TestSharedTier.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)


def test_two_stores_find_each_others_blocks_with_their_next_look(tmp_path):
    with closing(shared(tmp_path)) as one, closing(shared(tmp_path)) as other:
        assert write(one, range(20)) == 20
        assert write(one, range(30)) == 10
        assert write(one, [3], group=1, tenant="Jürgen / ..") == 1
        assert read(other, range(30)) == []
        other.look()
        assert read(other, range(31)) == list(range(30))
        assert read(other, [3, 4], group=1) == [3]
        assert other.blocks_by_tenant() == {"default": 30, "Jürgen / ..": 1}
        assert sorted(other.names()) == sorted(one.names())
        assert write(other, range(30)) == 0


def test_a_block_that_comes_again_is_as_recent_as_it_is(tmp_path):
    """Its use before it was removed is not told once it has come again: that would make it older."""
    with closing(shared(tmp_path, 3)) as one:
        write(one, range(3))
        one.use([(digest_of(0), 0)])
        one.use([(digest_of(index), 0) for index in (1, 2)])
        write(one, [3])
        write(one, [0])
    with closing(shared(tmp_path, 3)) as again:
        write(again, [4])
        assert read(again, range(5)) == [0, 3, 4]


def test_a_file_that_goes_while_a_folder_is_listed_hides_no_other(tmp_path, monkeypatch):
    listdir = os.listdir

    def listing(folder):
        return ["0.1.2.unfinished", *listdir(folder)]

    with closing(shared(tmp_path)) as one, closing(shared(tmp_path)) as other:
        write(one, range(20))
        monkeypatch.setattr(shared_store, "os", SimpleNamespace(**vars(os) | {"listdir": listing}))
        for _ in range(2):
            other.look()
            assert read(other, range(20)) == list(range(20))


def test_another_process_finds_them_too(tmp_path):
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path\n"
        "from test_shared_store import shared, write\n"
        "store = shared(Path(sys.argv[1])); write(store, range(10)); store.close()\n"
    )
    with closing(shared(tmp_path)) as store:
        subprocess.run([sys.executable, "-c", program, str(tmp_path), *sys.path], check=True, timeout=120)
        store.look()
        assert read(store, range(11)) == list(range(10))


def test_what_another_store_removed_is_not_found_and_not_an_error(tmp_path):
    with closing(shared(tmp_path)) as one, closing(shared(tmp_path)) as other:
        write(one, range(4))
        other.look()
        files(one)[0].unlink()
        assert len(read(other, range(4))) == 3
        assert len(other.names()) == 3
        for path in files(one):
            path.unlink()
        other.look()
        assert other.holds([(digest_of(i), 0) for i in range(4)]) == [False] * 4
        assert write(other, range(4)) == 4


@pytest.mark.parametrize("damage", ["cut", "content", "head", "another"])
def test_a_damaged_block_is_removed_and_never_given(tmp_path, damage):
    with closing(shared(tmp_path)) as store:
        write(store, range(6))
        path = next(path for path in files(store) if path.name.startswith(digest_of(2).hex()))
        image = bytearray(path.read_bytes())
        if damage == "cut":
            del image[-1:]
        elif damage == "another":
            image[:] = next(each for each in files(store) if each != path).read_bytes()
        else:
            image[-7 if damage == "content" else 20] ^= 1
        path.write_bytes(image)
        assert read(store, range(6)) == [0, 1, 3, 4, 5]
        assert not path.exists()
        assert write(store, [2]) == 1
        assert read(store, range(6)) == list(range(6))


def test_what_others_used_makes_room_last(tmp_path):
    with closing(shared(tmp_path, 4)) as one, closing(shared(tmp_path, 4)) as other:
        write(one, [10])
        write(one, [11])
        write(one, [12, 13])
        other.look()
        other.use([(digest_of(10), 0)])
        other.look()
        write(one, [14])
        assert read(one, range(10, 15)) == [10, 12, 13, 14]


def test_a_chains_end_makes_room_first_and_more_than_fits_is_left_out(tmp_path):
    with closing(shared(tmp_path, 4)) as store:
        assert write(store, range(6)) == 4
        assert read(store, range(6)) == [0, 1, 2, 3]
        write(store, [50])
        assert read(store, range(51)) == [0, 1, 2, 50]


def test_only_the_owner_may_look(tmp_path):
    with closing(shared(tmp_path)) as store:
        write(store, range(3))
        assert {path.stat().st_mode & 0o777 for path in store.folder.rglob("*") if path.is_file()} == {0o600}
        assert {path.stat().st_mode & 0o777 for path in store.folder.rglob("*") if path.is_dir()} == {0o700}


def test_an_unfinished_file_is_no_block_and_goes_after_an_hour(tmp_path):
    with closing(shared(tmp_path)) as store:
        write(store, range(2))
        left = files(store)[0].with_name("0.1.2.unfinished")
        left.write_bytes(b"half")
        store.look()
        assert left.exists()
        os.utime(left, (0, 0))
        store.look()
        assert not left.exists()
        assert read(store, range(2)) == [0, 1]


def test_a_folder_that_cannot_be_listed_keeps_what_is_known(tmp_path, caplog):
    with closing(shared(tmp_path)) as store:
        write(store, range(3))
        moved = store.folder.rename(tmp_path / "moved")
        with pytest.raises(OSError, match="No such file"):
            store.look()
        assert store.holds([(digest_of(0), 0)]) == [True]
        moved.rename(store.folder)
        assert read(store, range(3)) == [0, 1, 2]


def test_what_the_folder_refuses_is_an_error_that_leaves_nothing_behind(tmp_path, monkeypatch):
    with closing(shared(tmp_path)) as store:
        write(store, range(2))

        def full(*_) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(shared_store.Path, "rename", full)
        with pytest.raises(KVStoreError, match=r"took no more blocks.*No space left.*lower its limit"):
            write(store, [5])
        assert store.holds([(digest_of(5), 0)]) == [False]
        assert not list(store.folder.rglob("*.unfinished"))
        np.testing.assert_array_equal(read(store, range(2)), [0, 1])
    with pytest.raises(KVStoreError, match=f"one block takes {BLOCK}; raise kv_disk_memory"):
        SharedStore(tmp_path, FORMAT, 100)
    (tmp_path / "file").write_text("")
    with pytest.raises(KVStoreError, match="cannot be opened"):
        SharedStore(tmp_path / "file", FORMAT, 1 << 20)


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe", b"other", None])
def test_blocks_of_a_tenant_whose_name_is_lost_count_as_the_default_ones(tmp_path, damaged):
    with closing(shared(tmp_path, 8)) as store:
        write(store, range(8), tenant="Jürgen")
        (name,) = store.folder.glob("*/tenant")
    name.unlink() if damaged is None else name.write_bytes(damaged)
    with closing(shared(tmp_path, 8)) as store, closing(shared(tmp_path, 8)) as other:
        assert store.blocks_by_tenant() == {"default": 8}
        assert read(store, range(9)) == list(range(8))
        write(store, [8], tenant="Jürgen")
        assert len(files(store)) == 8  # the limit holds
        assert name.read_text(encoding="utf-8") == "Jürgen"
        for each in (store, other):
            each.look()
            assert each.blocks_by_tenant() == {"Jürgen": 8}
            assert read(each, range(9)) == [*range(7), 8]


def test_what_is_used_keeps_its_tenants_file_and_who_knows_it_writes_it_again(tmp_path):
    with closing(shared(tmp_path)) as store:
        write(store, range(3))
        write(store, range(3, 6), tenant="acme")
        names = {name.read_text(): name for name in store.folder.glob("*/tenant")}
        for name in names.values():
            os.utime(name, (0, 0))
        store.use([(digest_of(3), 0)])
        store.look()
        assert [names[tenant].stat().st_mtime > 0 for tenant in ("default", "acme")] == [False, True]
        for name in names.values():
            name.unlink()
        store.look()
        assert {name.read_text(): name for name in store.folder.glob("*/tenant")} == names
        names["default"].unlink()
    with closing(shared(tmp_path)) as again:
        assert read(again, range(6)) == list(range(6))
        assert names["default"].read_text() == "default"


def test_the_documented_upkeep_removes_blocks_and_nothing_else(tmp_path):
    guide = (Path(__file__).parents[2] / "docs/guide/memory.md").read_text()
    command = re.search(r"`find FOLDER (.*?-delete)`", guide)[1]
    with closing(shared(tmp_path)) as store:
        write(store, range(4))
        for path in [*store.folder.glob("*/tenant"), files(store)[0]]:
            os.utime(path, (0, 0))
        subprocess.run(["find", str(tmp_path), *shlex.split(command)], check=True)
        assert len(files(store)) == 3
        assert len([*store.folder.glob("*/tenant")]) == 1


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    with closing(shared(tmp_path)) as store:
        write(store, range(3))
        shutil.rmtree(store.folder)
        assert read(store, range(3)) == []
        assert write(store, range(5)) == 5
        assert store.folder.stat().st_mode & 0o777 == 0o700
        store.look()
        assert read(store, range(5)) == list(range(5))
        shutil.rmtree(tmp_path)
        with pytest.raises(KVStoreError, match=f"No such file.*see that {tmp_path} is there"):
            write(store, [9])


def test_times_of_a_clock_that_was_wrong_count_as_now(tmp_path, monkeypatch):
    def ahead(store) -> list[int]:
        late = {path.name.partition("-")[0] for path in files(store) if path.stat().st_mtime > time.time() + 60}
        return [i for i in range(30) if digest_of(i).hex() in late]

    hour = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3600})
    with closing(shared(tmp_path, 6)) as living:
        with monkeypatch.context() as wrong:
            wrong.setattr(shared_store, "time", hour)
            write(living, range(3))
        write(living, range(3, 6))
        assert ahead(living) == [0, 1, 2]  # none that was written since
        with closing(shared(tmp_path, 6)) as other:
            other.use([(digest_of(0), 0)])
            other.look()
            assert ahead(other) == [1, 2]
            write(other, [10, 11, 12])
            assert read(other, range(13)) == [0, 1, 2, 10, 11, 12]
            write(other, [13])
            assert ahead(other) == []
            assert 1 in read(other, range(14))
            write(other, range(20, 26))
            assert read(other, range(30)) == list(range(20, 26))


def test_many_blocks_are_learned_and_forgotten_in_pages_in_the_order_of_their_use(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_store, "PAGE", 3)
    with closing(shared(tmp_path, 20)) as one, closing(shared(tmp_path, 20)) as other:
        write(one, range(20))
        other.look()
        write(other, range(20, 30))
        assert read(other, range(30)) == [*range(10), *range(20, 30)]
        one.look()
        assert sorted(one.names()) == sorted(other.names())
        shutil.rmtree(files(one)[0].parent)
        one.look()
        assert len(one.names()) == len(files(one)) < 20


def test_a_look_rests_behind_each_folder_and_ends_where_the_store_is_closed(tmp_path, monkeypatch):
    with closing(shared(tmp_path)) as other:
        write(other, range(20))
        store = shared(tmp_path)
        assert len(store.names()) == 20  # nobody waits for a step yet: the first look rests little
        monkeypatch.setattr(shared_store, "LOOK_SHARE", 1e-9)
        looking = threading.Thread(target=store.look)
        looking.start()
        looking.join(0.2)
        assert looking.is_alive()
        write(other, [20])
        assert read(store, range(21)) == list(range(20))
        assert write(store, [30]) == 1
        store.close()
        looking.join()
