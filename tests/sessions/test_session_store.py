"""Conversations by name: what a turn keeps, who may use one, and what restarts, crashes and other processes leave."""

import contextlib
import os
import random
import secrets
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time

import pytest

from pagemill import errors
from pagemill.config import EngineConfig
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import TenantLimits

HERE = Namespace()
MINE = Namespace("default", "mine")
OF = {"model": "m", "tokenizer": "t"}


def store_of(path=None, max_sessions=4, timeout_s=None):
    return SessionStore(path, max_sessions, timeout_s)


def turn(store, name, token_ids, messages=None, space=HERE):
    store.commit(store.begin(name, space, **OF), token_ids, messages)


def test_a_turn_is_found_by_another_process_later(tmp_path):
    path = tmp_path / "new" / "sessions.sqlite"
    store = store_of(path)
    turn(store, "a", [1, 2, 2**31])
    turn(store, "a", [1, 2, 2**31, 4], [{"role": "user", "content": "é"}])
    turn(store, "b", [5])
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = store_of(path)
    record = again.get("a", HERE)
    assert record.token_ids == [1, 2, 2**31, 4]
    assert record.messages == [{"role": "user", "content": "é"}]
    assert (record.num_turns, record.model, record.name) == (2, "m", "a")
    assert record.created_s <= record.used_s <= time.time()
    assert [found.name for found in again.list(HERE)] == ["b", "a"]
    assert again.begin("a", HERE, **OF).token_ids == record.token_ids


def test_a_file_of_version_1_is_the_default_tenants(tmp_path):
    path = tmp_path / "old.sqlite"
    old = sqlite3.connect(path)
    old.execute(
        "CREATE TABLE sessions (cache_salt TEXT, name TEXT, state TEXT NOT NULL, model TEXT NOT NULL, "
        "tokenizer TEXT NOT NULL, token_ids BLOB NOT NULL, messages TEXT, num_turns INTEGER NOT NULL, "
        "created_s REAL NOT NULL, used_s REAL NOT NULL, PRIMARY KEY (cache_salt, name)) WITHOUT ROWID"
    )
    old.execute("INSERT INTO sessions VALUES ('mine', 'a', 's', 'm', 't', x'05000000', NULL, 3, 1.0, 2.0)")
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    for _ in range(2):
        record = store_of(path).get("a", MINE)
        assert (record.token_ids, record.num_turns, record.used_s, record.space) == ([5], 3, 2.0, MINE)
    turn(store_of(path), "a", [5, 6], space=MINE)
    assert store_of(path).get("a", MINE).token_ids == [5, 6]


def test_a_turn_that_is_given_back_leaves_no_trace():
    store = store_of()
    begun = store.begin("a", HERE, **OF)
    assert begun.token_ids == []
    store.release(begun)
    with pytest.raises(errors.SessionNotFoundError, match="no session 'a'"):
        store.get("a", HERE)
    turn(store, "a", [1])
    store.release(store.begin("a", HERE, **OF))
    assert store.get("a", HERE).token_ids == [1]


def test_a_session_has_one_turn_at_a_time():
    store = store_of()
    begun = store.begin("a", HERE, **OF)
    for again in (lambda: store.begin("a", HERE, **OF), lambda: store.delete("a", HERE)):
        with pytest.raises(errors.SessionBusyError, match="'a' is in use") as caught:
            again()
        assert caught.value.http_status == 409
    store.release(store.begin("a", MINE, **OF))
    store.commit(begun, [1], None)
    turn(store, "a", [1, 2])


def test_who_finds_a_session_in_use_is_told_to_fork_what_can_be_forked():
    store = store_of()
    for expected in ("wait for its end$", "wait for its end, or fork the session$"):
        begun = store.begin("a", HERE, **OF)
        with pytest.raises(errors.SessionBusyError, match=expected):
            store.begin("a", HERE, **OF)
        store.commit(begun, [1], None)


