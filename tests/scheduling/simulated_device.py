"""A device that carries out step plans on symbols: each slot holds a digest of the tokens up to its position.

It checks what a real device cannot: that every slot a query may read holds exactly what was computed for these tokens.
The next token is a function of the sequence's seed and tokens alone, so any fault of memory or scheduling shows.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np

from pagemill.errors import NonFiniteLogitsError
from pagemill.sampling.params import TokenLogprobs
from pagemill.scheduling.step_plan import StepPlan, StepResult

VOCAB = 50


def next_token(seed: int, tokens: list[int]) -> int:
    digest = hashlib.blake2b(repr((seed, tokens)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def likeliest(tokens: list[int], count: int) -> TokenLogprobs:
    """Behind token 0, the likeliest of the next ones, as a function of the tokens alone."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=VOCAB).digest()
    ranked = sorted((byte * VOCAB + token, token) for token, byte in enumerate(digest))[:count]
    return TokenLogprobs([0, *(token for _, token in ranked)], [0.0, *(-value / 1000 for value, _ in ranked)], 1)


def hidden_sum(tokens: list[int], first: int, end: int) -> np.ndarray:
    """The sum of the hidden states from `first` to `end`, each of which is a function of all tokens up to its own."""
    return np.array([float(sum(next_token(9, tokens[: at + 1]) for at in range(first, end)))])


def content(tokens: list[int]) -> bytes:
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest()


