"""Log probabilities at one position, as they travel from the sampler to the front end."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True):
    """The first entry is the token that stands at the position; the rest are the most likely ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry in the vocabulary; 1 is the most likely."""
