"""SessionStore: conversations by name, as token ids, in memory or in a file that outlives the process.

A session holds no K/V. Those of its tokens are ordinary published blocks, found by their digests on whatever tier they
are by now; so a session is small, and going on with one is a prompt that begins with its token ids.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from pagemill import errors
from pagemill.config import EngineConfig
from pagemill.hub.registry import cache_dir
from pagemill.namespace import MAX_LENGTH, Namespace
from pagemill.tenant_limits import TenantLimits

logger = logging.getLogger(__name__)

VERSION = 3
ADAPTER_MARK = " adapter "
BUSY_TIMEOUT_S = 10.0
"""The time for which a write waits for another process's write."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_SCHEMA = """
CREATE TABLE sessions (
    tenant TEXT, cache_salt TEXT, name TEXT, state TEXT NOT NULL, model TEXT NOT NULL, tokenizer TEXT NOT NULL,
    token_ids BLOB NOT NULL, messages TEXT, num_turns INTEGER NOT NULL, created_s REAL NOT NULL, used_s REAL NOT NULL,
    checksum BLOB NOT NULL, PRIMARY KEY (tenant, cache_salt, name)
) WITHOUT ROWID
"""
_OLDER = {1: "SELECT 'default', * FROM older", 2: "SELECT * FROM older"}
"""How the rows of earlier versions become this one's, but for the checksum."""
_KEY = "tenant = ? AND cache_salt = ? AND name = ?"


