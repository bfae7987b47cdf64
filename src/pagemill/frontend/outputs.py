"""The outputs that a caller gets: RequestOutput and its parts, under vLLM's names.

`LLM` returns whole outputs. `AsyncLLM` yields several of the same type for each request, see `RequestOutputKind`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.draft_counts import DraftCounts
from pagemill.engine.messages import SequenceInfo
from pagemill.errors import PagemillError


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability (natural logarithm) at one position."""

    logprob: float
    rank: int
    """Place in the vocabulary at this position, 1 is the most likely."""
    decoded_token: str


LogprobsOfPosition = dict[int, Logprob]
"""By token id: first the token that stands at the position, then the most likely ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` sequences."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """The sum over all tokens so far, also in a delta. None unless logprobs or the best of several were asked for."""
    logprobs: list[LogprobsOfPosition] | None = None
    finish_reason: str | None = None
    """`"stop"`, `"length"`, `"abort"` or `"error"`; None while it runs."""
    stop_reason: int | str | None = None
    """The stop token or stop string that ended it; None for the model's own end of sequence."""
    error: PagemillError | None = None
    """Why, when `finish_reason` is `"error"`."""
    kv_blocks: tuple[int, int] | None = None
    """Its KV blocks in the pool, and those that are streamed from a lower tier: at its end, and with each token while
    any are streamed."""

    def finished(self) -> bool:
        """Returns True once no token follows."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """A request that has not ended."""

    request_id: str
    prompt_token_ids: list[int]
    sequences: list[SequenceInfo]
    """The sequences that have not finished. Before the prompt is computed there is one, whatever `n` is."""


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the sequences that a beam search ended with."""

    tokens: list[int]
    """The prompt and what follows it, an end-of-sequence token included."""
    text: str
    """The text of all tokens; without the end-of-sequence token, unless `include_stop_str_in_output`."""
    cum_logprob: float
    """The sum over the tokens behind the prompt. Sequences are ordered by this with the length penalty applied."""
    finish_reason: str | None
    """`"stop"` at an end-of-sequence token, `"length"` at `max_tokens`, or `"error"`."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The result of one prompt's beam search: `beam_width` sequences, the best first."""

    sequences: list[BeamSearchSequence]
    error: PagemillError | None = None
    """Why the search failed; there are no sequences then."""


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request, in seconds of `time.monotonic()`, and its drafts; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    drafts: DraftCounts | None = None
    """Counts the drafts of all its sequences; None if it had none."""

    @property
    def time_in_queue(self) -> float | None:
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. From `AsyncLLM`, what `RequestOutputKind` says of it."""

    request_id: str
    prompt: str | None
    """The text that was given; None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfPosition | None] | None
    """One entry per prompt token, None for the first; only with `SamplingParams.prompt_logprobs`."""
    outputs: list[CompletionOutput]
    """The sequences, in order of `index`. A delta holds only those that have something new."""
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V were found in the prefix cache."""
