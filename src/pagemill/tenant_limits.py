"""Declares what a tenant may have: limits in settings, in a tenants file, or given at run time.

A tenants file is JSON:

    {"admin_keys": ["sha256:…"],
     "tenants": {"acme": {"api_keys": ["sk-…", "sha256:…"], "guaranteed_blocks": "25%", "max_running": 8}}}

A key is given as it is, or as the SHA-256 of its UTF-8 bytes, in hexadecimal. What the file does not say of a tenant is
as `safe_defaults` says; null is no limit.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from pagemill.arguments import Count, Positive, about, check_fields, suggest_arguments
from pagemill.errors import ConfigError, shown

DEFAULT_TENANT = "default"
MAX_NAME = 128
"""Characters of a tenant's name."""

_KEY = re.compile(r"[!-~]+")
"""What a client can send in a header."""

_SHARE = r"^(100(\.0*)?|\d{1,2}(\.\d*)?)%$"
PoolShare = Annotated[str, Meta(pattern=_SHARE, title="a share of the pool from '0%' to '100%'")]
RowShare = Annotated[str, Meta(pattern=_SHARE, title="a share of max_num_seqs from '0%' to '100%'")]
SessionShare = Annotated[str, Meta(pattern=_SHARE, title="a share of the engine's max_sessions from '0%' to '100%'")]
PinShare = Annotated[
    str, Meta(pattern=_SHARE, title="a share of what may be pinned (max_pinned_share) from '0%' to '100%'")
]
Blocks = Annotated[int, Meta(ge=1)] | PoolShare
"""A number of KV blocks, or a share of the pool such as "25%"."""
Most = Annotated[int, Meta(ge=0)]
Weight = Annotated[float, Meta(ge=1e-6, le=1e6, title="a number from 0.000001 to 1000000")]
"""Bounded, so that tokens times and over weights stay numbers that can be compared."""

SAFE_MAX_RUNNING = "75%"
SAFE_MAX_WAITING = 1000
SAFE_GUARANTEED_PERCENT = 50
"""The part of what no tenant of a file is guaranteed by name that its other tenants are guaranteed together."""


