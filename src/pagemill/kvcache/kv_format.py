"""KVFormat: how keys and values are stored, as data. Everything but layouts and kernels treats it as opaque."""

from __future__ import annotations

from dataclasses import dataclass

SCALE_BYTES = 4
KEY_GROUP = 32
"""Dimensions of a 4-bit key that share a scale; 4-bit vectors are whole groups."""
MOST_NARROW_DIMS = 512
"""Dimensions of the widest head that is stored as integers."""


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """Describes how one head's key or value of a token is stored.

    name: changes when the same vector would be stored as other bits.
    element: torch's name of the type of stored elements; packed: numbers in one of them.
    scaled: True if vectors have words of SCALE_BYTES: an fp32 scale, or a scale and a low in bf16.
    group: numbers that share such a word; None: all of a vector.
    """

    name: str
    element: str
    packed: int = 1
    scaled: bool = False
    group: int | None = None

    def elements(self, dim: int) -> int:
        """Returns how many elements hold a vector of `dim` numbers."""
        return dim // self.packed

    def scales(self, dim: int) -> int:
        """Returns how many words a vector of `dim` numbers has."""
        if not self.scaled:
            return 0
        return 1 if self.group is None else dim // self.group


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Describes the elements of a KV pool, and how many bytes they take. Keys and values may differ, but for the bytes
    of an element.

    name: as settings have it. itemsize: bytes of an element.
    beside: elements that a layout for matrix products stores side by side, where dimensions and tokens allow it.
    precise: so many of the latest tokens have remainders too: what their stored keys and values have left out, stored
        in the same format in blocks of other layer groups. 0: none have.
    """

    name: str
    key: VectorFormat
    value: VectorFormat
    itemsize: int
    beside: int = 1
    precise: int = 0

    @property
    def element(self) -> str:
        """The type that the pool is seen as where keys and values are not told apart."""
        return self.key.element

    def slot_bytes(self, kv_heads: int, key_dim: int, value_dim: int) -> int:
        """Returns the bytes of one token's K and V in one layer, scales included."""
        elements = self.key.elements(key_dim) + self.value.elements(value_dim)
        return kv_heads * (elements * self.itemsize + self.scale_bytes(key_dim, value_dim))

    def scale_bytes(self, key_dim: int, value_dim: int) -> int:
        """Returns the bytes of the scales of one head's key and value."""
        return SCALE_BYTES * (self.key.scales(key_dim) + self.value.scales(value_dim))

    def digest_name(self, block_size: int, layout: str) -> str:
        """Returns what the digests of blocks of this format begin with: equal names mean equal bytes for equal K/V."""
        names = dict.fromkeys((self.key.name, self.value.name))
        remainders = f"+{self.precise}" if self.precise else ""
        return f"{'/'.join(names)}{remainders},{block_size},{layout}"

    def refusal(self, head_dim: int, *, values_in_keys: bool = False) -> str | None:
        """Returns why heads of this size cannot be stored, or None if they can. values_in_keys: as in `FrameShape`."""
        if values_in_keys and self.key.scaled:
            return (
                "its scales fit a key or a value as a whole, and the model's latents lie in one vector with keys of "
                "other sizes"
            )
        if any(each.packed > 1 for each in (self.key, self.value)) and head_dim % KEY_GROUP:
            return f"it holds heads of multiples of {KEY_GROUP} dimensions, and the model's have {head_dim}"
        if self.key.scaled and head_dim > MOST_NARROW_DIMS:
            return f"it holds heads of up to {MOST_NARROW_DIMS} dimensions, and the model's have {head_dim}"
        return None


def _float(element: str, itemsize: int, beside: int = 1, name: str | None = None) -> KVFormat:
    vector = VectorFormat(element, element)
    return KVFormat(name or element, vector, vector, itemsize, beside)


# The numbers count the versions of `attention/quantize.py`.
_INT8 = VectorFormat("int8-1", "int8", scaled=True)
_INT4_KEY = VectorFormat("int4-rotated-32-1", "uint8", packed=2, scaled=True, group=KEY_GROUP)
_INT4_VALUE = VectorFormat("int4-1", "uint8", packed=2, scaled=True)

_FORMATS = (
    _float("float32", 4),
    _float("float16", 2),
    _float("bfloat16", 2, beside=2),
    _float("float8_e4m3fn", 1, name="fp8_e4m3"),
    _float("float8_e5m2", 1, name="fp8_e5m2"),
    KVFormat("int8", _INT8, _INT8, 1, beside=4),
    KVFormat("int8/int4", _INT8, _INT4_VALUE, 1, beside=4),
    KVFormat("int4", _INT4_KEY, _INT4_VALUE, 1, beside=4),
    KVFormat("int4_mixed", _INT4_KEY, _INT4_VALUE, 1, beside=4, precise=128),
)


def kv_format(name: str) -> KVFormat:
    """Returns the format of this name, a torch type's with or without "torch.". "fp8" is vLLM's
    short name of fp8_e4m3. Raises KeyError for others."""
    name = "fp8_e4m3" if name == "fp8" else name.removeprefix("torch.")
    return {format.name: format for format in _FORMATS}[name]
