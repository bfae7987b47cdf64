"""SessionStore: conversations by name, as token ids, in memory or in a file that outlives the process.

A session holds no K/V. Those of its tokens are ordinary published blocks, found by their digests on whatever tier they
are by now; so a session is small, and going on with one is a prompt that begins with its token ids.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagemill import errors
from pagemill.config import EngineConfig
from pagemill.hub.registry import cache_dir
from pagemill.namespace import MAX_LENGTH, Namespace
from pagemill.sessions.record import (
    RESPONSE,
    SessionInfo,
    SessionRecord,
    check_name,
    fingerprint_of,
    info_of,
    is_response,
    record_of,
    row_of,
)
from pagemill.sessions.table import CARD, CONTENT, KEY, VERSION, insert, prepare
from pagemill.tenant_limits import TenantLimits

logger = logging.getLogger(__name__)

BUSY_TIMEOUT_S = 10.0
"""The time for which a write waits for another process's write."""
PAGE = 256
"""Sessions that a listing reads at once: others wait meanwhile."""


def default_path() -> Path:
    """Returns the file of this user's sessions, for commands that keep them."""
    return cache_dir() / "sessions.sqlite"


class SessionStore:
    """Thread-safe, and several processes may use one file. Raises SessionStoreError for a file that cannot be used.

    path: None keeps sessions in memory. max_sessions: over all namespaces; one more is refused, and so is one more than
    a tenant's own limit (`set_limit`), unless responses of the same tenant can give way.
    timeout_s: a session that was not used for so long is forgotten; None keeps it.
    """

    def __init__(self, path: str | os.PathLike[str] | None, max_sessions: int, timeout_s: float | None) -> None:
        self.path = None if path is None else Path(os.path.expanduser(path))
        self._max_sessions = max_sessions
        self._limits: dict[str, int | None] = {}
        self._timeout_s = timeout_s
        self._closed = False
        self._opening = True
        """True while errors may name the file. Later they reach callers who must not learn its path."""
        self._lock = threading.RLock()
        self._in_use: dict[tuple[Namespace, str], SessionRecord] = {}  # as its turn has begun
        with self._errors():
            if self.path is not None:
                if self.path.is_dir():
                    raise errors.SessionStoreError(
                        f"session_path is {str(self.path)!r}, a folder; name a file, such as "
                        f"{str(self.path / 'sessions.sqlite')!r}"
                    )
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with suppress(FileExistsError):  # never opened a second time: closing it would end SQLite's locks on it
                    os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._db = sqlite3.connect(
                self.path or ":memory:", timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            self._db.text_factory = lambda text: text.decode(errors="replace")  # checksums find what is damaged
            with self._transaction():
                (version,) = self._db.execute("PRAGMA user_version").fetchone()
                if version > VERSION:
                    raise errors.SessionStoreError(
                        f"{self.path} has sessions of version {version}; this one reads version {VERSION}; give "
                        f"another session_path"
                    )
                prepare(self._db, version)
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
        check_name(name)
        tokenizer, now = fingerprint_of(tokenizer, adapter), time.time()
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
                self._make_room(space, name, evict=False)
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

    def begin_response(
        self,
        name: str,
        space: Namespace,
        *,
        after: str | None,
        keep: bool,
        model: str,
        tokenizer: str,
        adapter: bytes = b"",
    ) -> SessionRecord:
        """Begins a session of one turn, which has the conversation of the response `after` and what is kept with that,
        and returns it.

        keep: checks that there will be room for it. Raises ResponseNotFoundError, SessionLimitError, and
        InvalidRequestError for an earlier response of another tokenizer; that of another adapter may be gone on from.
        """
        now = time.time()
        with self._lock:
            self._expire(now)
            if keep:
                self._make_room(space, name, evict=False)
            fingerprint = fingerprint_of(tokenizer, adapter)
            record = SessionRecord(name, space, model, fingerprint, [], None, 0, now, now, "")
            if after is not None:
                earlier = self._use_response(after, space, now)
                if fingerprint_of(tokenizer, earlier.adapter) != earlier.tokenizer:
                    raise errors.InvalidRequestError(
                        f"response {after!r} is of {earlier.model}, whose tokens are not those of {model}; go on with "
                        f"that model, or send the conversation as input",
                        param="previous_response_id",
                    )
                record = replace(
                    record,
                    token_ids=earlier.token_ids,
                    messages=earlier.messages,
                    tools=earlier.tools,
                    num_turns=earlier.num_turns,
                    instructions=earlier.instructions,
                    response=earlier.response,
                )
            self._in_use[space, name] = record
            return record

    def commit(
        self,
        begun: SessionRecord,
        token_ids: Sequence[int],
        messages: Sequence[Mapping[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        instructions: str | None = None,
        response: dict[str, Any] | None = None,
    ) -> None:
        """Ends a turn: the session has these tokens and messages now, and what stands beside them.

        Raises SessionBusyError, and keeps nothing of the turn, if another process has changed or deleted the session
        since it was begun; SessionLimitError for a new one for which there is no room any more."""
        kept = None if messages is None else [dict(message) for message in messages]
        record = replace(
            begun,
            token_ids=[*token_ids],
            messages=kept,
            tools=None if tools is None else [dict(tool) for tool in tools],
            instructions=instructions,
            response=response,
            num_turns=begun.num_turns + 1,
            used_s=time.time(),
            state=secrets.token_hex(8),
        )
        try:
            row = row_of(record)
            with self._lock, self._transaction():
                if not begun.state:
                    self._make_room(begun.space, begun.name)
                earlier = (*begun.space, begun.name, begun.state)
                gone = self._db.execute(f"DELETE FROM sessions WHERE {KEY} AND state = ?", earlier).rowcount
                if gone != bool(begun.state) or not insert(self._db, row, record.info.num_messages):
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

    def list(self, space: Namespace | None) -> list[SessionInfo]:
        """Returns the sessions of one namespace, or of all (None), the last used first; damaged ones by name only.

        What was said in them is not read. Reads page by page, between which others use the store: a session that
        begins or ends meanwhile may be missing or not."""
        with self._lock:
            self._expire(time.time())
        within = "(tenant, cache_salt, name) >" if space is None else "(tenant, cache_salt) = (?, ?) AND name >"
        marks = "(?, ?, ?)" if space is None else "?"
        query = f"SELECT {CARD} FROM sessions WHERE {within} {marks} ORDER BY tenant, cache_salt, name LIMIT {PAGE}"
        found: dict[tuple[str, ...], SessionInfo] = {}
        after = (*(space or ("", "")), "")
        while True:
            with self._lock:
                rows = self._rows(query, after)
            known = len(found)
            found.update((row[:3], info_of(row)) for row in rows)
            if len(rows) < PAGE or len(found) == known:  # a damaged name may not stand where it was found
                return sorted(found.values(), key=lambda info: info.used_s, reverse=True)
            after = rows[-1][:3]

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
                self._make_room(space, new_name)
                state = secrets.token_hex(8)
                child = replace(record, name=new_name, created_s=now, used_s=now, state=state, response=None)
                insert(self._db, row_of(child), child.info.num_messages)
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
                if not self._db.execute(f"DELETE FROM sessions WHERE {KEY}", (*space, name)).rowcount:
                    raise _not_found(name)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._db.close()

    def _found(self, name: str, space: Namespace) -> SessionRecord:
        record = self._find(name, space)
        if record is None:
            raise _not_found(name)
        return record

    def _find(self, name: str, space: Namespace) -> SessionRecord | None:
        rows = self._rows(f"SELECT {CONTENT} FROM sessions WHERE {KEY}", (*space, name))
        return record_of(rows[0]) if rows else None

    def _rows(self, query: str, values: tuple[Any, ...]) -> Any:
        with self._errors():
            return self._db.execute(query, values).fetchall()

    def _use_response(self, name: str, space: Namespace, now: float) -> SessionRecord:
        """Returns a response, which is used now."""
        with self._transaction():
            record = self._find(name, space) if is_response(name) else None
            if record is None:
                raise _not_found(name, "previous_response_id")
            used = replace(record, used_s=now)
            self._db.execute(f"DELETE FROM sessions WHERE {KEY}", (*space, name))
            insert(self._db, row_of(used), used.info.num_messages)
        return used

    def _make_room(self, space: Namespace, name: str, *, evict: bool = True) -> None:
        """Raises SessionLimitError unless there is room for this one, counting others whose first turn runs, but for
        responses.

        The tenant's responses give way, those first that were used longest ago. evict: False only looks."""
        others = [key for key, record in self._in_use.items() if not record.state and key != (space, name)]
        begun = [of.tenant for of, one in others if not is_response(one)]
        of_tenant, pattern = self._limits.get(space.tenant), f"{RESPONSE}*"
        query = "COUNT(*), COUNT(*) FILTER (WHERE tenant = ?), COUNT(*) FILTER (WHERE tenant = ? AND name GLOB ?)"
        ((kept, own, responses),) = self._rows(f"SELECT {query} FROM sessions", (space.tenant, space.tenant, pattern))
        too_many, own = 0, own + begun.count(space.tenant)
        of_all = f"one too many: max_sessions is {self._max_sessions}, and tenant {space.tenant!r} has {own} of them"
        of_own = f"number {own + 1}, and max_sessions of tenant {space.tenant!r} is {of_tenant}"
        for limit, count, over in ((self._max_sessions, kept + len(begun), of_all), (of_tenant, own, of_own)):
            excess = 0 if limit is None else count + 1 - limit
            too_many = max(too_many, excess)
            if excess > responses:
                what, param = ("response", "store") if is_response(name) else ("session", "session_id")
                way_out = ", or set store to false" if is_response(name) else ""
                raise errors.SessionLimitError(
                    f"{what} {name!r} would be {over}; delete one, raise max_sessions, or let idle ones go "
                    f"(session_timeout_s){way_out}",
                    param=param,
                )
        if too_many and evict:
            found = "SELECT tenant, cache_salt, name FROM sessions WHERE tenant = ? AND name GLOB ?"
            oldest = self._rows(f"{found} ORDER BY used_s LIMIT ?", (space.tenant, pattern, too_many))
            with self._errors():
                self._db.executemany(f"DELETE FROM sessions WHERE {KEY}", oldest)

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
                query = f"DELETE FROM sessions WHERE {KEY} AND used_s < ?"
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
            if self._closed:
                raise errors.EngineDeadError("this LLM is closed, with its sessions; make a new one") from None
            where = f" in {self.path}" if self._opening and self.path is not None else ""
            raise errors.SessionStoreError(
                f"the sessions{where} cannot be used: {error}; mend that, or give another session_path"
            ) from error


def _not_found(name: str, param: str | None = None) -> errors.SessionNotFoundError:
    if param is None and not is_response(name):
        return errors.SessionNotFoundError(f"there is no session {name!r}; a request that names it begins one")
    return errors.ResponseNotFoundError(
        f"there is no response {name!r:.140}: it has not ended, was deleted, was sent with store false, belongs to "
        f"another cache_salt, or gave way to newer ones (max_sessions, session_timeout_s); send the whole conversation "
        f"as input",
        param=param,
    )
