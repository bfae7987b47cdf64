"""What is told of a store on disk: what it holds at the start, a page at a time, then each change, whoever made it."""

import sqlite3
import time
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest
from disk_blocks import FORMAT, content, digest_of, name_of, store_of, write
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.errors import KVStoreError
from pagemill.kvcache import shared_store, store_watch
from pagemill.kvcache.shared_files import path_of
from pagemill.kvcache.shared_store import SharedStore
from pagemill.kvcache.store_index import MOST_CHANGES, TRIMMED
from pagemill.kvcache.store_watch import StoreWatch

CAPACITY = 8
NUMBERS = range(20)


class TwoProcesses:
    """Two that use one store on disk, of which one is followed."""

    def __init__(self, folder, opened):
        self.stores = [opened.enter_context(closing(self.open(folder))) for _ in range(2)]

    def open(self, folder):
        return store_of(folder, CAPACITY)

    def look(self):
        pass

    def tear(self, who, number):
        """Breaks a block, which a reader finds and drops."""
        store = self.stores[who]
        if store.holds([(digest_of(number), 0)]) == [True]:
            slot = store._index.slots([(digest_of(number), 0)])[0]  # noqa: SLF001
            store._write_slot(slot, [bytes(store.slot_bytes)])  # noqa: SLF001
            assert store.read([(digest_of(number), 0)], [content(number).copy()]) == [False]


class TwoMachines(TwoProcesses):
    """Two that mount a folder."""

    def open(self, folder):
        return SharedStore(folder, FORMAT, CAPACITY * 6000)

    def look(self):
        for store in self.stores:
            store.look()

    def tear(self, who, number):
        store = self.stores[who]
        if store.holds([(digest_of(number), 0)]) == [True]:
            (store.folder / path_of(name_of(number))).write_bytes(b"")
            assert store.read([(digest_of(number), 0)], [content(number).copy()]) == [False]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "write", "other group", "tear"]),
        st.integers(0, 1),
        st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=6, unique=True),
        st.integers(0, 6),
    ),
    min_size=6,
    max_size=20,
)
"""What is done by whom, with which blocks, and how many pages are taken then."""


