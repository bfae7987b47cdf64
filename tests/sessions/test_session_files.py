"""Files of sessions: those of earlier versions, of something else, damaged or cut off, and full disks."""

import contextlib
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import errors
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore

COLUMNS = (
    "tenant, cache_salt, name, state, model, tokenizer, num_turns, num_messages, created_s, used_s, card_checksum, "
    "token_ids, messages, checksum"
)
HERE = Namespace()
MINE = Namespace("default", "mine")
OF = {"model": "m", "tokenizer": "t"}


def store_of(path):
    return SessionStore(path, 4, None)


def turn(store, name, token_ids, messages=None, space=HERE):
    store.commit(store.begin(name, space, **OF), token_ids, messages)


def write_older(path, version, key, rows):
    """Writes a file of a version before 3. rows: the values of the key's columns, and the messages."""
    names = ", ".join(f"{name} TEXT" for name in key.split(", "))
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.execute(
            f"CREATE TABLE sessions ({names}, state TEXT NOT NULL, model TEXT NOT NULL, tokenizer TEXT NOT NULL, "
            "token_ids BLOB NOT NULL, messages TEXT, num_turns INTEGER NOT NULL, created_s REAL NOT NULL, "
            f"used_s REAL NOT NULL, PRIMARY KEY ({key})) WITHOUT ROWID"
        )
        for *of_key, messages in rows:
            values = (*of_key, "s", "m", "t", b"\x05\0\0\0", messages, 3, 1.0, 2.0)
            old.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(values))})", values)
        old.execute(f"PRAGMA user_version = {version}")
        old.commit()


def test_a_file_of_version_1_is_the_default_tenants(tmp_path):
    path = tmp_path / "old.sqlite"
    write_older(path, 1, "cache_salt, name", [("mine", "a", None)])
    for _ in range(2):
        record = store_of(path).get("a", MINE)
        assert (record.token_ids, record.num_turns, record.used_s, record.space) == ([5], 3, 2.0, MINE)
    turn(store_of(path), "a", [5, 6], space=MINE)
    assert store_of(path).get("a", MINE).token_ids == [5, 6]


def test_a_broken_conversation_of_version_2_leaves_the_others(tmp_path):
    path = tmp_path / "old.sqlite"
    broken, whole = "[{", '[{"role": "user", "content": "x"}]'
    write_older(path, 2, "tenant, cache_salt, name", [("default", "", "a", broken), ("default", "", "b", whole)])
    store = store_of(path)
    assert {info.name: (info.damaged, info.num_messages) for info in store.list(HERE)} == {
        "a": (True, None),
        "b": (False, 1),
    }
    assert store.get("b", HERE).token_ids == [5]
    store.delete("a", HERE)


def test_a_file_of_something_else_is_said_so(tmp_path):
    (tmp_path / "text").write_text("nothing of the kind" * 100)
    with pytest.raises(errors.SessionStoreError, match="cannot be used: file is not a database; mend that"):
        store_of(tmp_path / "text")
    with pytest.raises(errors.SessionStoreError, match=r"a folder; name a file, such as '.*/sessions\.sqlite'"):
        store_of(tmp_path)
    path = tmp_path / "later"
    store_of(path).close()
    with contextlib.closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA user_version = 9")
    with pytest.raises(errors.SessionStoreError, match="version 9; this one reads version 4"):
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


def test_a_file_of_version_3_keeps_what_is_whole_and_what_is_damaged(tmp_path):
    path = tmp_path / "old.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as old:
        old.executescript((Path(__file__).parents[1] / "data" / "sessions-3.sql").read_text())
    for _ in range(2):
        store = store_of(path)
        assert [(info.name, info.num_messages, info.num_tokens, info.damaged) for info in store.list(None)] == [
            ("resp_1", 1, 2, False),
            ("chat", 2, 3, False),
            ("plain", None, 2, False),
            ("damaged", None, 0, True),
        ]
        assert store.get("plain", Namespace("acme", "salt")).token_ids == [1, 2**31]
        chat, response = store.get("chat", HERE), store.get("resp_1", HERE)
        assert (chat.info.num_messages, chat.info.num_tokens, chat.num_turns) == (2, 3, 1)
        assert (response.instructions, response.response) == ("Be brief.", {"status": "completed"})
        with pytest.raises(errors.SessionStoreError, match="'damaged' is damaged"):
            store.get("damaged", HERE)
        store.close()


def test_sessions_that_no_request_can_name_are_removed_and_that_is_said(tmp_path, caplog):
    store = store_of(tmp_path / "s.sqlite")
    turn(store, "a", [5])
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "s.sqlite")) as file, file:
        file.execute(f"INSERT INTO sessions ({COLUMNS}) SELECT {COLUMNS.replace('cache_salt', '?')} FROM sessions",
                     ("x" * 5000,))  # fmt: skip
    assert [record.name for record in store_of(tmp_path / "s.sqlite").list(None)] == ["a"]
    assert "removed 1 sessions" in caplog.text


@pytest.mark.parametrize(("place", "bit"), [("token", 2), ("word", 2), ("word", 128), ("model", 2), ("model", 128)])
def test_a_bit_that_has_flipped_is_said_so_and_the_session_can_be_deleted(tmp_path, place, bit):
    path = tmp_path / "sessions.sqlite"
    store = store_of(path)
    begun = store.begin("a", HERE, model="a model", tokenizer="t")
    store.commit(begun, [1, 2, 0x12345678], [{"role": "user", "content": "a word"}])
    turn(store, "b", [5])
    store.close()
    content = bytearray(path.read_bytes())
    at = content.index({"token": b"\x78\x56\x34\x12", "word": b"a word", "model": b"a model"}[place])
    content[at] ^= bit
    path.write_bytes(content)
    store = store_of(path)
    for use in (store.get, lambda name, space: store.begin(name, space, **OF)):
        with pytest.raises(errors.SessionStoreError, match="session 'a' is damaged"):
            use("a", HERE)
    assert store.get("b", HERE).token_ids == [5]
    for space in (HERE, None):
        listed = store.list(space)
        expected = [("b", 1, False), ("a", 0, True) if place == "model" else ("a", 3, False)]
        assert [(info.name, info.num_tokens, info.damaged) for info in listed] == expected
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
