"""What a tenant may have: limits as they are written in settings, in a tenants file, or given at run time.

A tenants file is JSON:

    {"admin_keys": ["sha256:…"],
     "tenants": {"acme": {"api_keys": ["sk-…", "sha256:…"], "guaranteed_blocks": "25%", "max_running": 8}}}

A key is given as it is, or as the SHA-256 of its UTF-8 bytes, in hexadecimal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagemill.errors import ConfigError

DEFAULT_TENANT = "default"

Blocks = int | str
"""A number of KV blocks, or a share of the pool such as "25%"."""

_COUNTS = {"max_running": 1, "max_waiting": 0, "max_sessions": 0}
_BLOCKS = {"guaranteed_blocks": 0, "max_blocks": 1, "max_blocks_per_request": 1, "max_blocks_per_session": 1}


@dataclass(kw_only=True, frozen=True)
class TenantLimits:
    """Raises ConfigError for what is no limit. None is no limit of the tenant's own.

    guaranteed_blocks: kept for it. Beyond them it borrows what others do not use, and gives it back first.
    max_blocks: hard quota of its blocks, active and cached.
    max_blocks_per_request: hard limit of one request, over all its sequences.
    max_blocks_per_session: hard limit of a session: of its whole conversation, with the answer under way.
    idle_timeout_s: cached blocks that nobody used for so long leave the pool, for a lower tier where there is one.
    max_running: sequences that run at once.
    max_waiting: sequences that wait; a request beyond is refused (HTTP 429). Not counted are those that can begin in
        the next step; with 0, every request is refused.
    max_sessions: sessions that are kept; one more is refused.
    weight: its share of the service when several tenants wait.
    """

    guaranteed_blocks: Blocks = 0
    max_blocks: Blocks | None = None
    max_blocks_per_request: Blocks | None = None
    max_blocks_per_session: Blocks | None = None
    idle_timeout_s: float | None = None
    max_running: int | None = None
    max_waiting: int | None = None
    max_sessions: int | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, least in _BLOCKS.items():
            value = getattr(self, name)
            if isinstance(value, str):
                share = _share(value)
                if share is None or not 0 <= share <= 1:
                    raise ConfigError(
                        f"{name} is {value!r}; it must be a number of blocks, or a share of the pool from '0%' to "
                        f"'100%'",
                        param="tenants",
                    )
            elif value is not None or name == "guaranteed_blocks":
                _check_integer(name, value, least)
        for name, least in _COUNTS.items():
            if getattr(self, name) is not None:
                _check_integer(name, getattr(self, name), least)
        _check_positive("weight", self.weight)
        if self.idle_timeout_s is not None:
            _check_positive("idle_timeout_s", self.idle_timeout_s)

    def blocks(self, name: str, num_frames: int) -> int | None:
        """One of the limits on blocks, in blocks of a pool of `num_frames`; a share is rounded down."""
        value = getattr(self, name)
        return int(share * num_frames) if isinstance(value, str) and (share := _share(value)) is not None else value

    @classmethod
    def read(cls, tenant: str, values: Any) -> TenantLimits:
        """From a mapping, as files and HTTP bodies have it. Raises ConfigError, which names the tenant."""
        if isinstance(values, TenantLimits):
            return values
        if not isinstance(values, dict):
            raise ConfigError(f"tenant {tenant!r} is {values!r}; it must be an object of limits", param="tenants")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"tenant {tenant!r} has no limit {name!r}; known limits: {', '.join(known)}", param="tenants"
                )
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"tenant {tenant!r}: {error.message}", param="tenants") from None


def read_limits(tenants: Any) -> dict[str, TenantLimits]:
    """Limits by the tenant's name. Raises ConfigError."""
    if not isinstance(tenants, dict):
        raise ConfigError(f"tenants is {tenants!r}; it must be a dict of limits by tenant", param="tenants")
    for name in tenants:
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigError(f"tenants has the name {name!r}; a name must be printable text", param="tenants")
    return {name: TenantLimits.read(name, limits) for name, limits in tenants.items()}


class TenantsFile(NamedTuple):
    """limits: by tenant. keys: by a key's SHA-256, whose it is. admin_keys: SHA-256 of keys that may change limits."""

    limits: dict[str, TenantLimits]
    keys: dict[bytes, str]
    admin_keys: list[bytes]


def read_tenants_file(path: str | os.PathLike[str]) -> TenantsFile:
    """Raises ConfigError, which names the file."""
    try:
        return _read_tenants(json.loads(Path(path).expanduser().read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        why = error.message if isinstance(error, ConfigError) else str(error)
        raise ConfigError(f"tenants file {os.fspath(path)!r}: {why}", param="tenants") from error


def _read_tenants(content: Any) -> TenantsFile:
    parts = {"tenants", "admin_keys"}
    if not isinstance(content, dict) or not set(content) <= parts or not isinstance(content.get("tenants"), dict):
        raise ConfigError('it must be an object with "tenants" and, if limits may be changed over HTTP, "admin_keys"')
    limits: dict[str, Any] = {}
    keys: dict[bytes, str] = {}
    for name, values in content["tenants"].items():
        values = dict(values) if isinstance(values, dict) else values
        for key in _keys(name, values.pop("api_keys", []) if isinstance(values, dict) else []):
            if keys.setdefault(key, name) != name:
                raise ConfigError(f"tenants {keys[key]!r} and {name!r} have the same key; give each its own")
        limits[name] = values
    return TenantsFile(read_limits(limits), keys, _keys("admin_keys", content.get("admin_keys", [])))


def _keys(owner: str, keys: Any) -> list[bytes]:
    if not isinstance(keys, list) or not all(isinstance(key, str) and key for key in keys):
        raise ConfigError(f"{owner}: its keys must be a list of texts")
    digests = []
    for key in keys:
        if key.startswith("sha256:"):
            digest = key.removeprefix("sha256:").lower()
            if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
                raise ConfigError(f"{owner}: a key's sha256 must be 64 hexadecimal digits")
            digests.append(bytes.fromhex(digest))
        else:
            digests.append(key_digest(key))
    return digests


def key_digest(key: str) -> bytes:
    """SHA-256 of a key (32 bytes): keys are kept and compared as that."""
    return hashlib.sha256(key.encode()).digest()


def _check_integer(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {least}", param="tenants")


def _check_positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0", param="tenants")


def _share(text: str) -> float | None:
    try:
        return float(text.removesuffix("%")) / 100 if text.endswith("%") else None
    except ValueError:
        return None
