"""The step plan: all that the runner must know to carry out one step, in plain arrays; and the result that comes back.

A row is a place in the persistent batch: state that stays on the device between steps and is edited, never rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pagemill.memory.work import MemoryWork
from pagemill.sampling.params import SamplingParams, TokenLogprobs


class ChosenTokens(NamedTuple):
    """Tokens from this position on that a row goes on with, instead of what was sampled: beam search chose them."""

    row: int
    position: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence enters the persistent batch."""

    row: int
    token_ids: list[int]
    """Prompt and, after a preemption, the tokens generated so far."""
    prompt_len: int
    params: SamplingParams
    seed: int
    """The sequence's own seed, 64 bits, never None."""
    adapter: int = 0
    """The number of its adapter; 0 for none."""
    root: bytes = b""
    """Where its namespace's chains begin."""


@dataclass(slots=True)
class StepPlan:
    """One step. Arrays are of the step's rows unless said otherwise.

    rows        int32 [n]  persistent rows that run, each once
    generates   bool  [n]  whether the row computes what its last step brought; else it computes a prompt
    starts      int32 [n]  position of the first query token (tokens already in the KV cache)
    query_lens  int32 [n]  query tokens of each row, at least 1
    sample_from int32 [m]  index into `rows`: whose last query token's logits are sampled, and those before its drafts
    sample_to   int32 [m]  persistent row that gets the sampled tokens (not rows[sample_from] for a forked child, or a
                           branch)
    max_accepted int32 [m] how many tokens the sample may accept: 1, and 1 for each of its drafts
    branches    bool  [m]  whether the sample is of a further path of the drafts of the last sample before it that is
                           of none; of these together, one has tokens
    draft_tokens int32 [d] the drafts of all samples, one after the other: a row's last query tokens, if it has any;
                           -1 for each that the device shall propose, -2 for the second likeliest token, and so on
    prompt_logprobs int32 [k]  indices into `rows` whose every query token needs log probabilities
    pooled      int32 [p]  indices into `rows` whose hidden states are wanted: of each a vector
    pools_all   bool  [p]  whether that is the sum over all query tokens; else it is the last one's
    forks       whether several samples may be of one row; if not, `sample_from` rises
    branched    whether any of `branches` may be true
    catch_up    the most tokens that the draft model takes in of those that it has not yet

    Edits (`new_rows`, `freed_rows`, `chosen_tokens`, `work`) are applied once, in the order freed, new, chosen, work;
    the rest may be run in parts.
    """

    step: int
    work: MemoryWork
    rows: NDArray[np.int32]
    starts: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    generates: NDArray[np.bool_]
    sample_from: NDArray[np.int32]
    sample_to: NDArray[np.int32]
    max_accepted: NDArray[np.int32]
    branches: NDArray[np.bool_]
    prompt_logprobs: NDArray[np.int32]
    new_rows: list[NewRow] = field(default_factory=list)
    freed_rows: list[int] = field(default_factory=list)
    chosen_tokens: list[ChosenTokens] = field(default_factory=list)
    draft_tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    pooled: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    pools_all: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    forks: bool = False
    branched: bool = False
    catch_up: int = 0

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())

    @property
    def num_generating(self) -> int:
        """Returns how many query tokens belong to rows that generate, drafts included."""
        return int(self.query_lens[self.generates].sum())

    def select(self, begin: int, end: int) -> StepPlan:
        """Returns the part of this step that runs rows[begin:end], without edits, which have been applied by then.

        A branch whose sample is in another part runs in vain.
        """
        samples = (self.sample_from >= begin) & (self.sample_from < end)
        logprobs = (self.prompt_logprobs >= begin) & (self.prompt_logprobs < end)
        pooled = (self.pooled >= begin) & (self.pooled < end)
        return replace(
            self,
            rows=self.rows[begin:end],
            starts=self.starts[begin:end],
            query_lens=self.query_lens[begin:end],
            generates=self.generates[begin:end],
            sample_from=self.sample_from[samples] - begin,
            sample_to=self.sample_to[samples],
            max_accepted=self.max_accepted[samples],
            branches=self.branches[samples],
            draft_tokens=self.draft_tokens[np.repeat(samples, self.max_accepted - 1)],
            prompt_logprobs=self.prompt_logprobs[logprobs] - begin,
            pooled=self.pooled[pooled] - begin,
            pools_all=self.pools_all[pooled],
            work=MemoryWork.none(),
            new_rows=[],
            freed_rows=[],
            chosen_tokens=[],
        )

    def in_order(self, order: NDArray[np.int32]) -> tuple[StepPlan, NDArray[np.int64]]:
        """Returns this step with its rows in another order, without what is asked of prompts and of drafts; and, of its
        samples, which follow the rows, the numbers that they have here.

        order: int32 [n], indices into `rows`.
        """
        places = np.argsort(order)[self.sample_from].astype(np.int32)
        samples = np.argsort(places, kind="stable")
        ordered = replace(
            self,
            rows=self.rows[order],
            starts=self.starts[order],
            query_lens=self.query_lens[order],
            generates=self.generates[order],
            sample_from=places[samples],
            sample_to=self.sample_to[samples],
            max_accepted=self.max_accepted[samples],
            branches=self.branches[samples],
        )
        return ordered, samples


