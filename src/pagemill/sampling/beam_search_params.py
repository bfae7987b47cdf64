"""BeamSearchParams: how one request is searched. Names are vLLM's, and transformers' for `early_stopping`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from pagemill.arguments import Count, about, check_fields, suggest_arguments
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

    beam_width: Annotated[Count, about("Sequences that go on side by side.", "for example beam_width=4")]
    max_tokens: Annotated[Count, about("Longest answer in tokens.", "for example max_tokens=16")]
    ignore_eos: Annotated[bool, about("Go on behind the end-of-sequence token.", "give True or False")] = False
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about("0 or 1: nothing is drawn.", "beam search draws nothing: use SamplingParams to"),
    ] = 0.0
    length_penalty: Annotated[
        float, about("Above 0 prefers longer answers.", "0 compares sums of log probabilities")
    ] = 1.0
    include_stop_str_in_output: Annotated[
        bool, about("Keep the end-of-sequence token in the answer.", "give True or False")
    ] = False
    early_stopping: Annotated[bool | Literal["never"], about("When a search ends.", "leave it out for False")] = False

    def __post_init__(self) -> None:
        check_fields(self, SamplingParamsError)
        if self.temperature not in (0, 1):
            raise SamplingParamsError(
                f"temperature is {self.temperature}; it must be 0 or 1; beam search draws nothing: use SamplingParams "
                f"to",
                param="temperature",
            )