def default_path() -> Path:
    """Returns the file of this user's sessions, for commands that keep them."""
    return cache_dir() / "sessions.sqlite"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session as it was when it was read. Times are seconds since 1970.

    token_ids: prompts and answers of all turns, as the engine saw and produced them.
    messages:  the same as messages; None for a session of plain prompts.
    tools:     those that the conversation was rendered with; None for none.
    space:     its namespace: sessions of another one have names of their own, and cannot be seen.
    tokenizer: fingerprint of the tokenizer that gives the ids their meaning, and the digest of its LoRA adapter, if it
               has one; model: the model's or the adapter's name, for people.
    state:     changes with every turn; "" for a session that has none yet.
    damaged:   its content is lost, and not here: it can be deleted.
    """

    name: str
    space: Namespace
    model: str
    tokenizer: str
    token_ids: list[int]
    messages: list[dict[str, Any]] | None
    num_turns: int
    created_s: float
    used_s: float
    state: str
    damaged: bool = False
    tools: list[dict[str, Any]] | None = None

    @property
    def adapter(self) -> bytes:
        """The digest of its LoRA adapter; empty for none."""
        return bytes.fromhex(self.tokenizer.partition(ADAPTER_MARK)[2])


class SessionStore:
    """Thread-safe, and several processes may use one file. Raises SessionStoreError for a file that cannot be used.

    path: None keeps sessions in memory. max_sessions: over all namespaces; one more is refused, and so is one more than
    a tenant's own limit (`set_limit`).
    timeout_s: a session that was not used for so long is forgotten; None keeps it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, max_sessions: int, timeout_s: float | None) -> None:
        self.path = None if path is None else Path(path).expanduser()
        self._max_sessions = max_sessions
        self._limits: dict[str, int | None] = {}
        self._timeout_s = timeout_s
        self._opening = True
        """True while errors may name the file. Later they reach callers who must not learn its path."""
        self._lock = threading.RLock()
        self._in_use: dict[tuple[Namespace, str], SessionRecord] = {}  # as its turn has begun
        with self._errors():
            if self.path is not None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with suppress(FileExistsError):  # never opened a second time: closing it would end SQLite's locks on it
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                self.path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.text_factory = lambda text: text.decode(errors="replace")  # checksums find what is damaged
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version < VERSION:
                    if version:
                        self._db.execute("ALTER TABLE sessions RENAME TO older")
                    self._db.execute(_SCHEMA)
                    if version:
                        for row in self._db.execute(_OLDER[version]).fetchall():
                            self._insert(row)
                        self._db.execute("DROP TABLE older")
                    self._db.execute(f"PRAGMA user_version = {VERSION}")
                elif version != VERSION:
                    raise errors.SessionStoreError(
                        f"{self.path} has sessions of version {version}; this one reads version {VERSION}; give "
                        f"another session_path"
                    )
            (finding,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if finding != "ok":
                raise errors.SessionStoreError(
                    f"{self.path} is damaged ({finding}); bring it back from a copy, or give another session_path"
                )
            self._remove_unreachable()
        self._opening = False

    @classmethod
    def of(cls, config: EngineConfig) -> SessionStore:
        """Returns the store that an engine's settings ask for, with its tenants' own limits."""
        store = cls(config.session_path, config.max_sessions, config.session_timeout_s)
        for tenant, limits in config.tenants.items():
            store.set_limit(tenant, limits)
        return store

    # A turn: begin, then commit or release

    def begin(self, name: str, space: Namespace, *, model: str, tokenizer: str, adapter: bytes = b"") -> SessionRecord:
        """Takes a session for one turn, and returns it; one of this name is begun if there is none.

        Raises SessionBusyError while another turn of it runs here, SessionLimitError, and InvalidRequestError for a bad
        name or a session of another tokenizer or adapter.
        """
        if adapter:
            tokenizer += ADAPTER_MARK + adapter.hex()
        check_name(name)
        now = time.time()
        with self._lock:
            self._expire(now)
            if (running := self._in_use.get((space, name))) is not None:
                raise errors.SessionBusyError(
                    f"session {name!r} is in use by another request; wait for its end"
                    + (", or fork the session" if running.state else ""),
                    param="session_id",
                )
            record = self._find(name, space)
            if record is None:
                self._require_room(space, name)
                record = SessionRecord(name, space, model, tokenizer, [], None, 0, now, now, "")
            elif record.adapter != adapter:
                raise errors.InvalidRequestError(
                    f"session {name!r} was begun with {record.model}, and {model} is the model with another LoRA "
                    f"adapter, or with none or other weights; go on with the first, or use another name",
                    param="session_id",
                )
            elif record.tokenizer != tokenizer:
                raise errors.InvalidRequestError(
                    f"session {name!r} was begun with {record.model}, whose tokens are not those of {model}; go on "
                    f"with that model, or use another name",
                    param="session_id",
                )
            self._in_use[space, name] = record
            return record

    def commit(
        self,
        begun: SessionRecord,
        token_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Ends a turn: the session has these tokens, messages and tools now.

        Raises SessionBusyError, and keeps nothing of the turn, if another process has changed or deleted the session
        since it was begun."""
        kept = None if messages is None else [dict(message) for message in messages]
        record = replace(
            begun,
            token_ids=[*token_ids],
            messages=kept,
            tools=None if tools is None else [dict(tool) for tool in tools],
            num_turns=begun.num_turns + 1,
            used_s=time.time(),
            state=secrets.token_hex(8),
        )
        with self._lock:
            try:
                with self._transaction():
                    earlier = (*begun.space, begun.name, begun.state)
                    gone = self._db.execute(f"DELETE FROM sessions WHERE {_KEY} AND state = ?", earlier).rowcount
                    if gone != bool(begun.state) or not self._insert(_row(record)):
                        raise errors.SessionBusyError(
                            f"session {begun.name!r} was changed or deleted by another process during this turn, "
                            f"which is not kept; ask again",
                            param="session_id",
                        )
            finally:
                self.release(begun)

    def release(self, begun: SessionRecord) -> None:
        """Ends a turn without a trace. Nothing happens if it has ended already."""
        with self._lock:
            if self._in_use.get(key := (begun.space, begun.name)) is begun:
                del self._in_use[key]

    # Upkeep

    def set_limit(self, tenant: str, limits: TenantLimits) -> None:
        """Limits a tenant's sessions. Those that are there stay, however many."""
        with self._lock:
            self._limits[tenant] = limits.number("max_sessions", self._max_sessions, least=1)

    def get(self, name: str, space: Namespace) -> SessionRecord:
        """Returns a session. Raises SessionNotFoundError."""
        with self._lock:
            self._expire(time.time())
            return self._found(name, space)

    def list(self, space: Namespace | None) -> list[SessionRecord]:
        """Returns the sessions of one namespace, or of all (None), the last used first; damaged ones by name only."""
        with self._lock:
            self._expire(time.time())
            where = "" if space is None else "WHERE tenant = ? AND cache_salt = ? "
            query = f"SELECT * FROM sessions {where}ORDER BY used_s DESC"
            return [_listed(row) for row in self._rows(query, space or ())]

    def fork(self, name: str, space: Namespace, new_name: str) -> SessionRecord:
        """Makes and returns another session, which begins as this one is now and shares all its blocks.

        Raises SessionNotFoundError, SessionLimitError, and InvalidRequestError if the new name is bad or in use.
        """
        check_name(new_name)
        now = time.time()
        with self._lock:
            self._expire(now)
            with self._transaction():
                record = self._found(name, space)
                if (space, new_name) in self._in_use or self._find(new_name, space) is not None:
                    raise errors.InvalidRequestError(
                        f"there is a session {new_name!r} already; delete it, or fork to another name",
                        param="session_id",
                    )
                self._require_room(space, new_name)
                child = replace(record, name=new_name, created_s=now, used_s=now, state=secrets.token_hex(8))
                self._insert(_row(child))
        return child

    def delete(self, name: str, space: Namespace) -> None:
        """Forgets a session. Raises SessionNotFoundError, and SessionBusyError while a turn of it runs here."""
        with self._lock:
            if (space, name) in self._in_use:
                raise errors.SessionBusyError(
                    f"session {name!r} is in use by a request; wait for its end", param="session_id"
                )
            self._expire(time.time())
            with self._transaction():
                if not self._db.execute(f"DELETE FROM sessions WHERE {_KEY}", (*space, name)).rowcount:
                    raise _not_found(name)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _found(self, name: str, space: Namespace) -> SessionRecord:
        record = self._find(name, space)
        if record is None:
            raise _not_found(name)
        return record

    def _find(self, name: str, space: Namespace) -> SessionRecord | None:
        rows = self._rows(f"SELECT * FROM sessions WHERE {_KEY}", (*space, name))
        return _record(rows[0]) if rows else None

    def _insert(self, row: tuple[Any, ...]) -> bool:
        """Returns False, and writes nothing, where there is a session of this name. row: all but the checksum."""
        values = (*row, _checksum(row))
        query = f"INSERT OR IGNORE INTO sessions VALUES ({', '.join('?' * len(values))})"
        return self._db.execute(query, values).rowcount > 0

    def _rows(self, query: str, values: tuple[Any, ...]) -> Any:
        with self._errors():
            return self._db.execute(query, values).fetchall()

    def _require_room(self, space: Namespace, name: str) -> None:
        """Raises SessionLimitError unless there is room for one more, counting those whose first turn runs."""
        begun = [of.tenant for of, other in self._in_use if self._find(other, of) is None]
        query = "SELECT COUNT(*), COUNT(*) FILTER (WHERE tenant = ?) FROM sessions"
        ((kept, own),) = self._rows(query, (space.tenant,))
        of_tenant = self._limits.get(space.tenant)
        for limit, count, whose in (
            (self._max_sessions, kept + len(begun), ""),
            (of_tenant, own + begun.count(space.tenant), f" of tenant {space.tenant!r}"),
        ):
            if limit is not None and count >= limit:
                raise errors.SessionLimitError(
                    f"session {name!r} would be number {count + 1}, and max_sessions{whose} is {limit}; delete one, "
                    f"raise max_sessions, or let idle ones go (session_timeout_s)",
                    param="session_id",
                )

    def _remove_unreachable(self) -> None:
        """Removes sessions of namespaces that no request can name any more: salts had no limit once."""
        longer = (MAX_LENGTH, MAX_LENGTH)
        removed = self._db.execute("DELETE FROM sessions WHERE length(tenant) > ? OR length(cache_salt) > ?", longer)
        if removed.rowcount:
            logger.warning(
                "removed %d sessions whose tenant or cache_salt has more than %d characters: no request can name them",
                *(removed.rowcount, MAX_LENGTH),
            )

    def _expire(self, now: float) -> None:
        if self._timeout_s is None:
            return
        last = now - self._timeout_s
        rows = self._rows("SELECT tenant, cache_salt, name FROM sessions WHERE used_s < ?", (last,))
        idle = [row for row in rows if (Namespace(*row[:2]), row[2]) not in self._in_use]
        if idle:
            with self._transaction():
                query = f"DELETE FROM sessions WHERE {_KEY} AND used_s < ?"
                self._db.executemany(query, [(*row, last) for row in idle])

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has ended it already
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            where = f" in {self.path}" if self._opening and self.path is not None else ""
            raise errors.SessionStoreError(
                f"the sessions{where} cannot be used: {error}; mend that, or give another session_path"
            ) from error


def check_name(name: str) -> None:
    """Raises InvalidRequestError unless the name can stand in a URL and on a command line."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.InvalidRequestError(
            f"the session name {name!r:.140} is not 1 to 128 letters, digits and . _ : @ - that begin with a letter or "
            f"digit; choose another",
            param="session_id",
        )


def _not_found(name: str) -> errors.SessionNotFoundError:
    return errors.SessionNotFoundError(f"there is no session {name!r}; a request that names it begins one")


def _row(record: SessionRecord) -> tuple[Any, ...]:
    """Returns a session as the table has it, but for the checksum."""
    return (
        *(*record.space, record.name, record.state, record.model, record.tokenizer),
        struct.pack(f"<{len(record.token_ids)}I", *record.token_ids),
        _written(record),
        *(record.num_turns, record.created_s, record.used_s),
    )


def _written(record: SessionRecord) -> str | None:
    """Returns a session's messages as JSON: a list, or an object that has the tools too."""
    if record.messages is None:
        return None
    kept = record.messages if record.tools is None else {"messages": record.messages, "tools": record.tools}
    return json.dumps(kept, default=dict)


def _checksum(row: tuple[Any, ...]) -> bytes:
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(row))


def _record(row: tuple[Any, ...]) -> SessionRecord:
    """Returns a row of the table as a session. Raises SessionStoreError for one that was not written like this."""
    *values, checksum = row
    tenant, cache_salt, name, state, model, tokenizer, packed, written, num_turns, created_s, used_s = values
    if checksum != _checksum(tuple(values)):
        raise errors.SessionStoreError(
            f"session {name!r:.140} is damaged: its checksum is not that of its content; delete it, and begin another"
        )
    space, token_ids = Namespace(tenant, cache_salt), list(struct.unpack(f"<{len(packed) // 4}I", packed))
    kept = None if written is None else json.loads(written)
    messages, tools = (kept["messages"], kept["tools"]) if isinstance(kept, dict) else (kept, None)
    return SessionRecord(
        name, space, model, tokenizer, token_ids, messages, num_turns, created_s, used_s, state, tools=tools
    )


def _listed(row: tuple[Any, ...]) -> SessionRecord:
    """Returns a row of the table as a session, without its content if it is damaged."""
    try:
        return _record(row)
    except errors.SessionStoreError:
        tenant, cache_salt, name, *_ = row
        return SessionRecord(name, Namespace(tenant, cache_salt), "", "", [], None, 0, 0.0, 0.0, "", damaged=True)
