"""Reads the tenants file again when it changes, or when asked: keys and limits, while requests go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from pagemill.errors import ConfigError, PagemillError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.logs.output import AUDIT
from pagemill.tenant_limits import TenantLimits, TenantsFile, read_tenants_file

LOOK_S = 2.0
"""Seconds between two looks at the file."""
MAX_SHOWN = 10
"""Names of tenants that a message shows."""


class TenantsReload:
    """Keeps keys and limits as the file has them.

    A file that cannot be used changes nothing. A tenant that is no longer there has no key and no guarantee any more;
    its sessions, pins and blocks stay. Limits that the engine refuses leave that tenant's as they were.
    """

    def __init__(self, file: TenantsFile, keys: ApiKeys, llm: AsyncLLM, say: Callable[[str], None]) -> None:
        """file: as it was read at the start. say: is called with what came of each reading."""
        self._file = file
        self._keys = keys
        self._llm = llm
        self._say = say
        self._seen = _state_of(file.path)
        self._reading = asyncio.Lock()

    async def watch(self) -> None:
        """Looks at the file again and again."""
        while True:
            await asyncio.sleep(LOOK_S)
            if _state_of(self._file.path) != self._seen:
                await self.reload()

    async def reload(self) -> None:
        """Reads the file and takes what has changed in it."""
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
            before, after = self._file.limits, dict(file.limits)
            changed = {name: limits for name, limits in after.items() if before.get(name) != limits}
            gone = before.keys() - after.keys()
            refused = await self._set(changed | {name: TenantLimits() for name in gone})
            self._keys.take(file)
            for name in refused:  # so that the next reading finds them changed
                after.pop(name, None)
            self._file = file._replace(limits=after | {name: before[name] for name in refused if name in before})
            self._say(
                f"the tenants file {str(path)!r} was read again; tenants: {len(file.limits)}, keys: {len(file.keys)}, "
                f"admin keys: {len(file.admin_keys)}, changed: {_names(changed)}, gone: {_names(gone)}"
            )

    async def _set(self, limits: dict[str, TenantLimits]) -> list[str]:
        """Sets limits in an order that the engine takes: one tenant's guarantee may have to go before another's comes.

        Returns the tenants whose limits it refuses in every order.
        """
        left, refused = limits, await self._set_each(limits)
        while refused and len(refused) < len(left):
            left = {name: left[name] for name in refused}
            refused = await self._set_each(left)
        for name, message in refused.items():
            AUDIT.warning("tenant %r keeps its limits: %s", name, message)
        return list(refused)

    async def _set_each(self, limits: dict[str, TenantLimits]) -> dict[str, str]:
        """Sets limits one by one, and returns why some were refused, by tenant."""
        why = {name: await self._why_not(name, each) for name, each in limits.items()}
        return {name: message for name, message in why.items() if message is not None}

    async def _why_not(self, name: str, limits: TenantLimits) -> str | None:
        try:
            await self._llm.set_tenant(name, limits)
        except PagemillError as error:
            return error.message
        return None


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