def test_a_turn_that_has_ended_gives_back_no_other():
    """Who reads an answer may close it when the next turn has begun."""
    store = store_of()
    first = store.begin("a", HERE, **OF)
    store.commit(first, [1], None)
    second = store.begin("a", HERE, **OF)
    store.release(first)
    with pytest.raises(errors.SessionBusyError, match="in use by another request"):
        store.begin("a", HERE, **OF)
    store.release(second)
    store.begin("a", HERE, **OF)


@pytest.mark.parametrize(
    "yours", [Namespace("default", "yours"), Namespace("other", "mine"), Namespace("othermine", "")]
)
def test_namespaces_do_not_see_each_other(yours):
    store = store_of()
    turn(store, "a", [1], space=MINE)
    with pytest.raises(errors.SessionNotFoundError):
        store.get("a", yours)
    with pytest.raises(errors.SessionNotFoundError):
        store.delete("a", yours)
    with pytest.raises(errors.SessionNotFoundError):
        store.fork("a", yours, "b")
    assert store.begin("a", yours, **OF).token_ids == []
    assert store.list(yours) == []
    assert [record.space for record in store.list(None)] == [MINE]


def test_a_fork_goes_its_own_way():
    store = store_of()
    turn(store, "a", [1, 2], [{"role": "user", "content": "x"}])
    child = store.fork("a", HERE, "b")
    assert (child.token_ids, child.messages) == ([1, 2], [{"role": "user", "content": "x"}])
    assert store.get("b", HERE) == child
    turn(store, "b", [1, 2, 3])
    assert store.get("a", HERE).token_ids == [1, 2]
    with pytest.raises(errors.InvalidRequestError, match="there is a session 'b' already"):
        store.fork("a", HERE, "b")
    begun = store.begin("c", HERE, **OF)
    with pytest.raises(errors.InvalidRequestError, match="there is a session 'c' already"):
        store.fork("a", HERE, "c")
    store.release(begun)


def test_two_processes_fork_to_one_name_and_one_of_them_is_told(tmp_path, monkeypatch):
    mine, other = (store_of(tmp_path / "sessions.sqlite") for _ in range(2))
    turn(mine, "ada", [1, 2])
    refused: list[Exception] = []

    def forks_too():
        try:
            other.fork("ada", HERE, "child")
        except errors.PagemillError as error:
            refused.append(error)

    meanwhile = threading.Thread(target=forks_too)
    token_hex = secrets.token_hex

    def while_the_other_asks(size):
        if not meanwhile.ident:
            meanwhile.start()
            meanwhile.join(0.3)
        return token_hex(size)

    monkeypatch.setattr(secrets, "token_hex", while_the_other_asks)
    mine.fork("ada", HERE, "child")
    meanwhile.join()
    assert [type(error) for error in refused] == [errors.InvalidRequestError]
    assert "already" in str(refused[0])


def test_one_session_too_many_is_refused_and_counts_those_in_their_first_turn():
    store = store_of(max_sessions=3)
    turn(store, "a", [1])
    begun = store.begin("b", HERE, **OF)
    store.fork("a", HERE, "c")
    for more in (lambda: store.begin("d", HERE, **OF), lambda: store.fork("a", HERE, "d")):
        with pytest.raises(
            errors.SessionLimitError,
            match="one too many: max_sessions is 3, and tenant 'default' has 3 of them; delete one",
        ):
            more()
    store.release(begun)
    turn(store, "d", [1])
    turn(store, "a", [1, 2])


def test_a_tenant_has_a_limit_of_its_own_beside_that_of_all():
    store = store_of(max_sessions=4)
    wild, other = Namespace("wild", ""), Namespace("wild", "another salt")
    store.set_limit("wild", TenantLimits(max_sessions="50%"))
    turn(store, "a", [1], space=wild)
    begun = store.begin("a", other, **OF)
    for more in (lambda: store.begin("b", wild, **OF), lambda: store.fork("a", wild, "b")):
        with pytest.raises(errors.SessionLimitError, match="number 3, and max_sessions of tenant 'wild' is 2;"):
            more()
    turn(store, "a", [1])
    turn(store, "b", [1])
    store.release(begun)
    turn(store, "b", [1], space=wild)
    store.set_limit("wild", TenantLimits())
    with pytest.raises(
        errors.SessionLimitError, match="one too many: max_sessions is 4, and tenant 'wild' has 2 of them"
    ):
        store.begin("c", wild, **OF)


