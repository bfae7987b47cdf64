"""Blocks on disk: what was written comes back or is gone, never wrong, whatever happens to files and processes."""

import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from disk_blocks import FORMAT, RECORD, content, digest_of, name_of, read, store_of, write
from typer.testing import CliRunner

from pagemill.cli.cache import cache
from pagemill.errors import KVStoreError
from pagemill.kvcache import disk_store, store_archive, store_index
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_format import StoreFormat
from pagemill.kvcache.store_index import StoreIndex
from waiting import wait_until


def test_what_was_written_is_read_by_another_process_later(tmp_path):
    store = store_of(tmp_path)
    assert store.slot_bytes == 8192
    order = random.Random(1).sample(range(300), 300)
    assert write(store, order[:200]) == 200
    assert write(store, order) == 100
    assert write(store, range(5), group=1) == 5
    store.close()
    again = store_of(tmp_path)
    assert read(again, list(range(310))) == list(range(300))
    assert read(again, [3, 7], group=1) == [3]
    assert again.holds([(digest_of(i), 0) for i in range(305)]) == [True] * 300 + [False] * 5
    assert again.holds([(digest_of(i), 1) for i in range(305)]) == [True] * 5 + [False] * 300
    assert again.stats().blocks == 305
    assert again.stats().broken == 0


def test_blocks_are_read_to_where_their_pieces_lie(tmp_path):
    store = store_of(tmp_path)
    write(store, range(40))
    frames = np.full((100, 50, RECORD // 100), 0xA5, dtype=np.uint8)
    blocks = [(digest_of(i), 0) for i in range(45)]
    assert store.read(blocks, [frames[:, 49 - i] for i in range(45)]) == [True] * 40 + [False] * 5
    for i in range(40):
        np.testing.assert_array_equal(frames[:, 49 - i].reshape(-1), content(i))
    assert (frames[:, :10] == 0xA5).all()
    (store.folder / "blocks.dat").write_bytes(bytes(40 * 8192))
    assert not any(store.read(blocks, [frames[:, 49 - i] for i in range(45)]))


def test_only_the_owner_may_look(tmp_path):
    store = store_of(tmp_path)
    write(store, range(3))
    files = sorted(path.name for path in store.folder.iterdir())
    assert {"blocks.dat", "index.sqlite", "lock"} <= set(files)
    assert {path.stat().st_mode & 0o777 for path in store.folder.iterdir()} == {0o600}
    assert store.folder.stat().st_mode & 0o777 == 0o700


def test_files_that_others_could_read_become_the_owners_alone(tmp_path):
    store = store_of(tmp_path)
    store.close()
    store.folder.chmod(0o777)
    for path in store.folder.iterdir():
        path.chmod(0o666)
    again = store_of(tmp_path)
    write(again, range(3))
    assert {path.stat().st_mode & 0o777 for path in again.folder.iterdir()} == {0o600}
    assert again.folder.stat().st_mode & 0o777 == 0o700


def test_the_longest_unused_makes_room_a_chains_end_first(tmp_path):
    store = store_of(tmp_path, blocks=10)
    write(store, range(6))
    write(store, range(100, 104))
    store.use([(digest_of(i), 0) for i in (0, 3, 7)])
    write(store, [200, 201, 202])
    assert store.stats().blocks == 10
    assert store.stats().evicted == 3
    assert read(store, list(range(6))) == [0, 1, 3]
    store.close()
    store = store_of(tmp_path, blocks=10)
    store.use([(digest_of(1), 0)])
    store.close()
    store = store_of(tmp_path, blocks=10)
    write(store, range(400, 408))
    assert read(store, [0, 1, 3]) == [1]
    assert (store.folder / "blocks.dat").stat().st_size <= 10 * 8192
    assert write(store, range(300, 315)) == 10
    assert store.stats().blocks == 10


def test_times_of_a_clock_that_was_wrong_count_as_now(tmp_path, monkeypatch):
    ahead = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3600})
    with closing(store_of(tmp_path, blocks=10)) as living:
        with monkeypatch.context() as wrong:
            for module in (store_index, disk_store):
                wrong.setattr(module, "time", ahead)
            write(living, range(10))
            living.use([(digest_of(i), 0) for i in range(10)])
        for first in range(100, 140, 10):
            write(living, range(first, first + 5))
            write(living, range(first + 5, first + 10))
            assert len(read(living, range(first, first + 10))) == 10
        with monkeypatch.context() as wrong:
            wrong.setattr(disk_store, "time", ahead)
            write(living, range(10))
    with closing(store_of(tmp_path, blocks=10)) as again:
        assert again.prune(unused_for_s=-60.0) == 10


