"""Tiles of attention to latents on NVIDIA GPUs; `TritonAttention` starts its kernel."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from pagemill.attention.triton_walks import most_chunks_of

CHUNK, LONGEST_CHUNK, CHUNKS = 512, 8192, 32
"""As in `triton_backend.py`. Chunks are longer here: their results are of all heads, over few bytes of keys."""
SHORT_TOKENS = 4
"""Rows of at most so many tokens are attended in chunks, if a tile holds them with all heads."""
LEAST_HOPPER_DIMS, HOPPER_QUERIES = 64, 64
"""Triton 3.6 and 3.7 compute wrong products on Hopper where tiles in shared memory have rows of 64 bytes: of fewer
dimensions than these. But only so many queries are multiplied by Hopper's instructions."""


@dataclass(frozen=True, slots=True)
class LatentTile:
    """Says how the kernel is cut: queries (of all heads) and keys at a time, dimensions of scores and of values,
    warps, and stages of loads under way."""

    queries: int
    keys: int
    piece: int
    values: int
    warps: int
    stages: int

    def heads(self, heads: int) -> int:
        """Returns how many heads of a token a tile has."""
        return min(heads, self.queries)

    def tokens(self, heads: int) -> int:
        """Returns how many tokens of a row a tile has."""
        return self.queries // self.heads(heads)

    def programs(self, heads: int, rank: int) -> int:
        """Returns how many programs share the heads and the values of a tile of tokens."""
        return -(-heads // self.heads(heads)) * (padded(rank) // self.values)

    def short(self, heads: int) -> int:
        """Returns how many tokens a row has at most that is attended in chunks."""
        return max(1, min(SHORT_TOKENS, self.tokens(heads)))


def padded(dims: int, least: int = 16) -> int:
    """Returns the power of 2 from these dimensions on, and `least` at least. Matrix products add 16 or more."""
    return max(least, int(triton.next_power_of_2(dims)))


def most_latent_chunks(max_context: int) -> int:
    """Returns how many chunks a row may have at most, as the kernel cuts contexts of up to `max_context` keys."""
    return most_chunks_of(max_context, CHUNK, LONGEST_CHUNK, CHUNKS)


def latent_tiles(
    heads: int, rank: int, rope: int, major: int, *, matrix_units: bool, widened: bool
) -> tuple[LatentTile, LatentTile]:
    """Returns the tiles of rows in chunks and of longer ones, for a model and a GPU. Both have as many queries.

    major: of the GPU's compute capability. matrix_units: it has them for the products' dtype, and Triton takes them.
    widened: the cache is narrower than the products.
    """
    dims = padded(rank)
    if not matrix_units:
        return (LatentTile(16, 16, min(32, dims), min(64, dims), 8, 1),) * 2
    if heads <= 16:
        return (LatentTile(16, 32, dims, dims, 8, 2),) * 2
    if major != 9 or widened or min(dims, padded(rope)) < LEAST_HOPPER_DIMS:
        return (LatentTile(32, 32, dims, dims, 8, 2),) * 2
    return LatentTile(HOPPER_QUERIES, 32, dims, dims, 8, 2), LatentTile(HOPPER_QUERIES, 16, dims, dims, 8, 3)