def test_a_session_that_nobody_uses_is_forgotten(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    store = store_of(timeout_s=60)
    turn(store, "a", [1])
    turn(store, "b", [1])
    now[0] += 59
    begun = store.begin("a", HERE, **OF)
    now[0] += 2
    assert [record.name for record in store.list(HERE)] == ["a"], "one in use is not idle"
    store.commit(begun, [1, 2], None)
    now[0] += 60
    assert store.get("a", HERE).token_ids == [1, 2]
    now[0] += 1
    with pytest.raises(errors.SessionNotFoundError):
        store.get("a", HERE)


def test_an_engines_settings_limit_its_sessions(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    tenants = {"wild": TenantLimits(max_sessions=1)}
    store = SessionStore.of(EngineConfig(model="m", max_sessions=2, session_timeout_s=60, tenants=tenants))
    turn(store, "a", [1], space=Namespace("wild", ""))
    with pytest.raises(errors.SessionLimitError, match="max_sessions of tenant 'wild' is 1"):
        store.begin("b", Namespace("wild", ""), **OF)
    turn(store, "b", [1])
    with pytest.raises(errors.SessionLimitError, match="max_sessions is 2"):
        store.begin("c", HERE, **OF)
    now[0] += 61
    assert store.list(None) == []


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "x" * 129, None, "é"])
def test_a_bad_name_is_refused(name):
    store = store_of()
    turn(store, "good.name:1@x-y_z", [1])
    for use in (lambda: store.begin(name, HERE, **OF), lambda: store.fork("good.name:1@x-y_z", HERE, name)):
        with pytest.raises(errors.InvalidRequestError, match="the session name"):
            use()


def test_another_tokenizer_is_refused():
    store = store_of()
    turn(store, "a", [1])
    with pytest.raises(errors.InvalidRequestError, match="begun with m, whose tokens are not those of n"):
        store.begin("a", HERE, model="n", tokenizer="u")
    turn(store, "a", [1, 2])


@pytest.mark.parametrize("meanwhile", ["changed", "deleted", "begun"])
def test_a_turn_that_another_process_overtook_is_not_kept(tmp_path, meanwhile):
    ours, theirs = (store_of(tmp_path / "s.sqlite") for _ in range(2))
    if meanwhile != "begun":
        turn(ours, "a", [1])
    begun = ours.begin("a", HERE, **OF)
    if meanwhile == "deleted":
        theirs.delete("a", HERE)
    else:
        turn(theirs, "a", [1, 5])
    with pytest.raises(errors.SessionBusyError, match="changed or deleted by another process"):
        ours.commit(begun, [1, 7], None)
    assert [record.token_ids for record in ours.list(HERE)] == ([] if meanwhile == "deleted" else [[1, 5]])
    turn(ours, "a", [1, 9])
    assert theirs.get("a", HERE).token_ids == [1, 9]


def test_a_file_of_something_else_is_said_so(tmp_path):
    (tmp_path / "text").write_text("nothing of the kind" * 100)
    with pytest.raises(errors.SessionStoreError, match="cannot be used: file is not a database; mend that"):
        store_of(tmp_path / "text")
    with pytest.raises(errors.SessionStoreError, match="cannot be used"):
        store_of(tmp_path)
    path = tmp_path / "later"
    store_of(path).close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 9")
    with pytest.raises(errors.SessionStoreError, match="version 9; this one reads version 3"):
        store_of(path)