def test_what_a_process_only_reads_others_learn_of_its_uses(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_store, "TELL_S", 0.001)
    with closing(store_of(tmp_path, blocks=10)) as reader, closing(store_of(tmp_path, blocks=10)) as writer:
        write(writer, range(10))
        for first in range(100, 108, 4):
            told = last_use(reader)
            reader.use([(digest_of(i), 0) for i in (0, 1)])
            wait_until(lambda told=told: last_use(reader) > told, "no use was told")
            write(writer, range(first, first + 4))
            assert read(reader, range(10))[:2] == [0, 1]
        monkeypatch.setattr(disk_store, "TELL_S", 3600.0)
        told = last_use(reader)
        reader.use([(digest_of(0), 0)])
        reader.close()
        assert last_use(writer) > told


def last_use(store: DiskStore) -> float:
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as db:
        return db.execute("SELECT MAX(used_s) FROM blocks").fetchone()[0]


def test_a_lower_limit_holds_from_the_start_and_keeps_what_was_used_last(tmp_path):
    store = store_of(tmp_path)
    write(store, range(10))
    write(store, range(100, 120))
    store.use([(digest_of(i), 0) for i in (3, 1, 105, 119)])
    store.close()
    store = store_of(tmp_path, blocks=8)
    kept = [1, 3, *range(100, 104), 105, 119]
    assert (store.folder / "blocks.dat").stat().st_size == 8 * 8192
    assert store.stats().evicted == 22
    assert read(store, range(120)) == kept
    assert write(store, [200]) == 1
    assert (store.folder / "blocks.dat").stat().st_size == 8 * 8192
    store.close()
    store = store_of(tmp_path)
    assert len(read(store, range(201))) == store.stats().blocks == 8
    assert write(store, range(300, 330)) == 30
    assert len(read(store, range(330))) == 38
    assert store.stats().broken == 0


def test_a_lower_limit_leaves_what_another_process_uses(tmp_path):
    one = store_of(tmp_path)
    write(one, range(30))
    other = store_of(tmp_path, blocks=8)
    assert read(one, range(30)) == read(other, range(30)) == list(range(30))
    one.close()
    other.close()
    store_of(tmp_path, blocks=8).close()
    assert (one.folder / "blocks.dat").stat().st_size == 8 * 8192


def test_pruning_gives_the_disk_its_space_back(tmp_path):
    store = store_of(tmp_path)
    write(store, range(50))
    assert store.prune(keep_bytes=20 * 8192) == 30
    assert read(store, list(range(50))) == list(range(20))
    assert (store.folder / "blocks.dat").stat().st_size == 20 * 8192
    assert store.prune(unused_for_s=3600) == 0
    assert write(store, range(30)) == 10
    assert store.prune(unused_for_s=-1) == 30
    assert (store.folder / "blocks.dat").stat().st_size == 0
    assert write(store, range(30)) == 30
    assert read(store, list(range(30))) == list(range(30))


def test_pruning_down_to_the_first_slot_leaves_its_block(tmp_path):
    store = store_of(tmp_path)
    write(store, range(3))
    assert store.prune(keep_bytes=8192) == 2
    assert read(store, range(3)) == [0]
    assert write(store, range(3)) == 2
    assert read(store, range(3)) == [0, 1, 2]
    assert store.stats().broken == 0


def test_a_flipped_bit_costs_one_block_and_no_other(tmp_path):
    store = store_of(tmp_path)
    write(store, range(60))
    path = store.folder / "blocks.dat"
    rng = random.Random(2)
    hurt = set()
    with path.open("r+b") as file:
        for i in rng.sample(range(60), 25):
            where = i * 8192 + rng.choice([rng.randrange(88), 8192 - rng.randrange(1, RECORD + 1)])
            file.seek(where)
            byte = file.read(1)[0]
            file.seek(where)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
            hurt.add(i)
    whole = [i for i in range(60) if i not in hurt]
    checked = list(store.verify())
    assert {name for name, ok, _ in checked if not ok} == {name_of(i) for i in hurt}
    assert all(held == ok for _, ok, held in checked)
    assert len(checked) == 60
    assert store.stats().broken == 25
    assert read(store, list(range(60))) == whole
    assert write(store, range(60)) == 25
    assert read(store, list(range(60))) == list(range(60))


