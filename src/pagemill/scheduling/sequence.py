"""Requests and sequences as the scheduler sees them: token ids, a block table, a place in the order of service."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from pagemill.draft_counts import Drafted
from pagemill.memory.block_table import BlockTable
from pagemill.memory.manager import Residency
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.scheduling.drafting import Drafting, NgramTable
from pagemill.tenant_limits import DEFAULT_TENANT

if TYPE_CHECKING:
    from pagemill.scheduling.beam import BeamGroup, Hypothesis
    from pagemill.scheduling.model_drafting import ModelDrafting


LEAST_NORM = 1e-12
"""An embedding that is shorter than this is not made longer than it."""


class Precedence(NamedTuple):
    """The order of service; smaller goes first.

    `due` is the arrival time plus `ageing_s` per step of priority. So requests of one class are served in the order of
    their arrival, and one that has waited `ageing_s` longer is level with a request of the next class: a static key
    that ages without ever being updated, under which nothing starves.
    """

    due: float
    arrival: int
    number: int


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Pinning(NamedTuple):
    """Describes the pin that a request's whole prompt becomes."""

    name: str
    space: Namespace
    expires_s: float | None


@dataclass(slots=True)
class Request:
    """One prompt. `seed` is never None; `sequence_seed` makes those of its `params.n` sequences from it.

    `root` is the digest at the start of its prefix chain: model and adapter, KV format, numerics and namespace.
    `adapter` is the number of its LoRA adapter, 0 for none.
    `max_len` is the most tokens, prompt included, that one of its sequences can reach; one more than the prompt has if
    nothing is sampled, for then the last one needs its place.
    `beam` makes it a search, and `params` what its rows ask of the sampler (`beam.row_params`).
    `answered` are tokens of its one sequence that another engine has brought.
    `is_admitted` says that it may wait, however many do.
    `prepared` is what the executor keeps for its sampling as long as this is held.
    `ngrams` is the prompt's, once one of its sequences drafts.
    `reads_answer` says that its next token depends on the last one otherwise than through the model.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    priority: int
    arrival_s: float
    root: bytes
    max_len: int
    beam: BeamSearchParams | None = None
    pooling: PoolingParams | None = None
    pin: Pinning | None = None
    tenant: str = DEFAULT_TENANT
    in_session: bool = False
    adapter: int = 0
    answered: list[int] = field(default_factory=list)
    is_admitted: bool = False
    prepared: object = None
    ngrams: NgramTable | None = None
    samples: bool = field(init=False)
    """False: it ends when its prompt has been computed."""
    stop_token_ids: frozenset[int] = field(init=False)
    reads_answer: bool = field(init=False)
    ends_at_limit: bool = field(init=False)
    """True: nothing ends its sequences but their limit."""

    def __post_init__(self) -> None:
        self.samples = self.params.max_tokens != 0
        self.stop_token_ids = frozenset(self.params.stop_token_ids)
        self.reads_answer = self.params.reads_answer
        self.ends_at_limit = self.params.ignore_eos and not self.stop_token_ids and not self.params.stop

    @property
    def width(self) -> tuple[str, int]:
        """Returns how many of its sequences or beams run at once, behind the name of the parameter that sets this."""
        return ("n", self.params.n) if self.beam is None else ("beam_width", self.beam.beam_width)


class Branch(NamedTuple):
    """Holds a further path of a sequence's drafts, while the step that verifies it is in flight.

    table: forks off the sequence's at its last token. row: where it runs. drafts: as of a plan. leaves_at: how many of
    them are those of the first path.
    """

    table: BlockTable
    row: int
    drafts: list[int]
    leaves_at: int


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of tokens. Waiting, it holds nothing; running, a row and a block table.

    `scheduled` counts the tokens whose K/V are in the cache once all steps in flight have finished, and `in_flight` the
    tokens that those steps will bring at least: what is left to compute is `len(tokens) + in_flight - scheduled`.
    Nothing can be planned behind a step in flight that leaves it `open_ended`. It may verify drafts: then nobody knows
    how many tokens it will bring, and `scheduled` counts the drafts. Or the next token can only be sampled once the
    step's token has been read (`Request.reads_answer`).
    `prefill_len` counts the tokens that it computes before it generates: all but the last with which it began to run,
    whose query brings the first new one.
    """

    request: Request
    index: int
    precedence: Precedence
    tokens: list[int]
    status: Status = Status.WAITING
    digests: list[bytes] = field(default_factory=list)
    table: BlockTable | None = None
    row: int = -1
    forks: int = field(init=False)
    """How many sequences fork off it when the prompt has been computed; further ones of its request begin alone."""
    child_rows: list[int] = field(default_factory=list)
    """Rows kept for these."""
    scheduled: int = 0
    in_flight: int = 0
    open_ended: bool = False
    prefill_len: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pooled: NDArray[np.float64] | None = None
    """What its request's pooling has of the tokens computed so far: their sum, or the last one's hidden state."""
    scheduled_s: float | None = None
    """When it first entered a step."""
    drafting: Drafting | ModelDrafting | None = None
    """What is known of its drafts, while it runs."""
    branches: list[Branch] = field(default_factory=list)
    """Further paths of its drafts, in the step in flight."""
    group: BeamGroup | None = None
    """The beams among which it is one."""
    residency: Residency | None = None
    """Counts of its blocks by place, kept from when it last let go of them."""
    prompt_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_token_ids)
        self.forks = self.request.params.n - 1 if self.index == 0 else 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Returns how many tokens can be computed now; 0 once the last one it may have is under way."""
        known = len(self.tokens) + self.in_flight
        return known - self.scheduled if known < self.request.max_len and not self.open_ended else 0

    @property
    def generates(self) -> bool:
        """Returns whether its prompt, or what it had before a preemption, has been computed."""
        return self.scheduled >= self.prefill_len

    @property
    def was_preempted(self) -> bool:
        """Returns whether it waits again after having run, or its request has."""
        return self.status is Status.WAITING and self.scheduled_s is not None

    @property
    def has_run(self) -> bool:
        """Returns whether it has run itself, and was preempted."""
        return self.residency is not None

    @property
    def num_rows(self) -> int:
        """Returns how many rows it needs to begin: a search those of all beams, a prompt that is scored those of all
        sequences that fork off it, which would score it again."""
        if self.group is not None:
            return self.group.width
        return 1 + self.forks if self.forks_after_prompt and self.request.params.prompt_logprobs is not None else 1

    @property
    def most_rows(self) -> int:
        """Returns how many rows it can begin with: its own, and those of the sequences that will fork off."""
        return 1 + self.forks if self.forks_after_prompt else self.num_rows

    @property
    def forks_after_prompt(self) -> bool:
        return self.forks > 0 and self.num_output_tokens + self.in_flight == 0

    @property
    def is_late(self) -> bool:
        """Returns whether there was no row for it when its request began, and it has no token yet."""
        return self.index > 0 and self.group is None and self.num_output_tokens == 0

    @property
    def embedding(self) -> NDArray[np.float32] | None:
        """Returns what was pooled, once the prompt has been computed; None if its request asks for nothing."""
        if self.pooled is None or self.request.pooling is None:
            return None
        vector = self.pooled / (self.prompt_len if self.request.pooling.reads_all_tokens else 1)
        if self.request.pooling.normalize:
            vector /= max(float(np.linalg.norm(vector)), LEAST_NORM)
        return vector.astype(np.float32)

    def pool(self, hidden: NDArray[np.float64], start: int) -> None:
        """Takes in what a step has pooled of the tokens from `start` on."""
        assert self.request.pooling is not None
        adds = self.request.pooling.reads_all_tokens and start > 0
        self.pooled = hidden if self.pooled is None or not adds else self.pooled + hidden

    def accept(self, tokens: list[int], eos_token_ids: frozenset[int]) -> tuple[list[int], str | None, int | None]:
        """Appends tokens up to the one that ends it. Returns those appended, and the end as `ending` does."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            reason, stop_reason = self.ending(eos_token_ids)
            if reason is not None:
                return tokens[:count], reason, stop_reason
        return tokens, None, None

    def ending(self, eos_token_ids: frozenset[int]) -> tuple[str | None, int | None]:
        """Returns why its last token ends it ("stop", "length" or None), and which of its own stop tokens that was."""
        request, token = self.request, self.tokens[-1]
        may_end = token in eos_token_ids or token in request.stop_token_ids
        if may_end and self.num_output_tokens >= request.params.min_tokens:
            if token in request.stop_token_ids:
                return "stop", token
            if not request.params.ignore_eos:
                return "stop", None
        return "length" if len(self.tokens) >= request.max_len else None, None

    def behind(self, index: int) -> Sequence:
        """Returns another sequence of its request that begins later, alone: it finds what this one has computed."""
        return Sequence(
            self.request,
            index,
            self.precedence._replace(number=index),
            list(self.request.prompt_token_ids),
            digests=list(self.digests),
            num_cached_tokens=self.num_cached_tokens,
            scheduled_s=self.scheduled_s,
        )

    def ended(self, index: int) -> Sequence:
        """Returns a finished sequence of the same request that holds nothing, to tell the end of one without a row."""
        return Sequence(
            self.request,
            index,
            self.precedence,
            [],
            status=Status.FINISHED,
            num_cached_tokens=self.num_cached_tokens,
            scheduled_s=self.scheduled_s,
        )


class SequenceUpdate(msgspec.Struct, gc=False):
    """Holds what a step brought for one sequence.

    The tokens that it accepted, with their log probabilities if it asked for them, those of the prompt with the first
    token; its end; what came of its drafts, if it had any; or what a beam search has ended with.
    """

    sequence: Sequence
    tokens: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | None = None
    drafted: Drafted | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: Exception | None = None
    hypothesis: Hypothesis | None = None


def by_precedence(sequence: Sequence) -> Precedence:
    """Returns the key of the order of service."""
    return sequence.precedence
