"""Reads the tenants file again when it changes, or when asked: keys and limits, while requests go on."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pagemill.errors import ConfigError, EngineRestartingError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.logs.output import AUDIT
from pagemill.tenant_limits import TenantLimits, TenantsFile, read_tenants_file

LOOK_S = 2.0
"""Seconds between two looks at the file."""
LONGEST_WAIT_S = 60.0
"""The longest time between two tries of limits that the engine refuses."""
MAX_SHOWN = 10
"""Names of tenants that a message shows."""


class TenantsReload:
    """Keeps keys and limits as the file has them.

    A file that cannot be used changes nothing. A tenant that is no longer there has no key and no guarantee any more;
    its sessions, pins and blocks stay. Limits that the engine refuses leave that tenant's as they were. They are tried
    again, ever less often, and those that met no engine because another is being started with each look.
    """

    def __init__(self, file: TenantsFile, keys: ApiKeys, llm: AsyncLLM, say: Callable[[str], None]) -> None:
        """file: as it was read at the start. say: is called with what came of each reading."""
        self._file = file
        self._keys = keys
        self._llm = llm
        self._say = say
        self._seen = _state_of(file.path)
        self._reading = asyncio.Lock()
        self._taken = dict(file.limits)
        """Limits that the engine took from the file."""
        self._wait_s = self._next_try_s = 0.0
        self._refused: set[str] = set()
        """Tenants of which it has been said that the engine refuses their limits."""

    async def watch(self) -> None:
        """Looks at the file again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Takes what has changed in the file, or else tries again what the engine has not taken yet."""
        if _state_of(self._file.path) != self._seen:
            await self.reload()
            return
        async with self._reading:
            if time.monotonic() >= self._next_try_s and self._left():
                taken, left = await self._set()
                refused = not taken and left <= self._refused
                self._wait_s = min(max(2 * self._wait_s, LOOK_S), LONGEST_WAIT_S) if refused else 0.0
                self._next_try_s = time.monotonic() + self._wait_s
                if taken:
                    path = str(self._file.path)
                    self._say(f"more limits of the tenants file {path!r} are set; {self._told(taken, left)}")

    async def reload(self) -> None:
        """Reads the file and takes what has changed in it. Says all that the engine refuses, also of earlier times."""
        async with self._reading:
            path = self._file.path
            self._seen = _state_of(path)
            try:
                file = await asyncio.to_thread(read_tenants_file, path)
                self._keys.check(file)
            except ConfigError as error:
                AUDIT.warning("keys and limits stay as they were: %s", error.message)
                return
            self._keys.revoke(file)  # at once: setting limits waits for the engine
            self._file = file
            self._refused.clear()
            self._wait_s = self._next_try_s = 0.0
            taken, left = await self._set()
            self._keys.take(file)
            self._say(
                f"the tenants file {str(path)!r} was read again; tenants: {len(file.limits)}, keys: {len(file.keys)}, "
                f"admin keys: {len(file.admin_keys)}, {self._told(taken, left)}"
            )

    def note_set(self, name: str) -> None:
        """Notes that somebody has set a tenant's limits, which stay until its entry in the file changes."""
        if name in self._file.limits:
            self._taken[name] = self._file.limits[name]
        else:
            self._taken.pop(name, None)

    def _left(self) -> dict[str, TenantLimits]:
        """Returns the limits that the engine has not taken yet; those of a tenant that is gone are none."""
        limits = self._file.limits
        gone = {name: TenantLimits() for name in self._taken.keys() - limits.keys()}
        return {name: each for name, each in limits.items() if self._taken.get(name) != each} | gone

    async def _set(self) -> tuple[set[str], set[str]]:
        """Sets what is left in an order that the engine takes: one tenant's guarantee may have to go before another's
        comes. Says once what it refuses in every order.

        Returns the tenants whose limits it took, and those whose limits it did not.
        """
        first = left = self._left()
        while left:
            why_not = {name: await self._why_not(name, limits) for name, limits in left.items()}
            before, left = left, self._left()
            if len(left) == len(before):
                for name in left.keys() - self._refused:
                    if (message := why_not[name]) is not None:
                        AUDIT.warning("tenant %r keeps its limits: %s", name, message)
                        self._refused.add(name)
                break
        self._refused &= left.keys()
        return first.keys() - left.keys(), {*left}

    async def _why_not(self, name: str, limits: TenantLimits) -> str | None:
        """Sets a tenant's limits, or returns why the engine refuses them; None also while there is no engine."""
        try:
            await self._llm.set_tenant(name, limits)
        except EngineRestartingError:
            return None
        except PagemillError as error:
            return error.message
        if name in self._file.limits:
            self._taken[name] = limits
        else:
            del self._taken[name]
        return None

    def _told(self, taken: set[str], left: set[str]) -> str:
        """Returns what became of tenants' limits, for a message."""
        here, refused, waiting = self._file.limits.keys(), left & self._refused, left - self._refused
        told = f"changed: {_names(taken & here)}, gone: {_names(taken - here)}"
        told += f", refused: {_names(refused)}" if refused else ""
        return told + (f", to be set when an engine runs again: {_names(waiting)}" if waiting else "")


def _state_of(path: Path) -> tuple[int, ...]:
    """Returns what changes with a file's content; nothing for one that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def _names(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - MAX_SHOWN} more" if len(listed) > MAX_SHOWN else ""
    return (", ".join(map(repr, listed[:MAX_SHOWN])) or "none") + more