def test_a_file_of_version_2_gets_checksums(tmp_path):
    path = tmp_path / "old.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as old, old:
        old.execute(
            "CREATE TABLE sessions (tenant TEXT, cache_salt TEXT, name TEXT, state TEXT NOT NULL, model TEXT NOT NULL, "
            "tokenizer TEXT NOT NULL, token_ids BLOB NOT NULL, messages TEXT, num_turns INTEGER NOT NULL, "
            "created_s REAL NOT NULL, used_s REAL NOT NULL, PRIMARY KEY (tenant, cache_salt, name)) WITHOUT ROWID"
        )
        old.execute("INSERT INTO sessions VALUES ('t', 'mine', 'a', 's', 'm', 't', x'05000000', '[]', 3, 1.0, 2.0)")
        old.execute("PRAGMA user_version = 2")
    record = store_of(path).get("a", Namespace("t", "mine"))
    assert (record.token_ids, record.messages, record.num_turns) == ([5], [], 3)


def test_sessions_that_no_request_can_name_are_removed_and_that_is_said(tmp_path, caplog):
    store = store_of(tmp_path / "s.sqlite")
    turn(store, "a", [5])
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "s.sqlite")) as file, file:
        file.execute("INSERT INTO sessions SELECT tenant, ?, name, state, model, tokenizer, token_ids, messages, "
                     "num_turns, created_s, used_s, checksum FROM sessions", ("x" * 5000,))  # fmt: skip
    assert [record.name for record in store_of(tmp_path / "s.sqlite").list(None)] == ["a"]
    assert "removed 1 sessions" in caplog.text


@pytest.mark.parametrize(("place", "bit"), [("token", 2), ("word", 2), ("word", 128)])
def test_a_bit_that_has_flipped_is_said_so_and_the_session_can_be_deleted(tmp_path, place, bit):
    path = tmp_path / "sessions.sqlite"
    store = store_of(path)
    turn(store, "a", [1, 2, 0x12345678], [{"role": "user", "content": "a word"}])
    turn(store, "b", [5])
    store.close()
    content = bytearray(path.read_bytes())
    at = content.index(b"\x78\x56\x34\x12" if place == "token" else b"a word")
    content[at] ^= bit
    path.write_bytes(content)
    store = store_of(path)
    for use in (store.get, lambda name, space: store.begin(name, space, **OF)):
        with pytest.raises(errors.SessionStoreError, match="session 'a' is damaged"):
            use("a", HERE)
    assert store.get("b", HERE).token_ids == [5]
    for space in (HERE, None):
        listed = store.list(space)
        assert [(record.name, record.token_ids, record.damaged) for record in listed] == [
            ("b", [5], False),
            ("a", [], True),
        ]
    damaged = listed[1]
    store.delete(damaged.name, damaged.space)
    turn(store, "a", [7])
    assert store.get("a", HERE).token_ids == [7]


@pytest.mark.parametrize("cut", [100, 2000, 3900, 4096, 9000])
def test_a_file_that_was_cut_off_gives_no_other_answer(tmp_path, cut):
    path = tmp_path / "sessions.sqlite"
    store = store_of(path)
    for name in "abc":
        turn(store, name, list(range(1000)))
    store.close()
    path.write_bytes(path.read_bytes()[:-cut])
    found = []
    for name in "abc":
        with contextlib.suppress(errors.SessionStoreError):
            found.append(store_of(path).begin(name, HERE, **OF).token_ids)
    assert all(token_ids == list(range(1000)) for token_ids in found)
    assert len(found) < 3 or cut < 3900


def test_a_full_disk_is_said_so_without_naming_the_file(tmp_path):
    """Callers of other machines hear it. Files of more than 64 KiB are refused as if the disk were full."""
    path = tmp_path / "sessions.sqlite"
    code = """
import resource, sys
from pagemill.errors import SessionStoreError
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
store = SessionStore(sys.argv[1], 4, None)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
for count in (1, 100_000, 2):
    try:
        store.commit(store.begin("a", Namespace(), model="m", tokenizer="t"), [1] * count, None)
        print(len(store.get("a", Namespace()).token_ids))
    except SessionStoreError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60, check=True)
    kept, refused, after = done.stdout.splitlines()
    assert (kept, after) == ("1", "2")
    assert refused.startswith("the sessions cannot be used: ")
    assert "rollback" not in refused
    assert str(tmp_path) not in refused


CHILD = """
import sys
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import TenantLimits
store = SessionStore(sys.argv[1], 100, None)
for turn in range(int(sys.argv[3])):
    store.commit(store.begin(sys.argv[2], Namespace(), model="m", tokenizer="t"), [turn] * 1000, None)
    print(turn, flush=True)
