"""KVFormat: how keys and values are stored, as data. Everything but layouts and kernels treats it as opaque."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Describes the elements of a KV pool, and how many bytes they take.

    element: torch's name of their type; itemsize: its bytes.
    name: part of the digests that name blocks; it changes when the same K and V would be stored as other bits.
    scaled: True if each token of each KV head has an fp32 scale for its key and one for its value.
    pairs: True if a layout for matrix products stores neighbouring elements side by side, where their number is even.
    """

    element: str
    itemsize: int
    name: str
    scaled: bool = False
    pairs: bool = False

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one head's key or value."""
        return SCALE_BYTES if self.scaled else 0

    def slot_bytes(self, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Returns the bytes of one token's K and V in one layer, scales included."""
        return kv_heads * ((key_dim + value_dim) * self.itemsize + 2 * self.scale_bytes)

    def digest_name(self, block_size: int, layout: str) -> str:
        """Returns what the digests of blocks of this format begin with: equal names mean equal bytes for equal K/V."""
        return f"{self.name},{block_size},{layout}"


_FORMATS = (
    KVFormat("float32", 4, "float32"),
    KVFormat("float16", 2, "float16"),
    KVFormat("bfloat16", 2, "bfloat16", pairs=True),
    KVFormat("int8", 1, "int8-1", scaled=True),  # the number counts the versions of `quantize`
)


def kv_format(element: str) -> KVFormat:
    """Returns the format of a torch type by its name, with or without "torch.". Raises KeyError for others."""
    return {format.element: format for format in _FORMATS}[element.removeprefix("torch.")]
