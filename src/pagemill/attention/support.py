"""Support: what an attention backend takes, stated as data, and why it does not take a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

NO_GPU = "it needs an NVIDIA GPU; use device 'cuda'"
HALVES = (torch.float16, torch.bfloat16)
HALF_FORMATS = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """States what a model, its cache and its device ask of attention.

    dtype: of queries. kv_format: the cache's name. heads, kv_heads: of one rank. capability: the GPU's; None on CPU.
    windows: of the layer groups; None: no window. value_dim: of values that are the first numbers of their keys; None:
    values are as wide as keys, and lie beside them. step_tokens: the most of a step; None: any number.
    """

    dtype: torch.dtype
    kv_format: str
    block_size: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    soft_cap: float | None
    capability: tuple[int, int] | None
    value_dim: int | None = None
    step_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Support:
    """States what a backend takes. None: anything.

    unequal_widths: whether values may be narrower than keys.
    windows: whether it slides windows of more than a block over the keys. same_format: whether queries and a cache of
    floats must have one dtype; narrow caches have others.
    """

    dtypes: tuple[torch.dtype, ...] | None = None
    kv_formats: tuple[str, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | range | None = None
    unequal_widths: bool = True
    windows: bool = True
    soft_cap: bool = True
    same_format: bool = False
    least_capability: tuple[int, int] | None = None
    most_capability: tuple[int, int] | None = None

    def refusal(self, needs: AttentionNeeds) -> str | None:
        """Returns why the backend does not take this, with the way out; None if it does."""
        query, capability = str(needs.dtype).removeprefix("torch."), needs.capability
        if self.least_capability is not None:
            least, most = self.least_capability, self.most_capability
            if capability is None:
                return NO_GPU
            if capability < least or (most is not None and capability > most):
                limit = f"{least[0]}.{least[1]}" + ("" if most is None else f" to {most[0]}.{most[1]}")
                return f"it needs compute capability {limit}, and this GPU has {capability[0]}.{capability[1]}"
        if self.dtypes is not None and needs.dtype not in self.dtypes:
            names = _listed(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
            return f"it computes in {names}, not in {query}; set dtype"
        if self.kv_formats is not None and needs.kv_format not in self.kv_formats:
            return f"it reads KV caches in {_listed(self.kv_formats)}, not in {needs.kv_format}; set kv_cache_dtype"
        if self.same_format and needs.kv_format in ("float32", *HALF_FORMATS) and needs.kv_format != query:
            return f"it reads KV caches in the queries' {query}, not in {needs.kv_format}; set kv_cache_dtype 'auto'"
        if self.block_sizes is not None and needs.block_size not in self.block_sizes:
            return f"it takes blocks of {_listed(map(str, self.block_sizes))} tokens, not {needs.block_size}; " + (
                f"set block_size {self.block_sizes[-1]}"
            )
        if self.head_dims is not None and needs.head_dim not in self.head_dims:
            if isinstance(self.head_dims, range):
                sizes = f"multiples of {self.head_dims.step} up to {self.head_dims[-1]}"
            else:
                sizes = _listed(map(str, self.head_dims))
            return f"it takes heads of {sizes} dimensions, not {needs.head_dim}"
        if not self.unequal_widths and needs.value_dim is not None:
            return (
                f"it takes values beside keys, as wide as these, and the model's lie in keys ({needs.value_dim} wide)"
            )
        if not self.windows and any(window is not None for window in needs.windows):
            return "it has no sliding windows, and the model has"
        if not self.soft_cap and needs.soft_cap is not None:
            return "it has no soft cap, and the model has"
        return None


def _listed(names: Iterable[str]) -> str:
    *before, last = names
    return f"{', '.join(before)} or {last}" if before else last