class SimulatedDevice:
    def __init__(self, block_size: int, windows: list[int | None]) -> None:
        self.block_size = block_size
        self.windows = windows
        self.frames: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.tables: dict[tuple[int, int, int], int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.seeds: dict[int, int] = {}
        self.logprobs: dict[int, int | None] = {}
        self.computed_tokens = 0
        self.random = random.Random(0)
        self.not_finite: set[int] = set()
        """Rows (persistent) whose logits are not finite."""

    def apply(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self.tokens.pop(row, None)
        for new in plan.new_rows:
            assert new.row not in self.tokens, "a row was given twice"
            self.tokens[new.row] = list(new.token_ids)
            self.seeds[new.row] = new.seed
            self.logprobs[new.row] = new.params.logprobs
        for row, position, token_ids in plan.chosen_tokens:
            self.tokens[row][position:] = token_ids
        work = plan.work
        for source, target in zip(work.copy_source.tolist(), work.copy_target.tolist(), strict=True):
            self.frames[target] = dict(self.frames[source])
        for row, group, index, frame in zip(
            work.edit_row, work.edit_group, work.edit_index, work.edit_frame, strict=True
        ):
            self.tables[int(group), int(row), int(index)] = int(frame)

    def botch(self, plan: StepPlan) -> None:
        """Fails while it carries out a plan: of all that it was to change, nobody may rely on anything."""
        for row in (*plan.freed_rows, *(chosen.row for chosen in plan.chosen_tokens)):
            self.tokens.pop(row, None)
        for target in plan.work.copy_target.tolist():
            self.frames[target] = {}
        for row, group, index in zip(plan.work.edit_row, plan.work.edit_group, plan.work.edit_index, strict=True):
            self.tables[int(group), int(row), int(index)] = -1

    def run(self, plan: StepPlan, faulty: frozenset[int] = frozenset()) -> StepResult:
        """faulty: rows (persistent) whose forward pass fails."""
        result = StepResult()
        for index, row in enumerate(plan.rows.tolist()):
            if row in self.not_finite:
                result.failed[index] = NonFiniteLogitsError.of("logits")
            elif row in faulty:
                result.failed[index] = RuntimeError(f"row {row} failed")
        for at, to in zip(
            plan.sample_from[plan.branches].tolist(), plan.sample_to[plan.branches].tolist(), strict=True
        ):
            self.tokens[int(plan.rows[at])] = self.tokens[to][: int(plan.starts[at]) + 1]
        plan, result.undrafted = self._propose(plan)
        drafts, behind = self._write_drafts(plan)
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), strict=True):
            tokens = self.tokens[row]
            assert start + count <= len(tokens), "a token is computed before it is known"
            for position in range(start, start + count):
                for group in range(len(self.windows)):
                    frame = self.tables[group, row, position // self.block_size]
                    assert frame >= 0
                    self.frames[frame][position % self.block_size] = content(tokens[: position + 1])
            self.computed_tokens += count
        for row, start, count in zip(plan.rows.tolist(), plan.starts.tolist(), plan.query_lens.tolist(), strict=True):
            for position in range(start, start + count):
                self._read(row, position)
        for at, all_tokens in zip(plan.pooled.tolist(), plan.pools_all.tolist(), strict=True):
            start, count = int(plan.starts[at]), int(plan.query_lens[at])
            first = start if all_tokens else start + count - 1
            if at not in result.failed:
                result.pooled[at] = hidden_sum(self.tokens[int(plan.rows[at])], first, start + count)
        own = [i for i, is_branch in enumerate(plan.branches.tolist()) if not is_branch]
        result.tokens, result.logprobs = [[] for _ in drafts], [None] * len(drafts)
        for first, last in pairwise([*own, len(drafts)]):
            at, to, end = int(plan.sample_from[first]), int(plan.sample_to[first]), behind[first]
            tokens, followed, paths = self.tokens[int(plan.rows[at])][:end], first, range(first, last)
            logprobs, count = [], self.logprobs[to]
            while paths:
                followed, depth = paths[0], len(tokens) - end
                logprobs.append(likeliest(tokens, count or 0))
                tokens.append(next_token(self.seeds[to], tokens))
                paths = [path for path in paths if drafts[path][depth : depth + 1] == tokens[-1:]]
            if at not in result.failed:
                result.tokens[followed] = tokens[end:]
                result.logprobs[followed] = None if count is None else logprobs
            self.tokens[to] = tokens
        for at in plan.sample_from[plan.branches].tolist():
            del self.tokens[int(plan.rows[at])]
        result.check(plan)
        return result

    def _propose(self, plan: StepPlan) -> tuple[StepPlan, set[int]]:
        """Proposes the drafts that the plan leaves to the device: what will come, wrong now and then; or none."""
        undrafted, drafts, left = set(), [], plan.draft_tokens.tolist()
        query_lens, max_accepted = plan.query_lens.copy(), plan.max_accepted.copy()
        for sample, (at, to) in enumerate(zip(plan.sample_from.tolist(), plan.sample_to.tolist(), strict=True)):
            count = int(plan.max_accepted[sample]) - 1
            guesses, left = left[:count], left[count:]
            if guesses and guesses[0] < 0:
                tokens = self.tokens[to][: int(plan.starts[at]) + 1]
                for i in range(count):
                    right = self.random.random() < (0.6 if guesses[i] < -1 else 0.8)
                    guesses[i] = next_token(self.seeds[to], tokens) if right else 7
                    tokens.append(guesses[i])
                if self.random.random() < 0.3:
                    undrafted.add(sample)
                    query_lens[at], max_accepted[sample], guesses = query_lens[at] - count, 1, []
            drafts += guesses
        found = np.array(drafts, dtype=np.int32)
        return replace(plan, query_lens=query_lens, max_accepted=max_accepted, draft_tokens=found), undrafted

    def _write_drafts(self, plan: StepPlan) -> tuple[list[list[int]], list[int]]:
        """Puts each row's drafts behind its last token. By sample: the drafts, and where the first of them stands."""
        left, drafts, behind = plan.draft_tokens.tolist(), [], []
        for at, most in zip(plan.sample_from.tolist(), plan.max_accepted.tolist(), strict=True):
            guesses, left = left[: most - 1], left[most - 1 :]
            end = int(plan.starts[at] + plan.query_lens[at]) - len(guesses)
            if guesses:
                self.tokens[int(plan.rows[at])][end:] = guesses
            drafts.append(guesses)
            behind.append(end)
        assert not left
        return drafts, behind

    def _read(self, row: int, position: int) -> None:
        tokens = self.tokens[row]
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, position - window + 1)
            for at in range(first, position + 1):
                frame = self.tables[group, row, at // self.block_size]
                assert self.frames[frame].get(at % self.block_size) == content(tokens[: at + 1]), (
                    f"row {row}, group {group}: position {at} holds something else than what was computed for it"
                )
