"""BeamSearchParams: how one request is searched. Names are vLLM's, and transformers' for `early_stopping`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pagemill.arguments import suggest_arguments
from pagemill.errors import SamplingParamsError


@suggest_arguments
@dataclass
class BeamSearchParams:
    """Parameters of one beam search.

    `beam_width` sequences go on side by side, and as many are returned, the best first. A sequence's score is the sum
    of its log probabilities over its length to the power of `length_penalty`, the end-of-sequence token counted: above
    0 longer ones gain. `ignore_eos` makes that token one like others.
    `early_stopping` says when a search with `beam_width` finished sequences ends: True at once; False when the best of
    those that go on has a lower score now than the worst finished one; "never" when it could not get a higher one at
    any length.
    Nothing is drawn, so `temperature` is 0, or 1, which is the model's own distribution as well.
    Raises `SamplingParamsError` for values out of range, `UnknownArgumentError` for unknown names.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise _wrong(name, value, "an integer of at least 1", f"for example {name}=4")
        if isinstance(self.temperature, bool) or self.temperature not in (0, 1):
            raise _wrong("temperature", self.temperature, "0 or 1", "beam search draws nothing: use SamplingParams to")
        penalty = self.length_penalty
        if not isinstance(penalty, (int, float)) or isinstance(penalty, bool) or not math.isfinite(penalty):
            raise _wrong("length_penalty", penalty, "a finite number", "0 compares sums of log probabilities")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False", f"give {name}=True or {name}=False")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _wrong("early_stopping", self.early_stopping, "True, False or 'never'", "leave it out for False")


def _wrong(name: str, value: object, limit: str, way_out: str) -> SamplingParamsError:
    return SamplingParamsError(f"{name} is {value!r:.200}; it must be {limit}; {way_out}", param=name)
