"""Draws the likeliest next tokens that a simulated model gives a beam: by a seed, the same in every replay."""

from __future__ import annotations

from hashlib import blake2b
from math import log

from pagemill.sampling.params import TokenLogprobs

CONCENTRATION = 0.5
"""Assumed: each likely token takes U ** CONCENTRATION of the probability that is left, where U is uniform."""
LEAST_SHARE = 1e-6


def beam_candidates(seed: int, generated: list[int], width: int) -> TokenLogprobs:
    """Returns `width` tokens, the likeliest first, behind the entry of the token that was sampled.

    They depend on the seed and on the beam's tokens alone. Token ids are small: they stand for ranks.
    """
    state = ",".join(map(str, (seed, *generated)))
    left, found = 1.0, list[float]()
    for rank in range(width):
        drawn = int.from_bytes(blake2b(f"{state}:{rank}".encode(), digest_size=6).digest(), "big") / 2**48
        share = min(max(drawn**CONCENTRATION, LEAST_SHARE), 1 - LEAST_SHARE)
        found.append(log(left * share))
        left *= 1 - share
    found.sort(reverse=True)
    return TokenLogprobs([0, *range(width)], [found[0], *found], 1)
