"""StoreFormat: what all blocks of a disk store have in common, and where the stores of a user lie."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from pagemill.hub.registry import cache_dir

VERSION = 1
_PATTERNS = {
    "fingerprint": "([0-9a-f]{2})+",
    "kv_format": "[^,]+,[1-9][0-9]{0,5}(,.*)?",
    "record_bytes": "[1-9][0-9]{0,9}",
}


def default_root() -> Path:
    """The folder of this user's stores, unless another is asked for."""
    return cache_dir() / "kv"


@dataclass(frozen=True, slots=True)
class StoreFormat:
    """What all blocks of a store have in common. Every field but `model`, which is for people, keeps stores apart.

    fingerprint: of the model's weights and configuration, hexadecimal; kv_format: dtype, block size and layout;
    numerics: names of the kernels; record_bytes: K and V of one block of one layer group.
    """

    model: str
    fingerprint: str
    kv_format: str
    numerics: str
    record_bytes: int
    version: int = VERSION

    def __str__(self) -> str:
        model = f"{self.model} (weights {self.fingerprint[:8]}…)"
        return f"{model} in {self.kv_format} by {self.numerics}, {self.record_bytes:,} bytes each"

    @property
    def key(self) -> str:
        """Name of the store's folder."""
        apart = asdict(self)
        del apart["model"]
        return hashlib.sha256(json.dumps(apart, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def block_size(self) -> int:
        """Tokens of a block, the second field of `kv_format`."""
        return int(self.kv_format.split(",")[1])

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoreFormat:
        """Raises ValueError for what is no format, or is one of another version."""
        values = json.loads(text)
        types = {field.name: field.type for field in fields(cls)}
        if not isinstance(values, dict) or {name: type(value).__name__ for name, value in values.items()} != types:
            raise ValueError(f"a format has these fields and no others: {types}")
        format = cls(**values)
        if format.version != VERSION:
            raise ValueError(f"its version is {format.version}, and this pagemill knows {VERSION}")
        for name, pattern in _PATTERNS.items():
            if not re.fullmatch(pattern, str(values[name])):
                raise ValueError(f"its {name} is {values[name]!r}")
        return format
