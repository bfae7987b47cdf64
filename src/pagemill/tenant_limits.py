"""Declares what a tenant may have: limits in settings, in a tenants file, or given at run time.

A tenants file is JSON:

    {"admin_keys": ["sha256:…"],
     "tenants": {"acme": {"api_keys": ["sk-…", "sha256:…"], "guaranteed_blocks": "25%", "max_running": 8}}}

A key is given as it is, or as the SHA-256 of its UTF-8 bytes, in hexadecimal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from pagemill.arguments import Count, Positive, about, check_fields
from pagemill.errors import ConfigError, shown

DEFAULT_TENANT = "default"
MAX_NAME = 128
"""Characters of a tenant's name."""

_KEY = re.compile(r"[!-~]+")
"""What a client can send in a header."""

PoolShare = Annotated[
    str, Meta(pattern=r"^(100(\.0*)?|\d{1,2}(\.\d*)?)%$", title="a share of the pool from '0%' to '100%'")
]
Blocks = Annotated[int, Meta(ge=1)] | PoolShare
"""A number of KV blocks, or a share of the pool such as "25%"."""
Most = Annotated[int, Meta(ge=0)]


@dataclass(kw_only=True, frozen=True)
class TenantLimits:
    """Limits of one tenant; None means that it has none of this kind. Raises ConfigError for a wrong value."""

    guaranteed_blocks: Annotated[
        Most | PoolShare,
        about("Blocks that are kept for it. Beyond them it borrows what others do not use, and gives it back first."),
    ] = 0
    max_blocks: Annotated[Blocks | None, about("The most blocks it may have, active and cached.")] = None
    max_blocks_per_request: Annotated[
        Blocks | None, about("The most blocks of one request, over all its sequences.")
    ] = None
    max_blocks_per_session: Annotated[
        Blocks | None, about("The most blocks of a session: of its whole conversation, with the answer under way.")
    ] = None
    idle_timeout_s: Annotated[
        Positive | None,
        about("Cached blocks that nobody used for so long leave the pool, for a lower tier where there is one."),
    ] = None
    max_running: Annotated[Count | None, about("Sequences that run at once.")] = None
    max_waiting: Annotated[
        Most | None,
        about(
            "Sequences that wait; a request beyond is refused (HTTP 429). Those that can begin in the next step are "
            "not counted; with 0, every request is refused."
        ),
    ] = None
    max_sessions: Annotated[Most | None, about("Sessions that are kept; one more is refused.")] = None
    weight: Annotated[Positive, about("Its share of the service when several tenants wait.")] = 1.0

    def __post_init__(self) -> None:
        try:
            check_fields(self, ConfigError)
        except ConfigError as error:
            raise ConfigError(error.message, param="tenants") from None

    def blocks(self, name: str, num_frames: int) -> int | None:
        """Returns one of the limits on blocks, in blocks of a pool of `num_frames`; a share is rounded down."""
        value: int | str | None = getattr(self, name)
        return int(float(value[:-1]) / 100 * num_frames) if isinstance(value, str) else value

    @classmethod
    def read(cls, tenant: str, values: Any) -> TenantLimits:
        """Reads a tenant's limits from a dict, as files and HTTP bodies have it. Raises ConfigError, which names it."""
        if not isinstance(tenant, str) or not 0 < len(tenant) <= MAX_NAME or not tenant.isprintable():
            raise ConfigError(
                f"a tenant's name is {shown(tenant)}; a name must be 1 to {MAX_NAME} printable characters",
                param="tenants",
            )
        if isinstance(values, TenantLimits):
            return values
        if not isinstance(values, dict):
            raise ConfigError(f"tenant {tenant!r} is {shown(values)}; it must be an object of limits", param="tenants")
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
    """Reads limits by the tenant's name. Raises ConfigError."""
    if not isinstance(tenants, dict):
        raise ConfigError(f"tenants is {shown(tenants)}; it must be a dict of limits by tenant", param="tenants")
    return {name: TenantLimits.read(name, limits) for name, limits in tenants.items()}


class TenantsFile(NamedTuple):
    """A tenants file that was read.

    limits: by tenant. keys: the tenant by the SHA-256 of each of its keys. admin_keys: SHA-256 of keys that may change
    limits.
    """

    limits: dict[str, TenantLimits]
    keys: dict[bytes, str]
    admin_keys: list[bytes]


def read_tenants_file(path: str | os.PathLike[str]) -> TenantsFile:
    """Reads a tenants file. Raises ConfigError, which names the file."""
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
        for key in key_digests(name, values.pop("api_keys", []) if isinstance(values, dict) else []):
            if keys.setdefault(key, name) != name:
                raise ConfigError(f"tenants {keys[key]!r} and {name!r} have the same key; give each its own")
        limits[name] = values
    return TenantsFile(read_limits(limits), keys, key_digests("admin_keys", content.get("admin_keys", [])))


def key_digests(owner: str, keys: Any) -> list[bytes]:
    """Returns the digests of keys as files and flags have them. Raises ConfigError, which names the owner, no key."""
    if not isinstance(keys, list) or not all(isinstance(key, str) and _KEY.fullmatch(key) for key in keys):
        raise ConfigError(
            f"{owner}: its keys must be a list of texts, each of printable ASCII characters without spaces"
        )
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
    """Returns the SHA-256 of a key (32 bytes), which is what is kept and compared."""
    return hashlib.sha256(key.encode()).digest()