@suggest_arguments
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
    max_pinned_blocks: Annotated[
        Most | PinShare | None, about("The most blocks that its pins may hold; it may have no more pins than that.")
    ] = None
    max_running: Annotated[Count | RowShare | None, about("Sequences that run at once, at least one.")] = None
    max_waiting: Annotated[
        Most | None,
        about(
            "Sequences that wait; a request beyond is refused (HTTP 429). Those that can begin in the next step are "
            "not counted; with 0, every request is refused."
        ),
    ] = None
    max_sessions: Annotated[
        Most | SessionShare | None, about("Sessions that are kept; one more is refused. A share is at least one.")
    ] = None
    requests_per_minute: Annotated[
        Count | None,
        about("Requests in a minute; one more is refused (HTTP 429). Each prompt or input counts as one."),
    ] = None
    tokens_per_minute: Annotated[
        Count | None,
        about(
            "Tokens of prompts and answers in a minute; while none is left, requests are refused (HTTP 429). An "
            "answer's tokens count at its end."
        ),
    ] = None
    weight: Annotated[Weight, about("Its share of the service when several tenants wait.")] = 1.0

    def __post_init__(self) -> None:
        try:
            check_fields(self, ConfigError)
        except ConfigError as error:
            raise ConfigError(error.message, param="tenants") from None

    def number(self, name: str, whole: int, least: int = 0) -> int | None:
        """Returns one of the limits as a number; a share of `whole` is rounded down, to `least` or more."""
        value: int | str | None = getattr(self, name)
        return max(int(_percent(value) / 100 * whole), least) if isinstance(value, str) else value

    @classmethod
    def read(cls, tenant: str, values: Any, defaults: Mapping[str, Any] | None = None) -> TenantLimits:
        """Reads a tenant's limits from a dict, as files and HTTP bodies have it. Raises ConfigError, which names it.

        defaults: instead of none; see `safe_defaults`.
        """
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
                near = difflib.get_close_matches(str(name), [*known, "api_keys"], n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known limits: {', '.join(known)}"
                raise ConfigError(f"tenant {tenant!r} has no limit {name!r}; {hint}", param="tenants")
        try:
            return cls(**_with_defaults(values, defaults or {}))
        except ConfigError as error:
            raise ConfigError(f"tenant {tenant!r}: {error.message}", param="tenants") from None


def safe_defaults(tenants: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the limits of a file's tenants of which it says nothing: with them, none can shut out the others.

    Rows come back with time, so one tenant may use most of them. Sessions and pins do not, so each tenant has an equal
    part of them, "default" included, which admins are. Guaranteed are equal parts of half of what is guaranteed to none
    by name, so that the other half, and whatever is unused, can be borrowed. A guarantee in blocks has no such rest.

    tenants: limits by tenant, as the file has them.
    """
    named = [values["guaranteed_blocks"] for values in tenants.values() if "guaranteed_blocks" in values]
    can_share = all(isinstance(value, str) or value == 0 for value in named)
    rest = 100 - sum(_percent(value) for value in named if isinstance(value, str)) if can_share else 0
    guaranteed = rest * SAFE_GUARANTEED_PERCENT / 100 / max(len(tenants) - len(named), 1)
    part = _share(100 / len({DEFAULT_TENANT, *tenants}))
    return {
        "guaranteed_blocks": _share(guaranteed),
        "max_pinned_blocks": part,
        "max_running": SAFE_MAX_RUNNING,
        "max_waiting": SAFE_MAX_WAITING,
        "max_sessions": part,
    }


def _with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns limits with defaults beside them; the default guarantee is never over a quota."""
    whole = {**defaults, **values}
    quota = whole.get("max_blocks")
    if "guaranteed_blocks" in defaults and "guaranteed_blocks" not in values and quota is not None:
        is_share = isinstance(quota, str) and quota.endswith("%") and quota[:-1].replace(".", "", 1).isdecimal()
        whole["guaranteed_blocks"] = min(defaults["guaranteed_blocks"], quota, key=_percent) if is_share else 0
    return whole


def _percent(share: str) -> float:
    return float(share[:-1])


def _share(percent: float) -> str:
    """Returns a share as limits have it, rounded down to hundredths of a percent."""
    return f"{math.floor(max(percent, 0) * 100) / 100:g}%"


def read_limits(tenants: Any, defaults: Mapping[str, Any] | None = None) -> dict[str, TenantLimits]:
    """Reads limits by the tenant's name, see `TenantLimits.read`. Raises ConfigError."""
    if not isinstance(tenants, dict):
        raise ConfigError(f"tenants is {shown(tenants)}; it must be a dict of limits by tenant", param="tenants")
    return {name: TenantLimits.read(name, limits, defaults) for name, limits in tenants.items()}


class TenantsFile(NamedTuple):
    """A tenants file that was read.

    path: where it lies. limits: by tenant. keys: the tenant by the SHA-256 of each of its keys. admin_keys: SHA-256 of
    keys that may change limits. defaults: limits where none are given, here and when they are changed.
    """

    path: Path
    limits: dict[str, TenantLimits]
    keys: dict[bytes, str]
    admin_keys: list[bytes]
    defaults: Mapping[str, Any] = {}

    def defaults_of(self, tenant: str) -> Mapping[str, Any]:
        """Returns the limits of a tenant where none are given. One that the file does not name is guaranteed nothing:
        the file's tenants have all that is guaranteed by default."""
        if tenant in self.limits:
            return self.defaults
        return {name: limit for name, limit in self.defaults.items() if name != "guaranteed_blocks"}


def read_tenants_file(path: str | os.PathLike[str]) -> TenantsFile:
    """Reads a tenants file. Raises ConfigError, which names the file."""
    try:
        place = Path(os.path.expanduser(path))
        return _read_tenants(place, json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        why = error.message if isinstance(error, ConfigError) else str(error)
        raise ConfigError(f"tenants file {os.fspath(path)!r}: {why}", param="tenants") from error


def _read_tenants(path: Path, content: Any) -> TenantsFile:
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
    read_limits(limits)  # so that the defaults are made of valid limits
    defaults = safe_defaults(limits)
    admin_keys = key_digests("admin_keys", content.get("admin_keys", []))
    for key in admin_keys:
        if key in keys:
            raise ConfigError(f"admin_keys and tenant {keys[key]!r} have the same key; give each its own")
    return TenantsFile(path, read_limits(limits, defaults), keys, admin_keys, defaults)


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