"""


def child(path, name, turns):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), name, str(turns)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_two_processes_write_at_once(tmp_path):
    processes = [child(tmp_path / "s.sqlite", name, 40) for name in "ab"]
    for process in processes:
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages.decode()
    assert [record.num_turns for record in store_of(tmp_path / "s.sqlite").list(HERE)] == [40, 40]


def test_killed_at_any_moment_a_session_has_whole_turns(tmp_path):
    path, random_ = tmp_path / "s.sqlite", random.Random(1)
    for _ in range(8):
        process = child(path, "a", 100_000)
        said = int(process.stdout.readline())
        time.sleep(random_.uniform(0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        rest, _ = process.communicate()
        said = max([said, *map(int, rest.split(b"\n")[:-1])])
        (value,) = set(store_of(path).get("a", HERE).token_ids)
        assert value in (said, said + 1)


def response(store, name, space=HERE, after=None):
    begun = store.begin_response(name, space, after=after, keep=True, **OF)
    store.commit(begun, [*begun.token_ids, 1], [], response={"name": name})


def names(store, space=HERE):
    return {found.name for found in store.list(space)}


def test_responses_give_way_to_newer_ones_and_to_sessions():
    store = store_of(max_sessions=3)
    turn(store, "named", [1])
    response(store, "resp_1")
    response(store, "resp_2")
    response(store, "resp_3", after="resp_1")  # that is used now: the other one gives way
    assert names(store) == {"named", "resp_1", "resp_3"}
    assert store.get("resp_3", HERE).token_ids == [1, 1]
    turn(store, "another", [1])
    turn(store, "third", [1])
    assert names(store) == {"named", "another", "third"}
    with pytest.raises(errors.SessionLimitError, match="set store to false"):
        store.begin_response("resp_4", HERE, after=None, keep=True, **OF)
    store.release(store.begin_response("resp_4", HERE, after=None, keep=False, **OF))
    with pytest.raises(errors.ResponseNotFoundError, match="gave way to newer ones"):
        store.begin_response("resp_5", HERE, after="resp_3", keep=False, **OF)


def test_responses_give_way_to_their_own_tenant_alone():
    store = store_of(max_sessions=3)
    store.set_limit("a", TenantLimits(max_sessions=1))
    for name in ("resp_1", "resp_2"):
        response(store, name, Namespace("a"))
        response(store, name, Namespace("b"))
    assert (names(store, Namespace("a")), names(store, Namespace("b"))) == ({"resp_2"}, {"resp_1", "resp_2"})
    with pytest.raises(errors.SessionLimitError):
        turn(store, "c", [1], space=Namespace("c"))


def test_many_responses_at_once_need_no_room_each():
    store = store_of(max_sessions=1)
    begun = [store.begin_response(f"resp_{at}", HERE, after=None, keep=True, **OF) for at in range(3)]
    for each in begun:
        store.commit(each, [1], [], response={})
    assert names(store) == {"resp_2"}


def test_a_new_sessions_turn_that_fails_costs_no_response_and_one_that_ends_well_the_oldest():
    store = store_of(max_sessions=2)
    response(store, "resp_1")
    response(store, "resp_2")
    store.release(store.begin("chat", HERE, **OF))
    assert names(store) == {"resp_1", "resp_2"}
    for tokens in ([1], [1, 2]):
        turn(store, "chat", tokens)
        assert names(store) == {"resp_2", "chat"}


def test_who_begins_waits_for_no_look_at_sessions_whose_turns_run(monkeypatch):
    """Each may have a long conversation, and there may be many."""
    store = store_of(max_sessions=9)
    turn(store, "one", [1])
    store.begin("one", HERE, **OF)
    looked_at = []
    monkeypatch.setattr("pagemill.sessions.store.record_of", looked_at.append)
    store.begin("other", HERE, **OF)
    assert looked_at == []