def test_a_broken_block_that_cannot_be_dropped_now_is_said_to_be_held(tmp_path, monkeypatch):
    monkeypatch.setattr(store_index, "BUSY_TIMEOUT_S", 0.05)
    store = store_of(tmp_path)
    write(store, range(3))
    with (store.folder / "blocks.dat").open("r+b") as file:
        file.seek(2 * 8192 - 1)
        file.write(b"\xff")
    writer = sqlite3.connect(store.folder / "index.sqlite", isolation_level=None)

    def begin_write(root, key) -> DiskStore:
        writer.execute("BEGIN IMMEDIATE")
        return store

    monkeypatch.setattr(store_archive, "open_store", begin_write)
    monkeypatch.setattr(store, "close", lambda: None)
    result = CliRunner().invoke(cache, ["verify", FORMAT.key, "--root", str(tmp_path)])
    assert "3 blocks checked, 0 broken and dropped, 1 broken and kept while" in result.output
    assert result.exit_code == 1
    writer.close()
    assert [each[1:] for each in store.verify()] == [(True, True), (False, False), (True, True)]


def test_a_truncated_file_costs_what_it_held(tmp_path):
    store = store_of(tmp_path)
    write(store, range(20))
    store.close()
    os.truncate(store.folder / "blocks.dat", 12 * 8192 + 100)
    store = store_of(tmp_path)
    assert read(store, list(range(20))) == list(range(12))
    assert write(store, range(20)) == 8
    assert read(store, list(range(20))) == list(range(20))


def test_another_models_store_is_another_folder_and_a_moved_one_is_refused(tmp_path):
    store = store_of(tmp_path)
    write(store, range(3))
    store.close()
    for change in ({"fingerprint": "cd" * 32}, {"kv_format": "int8,16"}, {"numerics": "cpu-1"}, {"record_bytes": 6000}):
        fields = {name: getattr(FORMAT, name) for name in ("model", "fingerprint", "kv_format", "numerics")}
        other = StoreFormat(**{**fields, "record_bytes": RECORD, **change})
        empty = DiskStore(tmp_path, other, 1 << 20)
        assert empty.stats().blocks == 0
        empty.close()
    moved = StoreFormat("test", "ef" * 32, "float32,16", "reference", RECORD)
    store.folder.rename(tmp_path / moved.key)
    with pytest.raises(KVStoreError, match="holds blocks of"):
        DiskStore(tmp_path, moved, 1 << 20)


def test_a_limit_below_one_block_is_an_error(tmp_path):
    with pytest.raises(KVStoreError, match="one block takes 8192"):
        DiskStore(tmp_path, FORMAT, 8191)


def child(tmp_path, code: str, **settings) -> subprocess.Popen:
    lines = f"import sys; sys.path[:] = {sys.path!r}\nfrom test_disk_store import *\nfrom pathlib import Path\n"
    path = [os.path.dirname(__file__)]
    start = lines.replace("sys.path[:] = [", f"sys.path[:] = [{path[0]!r}, ", 1)
    return subprocess.Popen([sys.executable, "-c", f"{start}tmp_path = Path({str(tmp_path)!r})\n{code}"], **settings)


