"""The table of sessions in SQLite: its columns, how rows are written, and how earlier versions' rows become its own.

What a listing shows stands before what was said: SQLite reads a row from its begin, as far as it is asked for.
"""

from __future__ import annotations

import json
import sqlite3
from typing import Any

from pagemill.sessions.record import card_checksum_of, checksum_of

VERSION = 4

CONTENT = (
    "tenant, cache_salt, name, state, model, tokenizer, token_ids, messages, num_turns, created_s, used_s, checksum"
)
"""The columns of which `record_of` makes a session."""
CARD = (
    "tenant, cache_salt, name, model, num_turns, num_messages, length(token_ids) / 4, created_s, used_s, card_checksum"
)
"""The columns of which `info_of` makes a listed session. A blob's length is known without its bytes."""
KEY = "tenant = ? AND cache_salt = ? AND name = ?"

_TABLE = """
CREATE TABLE sessions (
    tenant TEXT, cache_salt TEXT, name TEXT, state TEXT NOT NULL, model TEXT NOT NULL, tokenizer TEXT NOT NULL,
    num_turns INTEGER NOT NULL, num_messages INTEGER, created_s REAL NOT NULL, used_s REAL NOT NULL,
    card_checksum BLOB NOT NULL, token_ids BLOB NOT NULL, messages TEXT, checksum BLOB NOT NULL,
    PRIMARY KEY (tenant, cache_salt, name)
) WITHOUT ROWID
"""
_INDICES = (
    "CREATE INDEX IF NOT EXISTS sessions_used ON sessions (tenant, used_s)",  # a tenant's oldest response
    "CREATE INDEX IF NOT EXISTS sessions_idle ON sessions (used_s)",  # what nobody has used for long
)
_OLDER = {1: "SELECT 'default', *, NULL FROM older", 2: "SELECT *, NULL FROM older", 3: "SELECT * FROM older"}
"""How the rows of earlier versions become `CONTENT`; the first two had no checksum."""


def prepare(db: sqlite3.Connection, version: int) -> None:
    """Makes the table where there is none (version 0), or brings an earlier version's rows into it."""
    if version < VERSION:
        if version:
            db.execute("ALTER TABLE sessions RENAME TO older")
        db.execute(_TABLE)
        if version:
            for *row, checksum in db.execute(_OLDER[version]):
                _take_over(db, tuple(row), checksum)
            db.execute("DROP TABLE older")
        db.execute(f"PRAGMA user_version = {VERSION}")
    for index in _INDICES:
        db.execute(index)


def insert(db: sqlite3.Connection, row: tuple[Any, ...], num_messages: int | None) -> bool:
    """Writes a session; returns False, and writes nothing, where there is one of this name. row: see `row_of`."""
    return _insert(db, row, num_messages, checksum_of(row), card_checksum_of(row, num_messages))


def _insert(
    db: sqlite3.Connection, row: tuple[Any, ...], num_messages: int | None, checksum: bytes, card_checksum: bytes
) -> bool:
    values = (*row, checksum, num_messages, card_checksum)
    into = f"sessions ({CONTENT}, num_messages, card_checksum)"
    marks = ", ".join("?" * len(values))
    return db.execute(f"INSERT OR IGNORE INTO {into} VALUES ({marks})", values).rowcount > 0


def _take_over(db: sqlite3.Connection, row: tuple[Any, ...], checksum: bytes | None) -> None:
    """Writes an earlier version's row; one that is damaged stays so."""
    if checksum is not None and checksum != checksum_of(row):
        _insert(db, row, None, checksum, b"")
        return
    try:
        said = json.loads(row[7] or "null")
    except ValueError:  # the first two versions had no checksum
        _insert(db, row, None, checksum or b"", b"")
        return
    insert(db, row, None if said is None else len(said["messages"] if isinstance(said, dict) else said))
