"""Draws random numbers from counters: a sequence's draw is a function of its seed and the output position.

Nothing is carried from step to step, so batching, preemption and recomputation cannot change a draw.
The mixing function is SplitMix64's (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns SplitMix64's finalizer, a bijection of 64-bit words, of each element: uint64, as `values`."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns a number in [0, 1), 53 bits fine, for each pair of seed and output position (both [m]).

    The seed is mixed before the position enters, so that neighbouring seeds do not share shifted streams.
    """
    counters = positions.astype(np.uint64) + np.uint64(1)
    words = mix64(mix64(seeds + _GAMMA) + counters * _GAMMA)
    numbers: npt.NDArray[np.float64] = (words >> np.uint64(11)) * 2.0**-53
    return numbers


def sequence_seed(seed: int, index: int) -> int:
    """Returns the seed, in [0, 2**64), of sequence `index` of a request with `seed`. Sequence 0 keeps the request's."""
    word = seed % 2**64
    if index == 0:
        return word
    return int(mix64(mix64(np.array([word], np.uint64)) + np.array([index], np.uint64) * _GAMMA)[0])