def test_a_full_disk_is_said_and_loses_nothing(tmp_path):
    code = """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
store = store_of(tmp_path)
write(store, range(10))
resource.setrlimit(resource.RLIMIT_FSIZE, (25 * 8192, 25 * 8192))
for first in range(10, 60, 10):
    try:
        write(store, range(first, first + 10))
    except KVStoreError as error:
        assert "took no more blocks" in str(error), error
        break
else:
    raise AssertionError("the disk never filled")
assert read(store, list(range(60))) == list(range(first)), first
"""
    assert resource.RLIMIT_FSIZE
    process = child(tmp_path, code, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert read(store_of(tmp_path), list(range(20))) == list(range(20))


@contextmanager
def killer(tmp_path, work: str):
    """Gives a function that begins a process, which does this work, and kills it after so many seconds.

    It is forked from one that has made all contents and opened nothing, since an interpreter's start would take longer
    than all else between two kills, and making contents longer than writing them.
    """
    code = f"""
def work(rng):{work}
for i in range(2030):
    content(i)
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        work(random.Random())
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
    process = child(tmp_path, code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def kill_one(after_s: float) -> None:
        print(file=process.stdin, flush=True)
        pid = int(process.stdout.readline())
        time.sleep(after_s)
        os.kill(pid, signal.SIGKILL)
        assert int(process.stdout.readline()) == -signal.SIGKILL, "it wrote until it was killed"

    with process:
        yield kill_one


def test_killed_at_any_moment_a_store_holds_whole_blocks_only(tmp_path):
    rng = random.Random(4)
    most = 0
    work = """
    store = store_of(tmp_path, blocks=200)
    while True:
        first = rng.randrange(2000)
        write(store, range(first, first + rng.randrange(1, 30)))
        read(store, [rng.randrange(2000) for _ in range(20)])
"""
    with killer(tmp_path, work) as kill_one:
        for _ in range(KILLS):
            kill_one(rng.uniform(0, 0.1))
            store = store_of(tmp_path, blocks=200)
            found = len(read(store, list(range(2030))))
            stats = store.stats()
            assert stats.broken == 0, "a killed process cannot tear what the system has taken"
            assert most - 30 < found == stats.blocks <= 200, "only what it was making room for is lost"
            most = max(most, found)
            store.close()
    assert most > 0


def test_killed_while_a_lower_limit_moves_blocks_a_store_loses_none_that_it_keeps(tmp_path):
    rng = random.Random(5)
    work = """
    while True:
        store = store_of(tmp_path, blocks=200)
        write(store, range(first := rng.randrange(2000), first + 30))
        store.use([(digest_of(i), 0) for i in range(20)])
        store.close()
        store_of(tmp_path, blocks=rng.randrange(60, 100)).close()
"""
    write(store := store_of(tmp_path), range(20))
    write(store, range(100, 200))
    store.close()
    with killer(tmp_path, work) as kill_one:
        for _ in range(KILLS):
            kill_one(rng.uniform(0, 0.3))
            store = store_of(tmp_path, blocks=200)
            found = read(store, list(range(2030)))
            assert store.stats().broken == 0
            assert found[:20] == list(range(20)), "they were used last"
            assert 60 <= len(found) == store.stats().blocks
            store.close()


KILLS = int(os.environ.get("PAGEMILL_TEST_KILLS", "12"))


def test_processes_that_open_a_new_store_at_the_same_time_wait_for_each_other(tmp_path):
    code = """
failed = 0
for attempt in range(40):
    path = tmp_path / str(attempt)
    path.mkdir()
    begin = time.monotonic() + 0.02
    pids = []
    for _ in range(4):
        pid = os.fork()
        if not pid:
            while time.monotonic() < begin: pass
            try:
                store_of(path, blocks=10)
                os._exit(0)
            except Exception:
                traceback.print_exc()
                os._exit(1)
        pids.append(pid)
    failed += sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
sys.exit(failed)
"""
    process = child(tmp_path, "import time, traceback\n" + code, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors


def test_a_block_that_another_process_stores_meanwhile_takes_one_slot(tmp_path, monkeypatch):
    one, other = (store_of(tmp_path, blocks=10) for _ in range(2))
    slots = StoreIndex.slots

    def overtaken(index, blocks):
        found = slots(index, blocks)
        monkeypatch.undo()
        write(other, range(4))
        return found

    monkeypatch.setattr(StoreIndex, "slots", overtaken)
    assert write(one, range(6)) == 2
    assert write(one, range(100, 104)) == 4
    assert one.stats().evicted == 0
    assert read(other, [*range(6), *range(100, 104)]) == [*range(6), *range(100, 104)]


def test_two_processes_share_a_store(tmp_path):
    code = """
rng = random.Random(os.getpid())
store = store_of(tmp_path, blocks=60)
for _ in range(60):
    first = rng.randrange(150)
    write(store, range(first, first + rng.randrange(1, 12)))
    read(store, [rng.randrange(160) for _ in range(20)])
assert store.stats().blocks <= 60
assert store.stats().broken == 0, store.stats()
"""
    processes = [child(tmp_path, code, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    store = store_of(tmp_path, blocks=60)
    assert len(read(store, list(range(165)))) == store.stats().blocks > 30
