"""TokenLogprobs: log probabilities of one position, as they travel from the engine to the front end. Knows no torch."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log probabilities at one position.

    The first entry is the token that stands there. The other entries, as many as were asked for, are the most likely
    tokens, most likely first and the smaller id first among equals; the first entry's token may be among them again.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry in the vocabulary: 1 + the number of tokens that are more likely."""