@pytest.mark.parametrize("kind", [TwoProcesses, TwoMachines])
@given(STEPS, st.integers(0, 5), st.integers(1, 7))
@settings(max_examples=60)
def test_whoever_follows_a_store_knows_what_it_holds(tmp_path_factory, kind, steps, begins, most):
    shared_store.LOOK_EVERY_S, before = 3600.0, shared_store.LOOK_EVERY_S
    with ExitStack() as opened:
        opened.callback(setattr, shared_store, "LOOK_EVERY_S", before)
        two, known, pages = kind(tmp_path_factory.mktemp("store"), opened), set(), None

        def take():
            page = next(pages)
            assert len(page) <= most
            known.difference_update(digest for digest, held in page.items() if not held)
            known.update(digest for digest, held in page.items() if held)
            return page

        for at, (what, who, numbers, count) in enumerate(steps):
            if at == begins:
                pages = two.stores[0].follow(0, most)
            if what == "write":
                write(two.stores[who], numbers)
            elif what == "other group":
                write(two.stores[who], numbers, group=1)
            else:
                two.tear(who, numbers[0])
            for _ in range(count if at >= begins else 0):
                take()
        two.look()
        empty = 0
        while empty < 3:  # a page may concern the other group alone
            empty = 0 if take() else empty + 1
        for _ in range(40 // most):
            take()
        held = two.stores[0].holds([(digest_of(number), 0) for number in NUMBERS])
        assert known == {digest_of(number) for number in NUMBERS if held[number]}


def test_changes_are_kept_up_to_a_number(tmp_path):
    with closing(store_of(tmp_path)) as store, closing(sqlite3.connect(store.folder / "index.sqlite")) as index:
        with index:
            for number in (3, TRIMMED + 1, MOST_CHANGES + TRIMMED - 1):
                index.execute("INSERT INTO changes VALUES (?, ?, 0)", (number, digest_of(7)))
        write(store, [1])
        numbers = [number for (number,) in index.execute("SELECT number FROM changes ORDER BY number")]
        assert numbers == [TRIMMED + 1, MOST_CHANGES + TRIMMED - 1, MOST_CHANGES + TRIMMED]


def test_who_misses_changes_is_told_so_and_then_what_has_left_meanwhile(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store_watch, "AGAIN_S", 0.01)
    monkeypatch.setattr(store_watch, "LOOK_S", 0.01)
    with closing(store_of(tmp_path)) as store, closing(sqlite3.connect(store.folder / "index.sqlite")) as index:
        write(store, range(4))
        with closing(StoreWatch(store, 0)) as watch:
            known = {}
            until(watch, known, {digest_of(i): True for i in range(4)})
            with index:  # as a prune of more blocks than changes are kept does, in one transaction
                index.execute("DELETE FROM blocks WHERE digest = ?", (digest_of(2),))
                index.execute("DELETE FROM changes")
                index.execute("INSERT INTO changes VALUES (99, ?, 1)", (digest_of(7),))
            until(watch, known, {digest_of(i): i != 2 for i in range(4)})
    assert "more has changed at once" in caplog.text


def test_a_store_of_before_is_told_from_the_start(tmp_path):
    with closing(store_of(tmp_path)) as store:
        write(store, range(5))
    with closing(sqlite3.connect(store.folder / "index.sqlite")) as index, index:
        for what in ("TRIGGER came", "TRIGGER went", "TABLE changes"):
            index.execute(f"DROP {what}")
        index.execute("PRAGMA user_version = 1")
    with closing(store_of(tmp_path)) as store:
        pages = store.follow(0, 100)
        assert next(pages) == {digest_of(i): True for i in range(5)}
        write(store, [5])
        assert next(pages) == {digest_of(5): True}
        store.prune(keep_bytes=0)
        assert next(pages) == {digest_of(i): False for i in range(6)}
        assert next(pages) == {}


def until(watch, known, expected):
    deadline_s, most = time.monotonic() + 20, 0
    while known != expected:
        assert time.monotonic() < deadline_s
        page = watch.take()
        most = max(most, len(page))
        known.update(page)
        time.sleep(0.002)
    return most


def test_a_store_is_listed_a_page_at_a_time_and_no_faster_than_it_is_taken(monkeypatch):
    monkeypatch.setattr(store_watch, "LOOK_S", 0.01)
    asked = []

    def follow(group, most):
        for first in range(0, 30 * most, most):
            asked.append((group, most))
            yield dict.fromkeys(range(first, first + most), True)
        while True:
            yield {}

    watch = StoreWatch(SimpleNamespace(follow=follow), 3)
    try:
        while len(asked) < store_watch.MOST_WAITING // store_watch.PAGE:
            time.sleep(0.002)
        time.sleep(3 * store_watch.FULL_S)
        assert asked == [(3, store_watch.PAGE)] * (store_watch.MOST_WAITING // store_watch.PAGE)
        assert watch.has_more
        all_of_it = dict.fromkeys(range(30 * store_watch.PAGE), True)
        assert until(watch, {}, all_of_it) == store_watch.PAGE
        assert not watch.has_more
    finally:
        watch.close()


def test_a_store_that_could_not_be_read_is_listed_again(monkeypatch, caplog):
    monkeypatch.setattr(store_watch, "AGAIN_S", 0.01)
    tries = []

    def follow(group, most):
        tries.append(most)
        yield {b"a": True}
        if len(tries) < 4:
            raise KVStoreError("the disk says no")
        yield {b"a": False, b"b": True}
        while True:
            yield {}

    watch = StoreWatch(SimpleNamespace(follow=follow), 0)
    try:
        until(watch, {}, {b"a": False, b"b": True})
    finally:
        watch.close()
    assert len(tries) == 4
    assert len(caplog.records) == 3
    assert "the disk says no" in caplog.text
