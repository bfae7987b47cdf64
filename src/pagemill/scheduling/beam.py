"""Beam search: which of a request's sequences go on after a step, and what the search ends with.

The rules are those of transformers' `generate(num_beams=…, do_sample=False)`. `BeamSearch` knows them, and nothing of
memory; `BeamGroup` knows the sequences that search together, and what is to be done with them.
"""

from __future__ import annotations

import collections.abc as abc
from itertools import count
from typing import NamedTuple

from pagemill.memory.manager import MemoryManager
from pagemill.sampling.params import BeamSearchParams, SamplingParams, TokenLogprobs
from pagemill.scheduling.sequence import Request, Sequence


class Hypothesis(NamedTuple):
    """A sequence that a search may end with."""

    token_ids: list[int]
    """Without the prompt; an end-of-sequence token that ended it comes last."""
    cum_logprob: float
    score: float
    finish_reason: str


class Choice(NamedTuple):
    """The beam of this index goes on with this token."""

    beam: int
    token: int


class BeamSearch:
    """Knows the rules. Beams are numbered as `advance` has chosen them; there is one at first, the bare prompt.

    hypotheses: the best finished sequences, at most `beam_width`, the best first.
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int) -> None:
        self.hypotheses: list[Hypothesis] = []
        self._params = params
        self._eos = frozenset[int]() if params.ignore_eos else eos_token_ids
        self._max_tokens = max_tokens
        self._cum_logprobs = [0.0]

    def advance(self, generated: abc.Sequence[list[int]], candidates: abc.Sequence[TokenLogprobs]) -> list[Choice]:
        """Returns the beams that go on, the best first; none when the search is over.

        generated: each beam's tokens so far. candidates: each beam's likeliest next tokens (as many as `row_params`
        asks for, behind the entry of the token that was sampled).
        """
        width, length = self._params.beam_width, len(generated[0]) + 1
        merged = sorted(
            (-(cum_logprob + logprob), beam, token)
            for beam, (cum_logprob, entry) in enumerate(zip(self._cum_logprobs, candidates, strict=True))
            for token, logprob in zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
        )
        chosen: list[Choice] = []
        cum_logprobs: list[float] = []
        for place, (negated, beam, token) in enumerate(merged):
            ends = token in self._eos
            if ends or length == self._max_tokens:
                if place < width:  # others are only spare, so that enough beams go on
                    self._finish([*generated[beam], token], -negated, "stop" if ends else "length")
            elif len(chosen) < width:
                chosen.append(Choice(beam, token))
                cum_logprobs.append(-negated)
        self._cum_logprobs = cum_logprobs
        return [] if self._is_over(length) else chosen

    def _finish(self, token_ids: list[int], cum_logprob: float, reason: str) -> None:
        score = self._score(cum_logprob, len(token_ids))
        self.hypotheses.append(Hypothesis(token_ids, cum_logprob, score, reason))
        self.hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self.hypotheses[self._params.beam_width :]

    def _is_over(self, length: int) -> bool:
        if not self._cum_logprobs:
            return True
        if len(self.hypotheses) < self._params.beam_width:
            return False
        stopping = self._params.early_stopping
        if stopping is True:
            return True
        longest = self._max_tokens if stopping == "never" and self._params.length_penalty > 0 else length
        return self._score(self._cum_logprobs[0], longest) <= self.hypotheses[-1].score

    def _score(self, cum_logprob: float, length: int) -> float:
        return float(cum_logprob / length**self._params.length_penalty)


class BeamGroup:
    """The sequences of one request that search together, in the order of `BeamSearch`'s beams.

    Preempted, it is one sequence: what all have in common. Computed again, that one is forked into what they were.
    """

    def __init__(self, sequence: Sequence, eos_token_ids: frozenset[int]) -> None:
        request = sequence.request
        assert request.beam is not None
        self.width = request.beam.beam_width
        self.beams = [sequence]
        self.parked: list[list[int]] = []
        """While preempted: the tokens of each beam, of which `beams[0]` computes the common beginning."""

        self._search = BeamSearch(request.beam, eos_token_ids, request.max_len - sequence.prompt_len)
        self._candidates: dict[Sequence, TokenLogprobs] = {}
        self._numbers = count(1)

    def advance(self, sequence: Sequence, candidates: TokenLogprobs) -> list[tuple[Sequence, int]] | None:
        """Takes in one beam's likeliest next tokens. Returns None while those of other beams are to come.

        Then returns each sequence that goes on, with its next token: a sequence stands there as often as it forks, and
        the list is empty when the search is over.
        """
        self._candidates[sequence] = candidates
        if len(self._candidates) < len(self.beams):
            return None
        generated = [beam.tokens[beam.prompt_len :] for beam in self.beams]
        chosen = self._search.advance(generated, [self._candidates[beam] for beam in self.beams])
        self._candidates.clear()
        return [(self.beams[beam], token) for beam, token in chosen]

    def results(self) -> list[tuple[Sequence, Hypothesis]]:
        """Returns what the search ended with, each as a sequence of its own."""
        return list(zip(self.ended(), self._search.hypotheses, strict=True))

    def ended(self) -> list[Sequence]:
        """Returns finished sequences for all that the request's owner waits for: as many as the group is wide."""
        return [self.beams[0].ended(index) for index in range(self.width)]

    def next_number(self) -> int:
        """Returns an index that none of its sequences has had."""
        return next(self._numbers)

    def park(self, block_size: int) -> list[Sequence]:
        """Prepares a preemption: the first beam becomes the common beginning of all. Returns the others, which end."""
        self._candidates.clear()
        first, *others = self.beams
        if others:
            self.parked = [beam.tokens for beam in self.beams]
            common = next(i for i, column in enumerate(zip(*self.parked, strict=True)) if len(set(column)) > 1)
            first.tokens = first.tokens[:common]
            del first.digests[common // block_size :]
            self.beams = [first]
        return others

    def unpark(self) -> list[list[int]]:
        """Returns the tokens of each beam, since their common beginning has been computed again."""
        parked, self.parked = self.parked, []
        return parked

    def blocks_to_unpark(self, block_size: int) -> int:
        """Returns how many blocks of one layer group the preempted beams need beyond their common beginning."""
        common = len(self.beams[0].tokens) // block_size
        return sum(-(-len(tokens) // block_size) - common for tokens in self.parked[1:])


def row_params(params: BeamSearchParams, num_eos_tokens: int) -> SamplingParams:
    """Returns what the rows of a search ask of the sampler: at each position, as many likely tokens as can matter.

    At most `beam_width` of them go on, and none of the end-of-sequence tokens before them does.
    """
    rows = SamplingParams(temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, detokenize=False)
    rows.logprobs = params.beam_width + (0 if params.ignore_eos else num_eos_tokens)
    return rows


def blocks_needed(memory: MemoryManager, request: Request, chunk: int, pinned: int) -> int:
    """Returns the most frames that a request may hold before others need to wait.

    In a search, every beam has its own blocks, but for the whole ones of the prompt, which it never computes, and
    shares where no window leaves them behind. What beams share is not streamed. pinned: the prompt's leading entries
    that pins hold.
    """
    if request.beam is None:
        return memory.footprint.frames(request.max_len - 1, chunk, pinned)
    prompt_len = len(request.prompt_token_ids)
    alone = memory.footprint.blocks(request.max_len - 1, chunk)
    beam = memory.footprint.blocks(request.max_len - 1, min(chunk, request.max_len - prompt_len))
    shared = prompt_len // memory.block_size * memory.windows.count(None)
    return alone + (request.beam.beam_width - 1) * (beam - shared)
