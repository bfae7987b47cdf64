"""Drafts what other requests of the same namespace have answered, beside what a sequence has itself.

A sequence's drafts, and the chances that they are given, depend on its own namespace's texts alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from pagemill.scheduling.answer_cache import ANCHOR, DEPTH, AnswerCache
from pagemill.scheduling.drafting import Chances, Drafting, Match, NgramTable, first_chances
from pagemill.scheduling.sequence import Sequence
from pagemill.scheduling.speculation import NgramDrafter
from pagemill.speculative_config import SpeculativeConfig


class AnswerMatch(Match):
    """A place in another request's answer, where a sequence's last `length` tokens stood."""

    __slots__ = ()


class SuffixDrafting(Drafting):
    """Drafts for one sequence from its own tokens or from its namespace's answers, whichever is likelier right."""

    def __init__(self, prompt_len: int, lengths: range, prompt: NgramTable, cache: AnswerCache, root: bytes) -> None:
        answers = cache.of(root)
        super().__init__(prompt_len, lengths, prompt, answers.own_chances)
        self._cache, self._root = cache, root
        self._answer_chances = Chances(answers.chances)
        self._place, self._placed = -1, 0

    def match(self, tokens: Tokens[int]) -> Match | None:
        follows = self._place + len(tokens) - self._placed if self._place >= 0 else -1
        length, self._place = self._cache.of(self._root).find(tokens, follows)
        self._placed = len(tokens)
        own = super().match(tokens)
        if not length:
            return own
        found = AnswerMatch(length, self._place)
        return own if own is not None and self.chance(own) > self.chance(found) else found

    def draft(self, tokens: Tokens[int], match: Match, count: int) -> list[int]:
        if not isinstance(match, AnswerMatch):
            return super().draft(tokens, match, count)
        self._note(match, count)
        return self._cache.of(self._root).following(match.position, count)

    def _chances_of(self, match: Match) -> Chances:
        return self._answer_chances if isinstance(match, AnswerMatch) else super()._chances_of(match)


class SuffixDrafter(NgramDrafter):
    """Drafts by look-up in each sequence's own tokens and in the answers of its namespace, as many as pay."""

    def __init__(self, config: SpeculativeConfig) -> None:
        super().__init__(config)
        self._cache = self.answers = AnswerCache(
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_cached_tokens,
            first_chances(range(ANCHOR, DEPTH + 1)),
            first_chances(self._lengths),
        )

    def _begin(self, sequence: Sequence) -> Drafting:
        table = self._prompt_table(sequence.request)
        return SuffixDrafting(sequence.prompt_len, self._lengths, table, self._cache, sequence.request.root)
