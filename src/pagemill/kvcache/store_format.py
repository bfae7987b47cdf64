"""StoreFormat: what all blocks of a disk store have in common, and where the stores of a user lie."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pagemill.hub.registry import cache_dir

VERSION = 1


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

    @property
    def key(self) -> str:
        """Name of the store's folder."""
        fields = asdict(self)
        del fields["model"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:24]

    @property
    def block_size(self) -> int:
        """Tokens of a block, the second field of `kv_format`."""
        return int(self.kv_format.split(",")[1])

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoreFormat:
        return cls(**json.loads(text))
