"""What a step brought for one sequence."""

from __future__ import annotations

import msgspec

from pagemill.sampling.logprobs import TokenLogprobs
from pagemill.scheduling.beam import Hypothesis
from pagemill.scheduling.sequence import Sequence


class Update(msgspec.Struct, gc=False):
    """News of one sequence: a token, its end, or both; or what a beam search has ended with."""

    sequence: Sequence
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: str | None
    stop_reason: int | None = None
    error: Exception | None = None
    hypothesis: Hypothesis | None = None