class DraftWork(NamedTuple):
    """Counts what a draft model did for a plan, or a part of one.

    passes: those that brought a draft for each of their rows and took in hardly more; rows, seconds: of all of them.
    caught_up, catch_up_s: tokens that it took in before it could draft, and the seconds of that.
    withdrawn: drafts that were planned, and not proposed.
    branched, gained: tokens that branches computed, and those that they brought, as the scheduler adds them up.
    """

    passes: int = 0
    rows: int = 0
    seconds: float = 0.0
    caught_up: int = 0
    catch_up_s: float = 0.0
    withdrawn: int = 0
    branched: int = 0
    gained: int = 0

    def join(self, other: DraftWork) -> DraftWork:
        return DraftWork(
            self.passes + other.passes,
            self.rows + other.rows,
            self.seconds + other.seconds,
            self.caught_up + other.caught_up,
            self.catch_up_s + other.catch_up_s,
            self.withdrawn + other.withdrawn,
            self.branched + other.branched,
            self.gained + other.gained,
        )


NO_WORK = DraftWork()


@dataclass(slots=True)
class StepResult:
    """Holds what a plan, or a part of one, brought. Indices are those of the plan that was run.

    tokens: by sample, the accepted tokens in order; at least one, at most the plan's `max_accepted`; none where the row
        failed, or another path of its drafts was followed. All but the last are drafts, whose K/V are in the cache.
    logprobs: by sample, one entry for each accepted token; None where the row did not ask for any.
    failed: by row, what went wrong with that row alone.
    prompt_logprobs: by row, for each query token that another prompt token follows, log probabilities of that token.
    pooled: by row, the vector that the plan asks for, [hidden].
    undrafted: samples for which the draft model has proposed nothing, so that they brought one token.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[TokenLogprobs] | None] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    pooled: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    undrafted: set[int] = field(default_factory=set)
    draft_work: DraftWork = NO_WORK

    @classmethod
    def failure(cls, plan: StepPlan, error: Exception) -> StepResult:
        """Returns a result in which every row of the plan failed with this error."""
        samples = len(plan.sample_from)
        return cls([[] for _ in range(samples)], [None] * samples, dict.fromkeys(range(len(plan.rows)), error))

    def check(self, plan: StepPlan) -> None:
        """Raises ValueError unless there is a result for each of the plan's samples, with as many tokens as it may
        accept and as many log probabilities as tokens."""
        limits = plan.max_accepted.tolist()
        samples = [*zip(plan.sample_from.tolist(), limits, self.tokens, self.logprobs, strict=True)]
        followed = self._followed(plan)
        for sample, (row, limit, tokens, logprobs) in enumerate(samples):
            least, most = (1, limit) if sample in followed and row not in self.failed else (0, 0)
            if not least <= len(tokens) <= most or (logprobs is not None and len(logprobs) != len(tokens)):
                raise ValueError(
                    f"the device accepted {len(tokens)} tokens with {0 if logprobs is None else len(logprobs)} log "
                    f"probabilities in row {plan.rows[row]}, which may accept {least} to {most}"
                )

    def _followed(self, plan: StepPlan) -> set[int]:
        """Returns the samples that are to have tokens: each that is no branch, or in its place the branch that has
        some."""
        if not plan.branched:
            return {*range(len(self.tokens))}
        found: list[int] = []
        failed = False
        for sample, is_branch in enumerate(plan.branches.tolist()):
            if not is_branch:
                found.append(sample)
                failed = int(plan.sample_from[sample]) in self.failed
            elif self.tokens[sample] and found and not self.tokens[found[-1]] and not failed:
                found[-1] = sample
        return set(found)

    def join(self, other: StepResult, rows: int) -> StepResult:
        """Returns the result of a plan whose first `rows` rows brought this and whose others brought `other`."""
        return StepResult(
            self.tokens + other.tokens,
            self.logprobs + other.logprobs,
            self.failed | {rows + row: error for row, error in other.failed.items()},
            self.prompt_logprobs | {rows + row: found for row, found in other.prompt_logprobs.items()},
            self.pooled | {rows + row: vector for row, vector in other.pooled.items()},
            self.undrafted | {len(self.tokens) + sample for sample in other.undrafted},
            self.draft_work.join(other.draft_work),
        )
