"""Drafts a sequence's next tokens by n-gram look-up: what has followed where its last tokens stood before.

A draft costs no model, and is only a guess: verification accepts of it what plain decoding would have brought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

UNLIKELY = 0.7
"""To this power of its length, an n-gram's drafts are taken to be wrong, as long as nothing is known of them."""
LEARN = 0.4
"""What the last verification counts in a chance, beside all before it."""
FORGET = 0.005
"""What each step without drafts counts, after which there is another try the sooner, the less a try costs."""
COMMON = 0.1
"""So much less either counts in what sequences have in common."""


class Match(NamedTuple):
    """An earlier place where a sequence's last `length` tokens stood, and the `position` of what followed."""

    length: int
    position: int


class NgramTable:
    """By n-gram, the position behind its latest place, for a range of positions that grows. O(1) per token.

    end: the last position that has been taken in.
    """

    def __init__(self, begin: int, lengths: range) -> None:
        self.end = begin
        self._lengths = lengths
        self._found: dict[int, dict[int, int]] = {length: {} for length in lengths}

    def extend(self, tokens: Sequence[int], end: int) -> None:
        """Takes in the n-grams that end before positions up to `end`."""
        for length in self._lengths:
            first = max(self.end + 1, length)
            if first > end:
                continue
            columns = (tokens[first - length + i : end - length + i + 1] for i in range(length))
            self._found[length].update(zip(map(hash, zip(*columns, strict=True)), range(first, end + 1), strict=True))
        self.end = max(self.end, end)

    def find(self, ngram: tuple[int, ...]) -> int:
        """Returns the position behind its latest place, or -1. Other n-grams may be taken for it, though rarely."""
        return self._found[len(ngram)].get(hash(ngram), -1)


class Chances:
    """How likely a sequence's drafts are right, by the length that they stand behind.

    common: the chances with which sequences begin; it learns from all of them.
    """

    def __init__(self, common: dict[int, float]) -> None:
        self._common = common
        self._own = common.copy()

    def __getitem__(self, length: int) -> float:
        return self._own[length]

    def rest(self, length: int) -> None:
        """Lets a chance slowly become what it is elsewhere, and this what it was at first, since nothing is tried."""
        self._own[length] += FORGET * (self._common[length] - self._own[length])
        self._common[length] += COMMON * FORGET * (first_chance(length) - self._common[length])

    def learn(self, length: int, rate: float) -> None:
        """Learns which share of the drafts was right that were verified."""
        self._own[length] += LEARN * (rate - self._own[length])
        self._common[length] += COMMON * LEARN * (rate - self._common[length])


class Drafting:
    """What one sequence drafts from: its tokens by n-gram, and how well its drafts have been doing.

    lengths: of the n-grams, the shortest first. prompt: the prompt's table, which sequences of one request share.
    common: the chances by length with which sequences begin; it learns from all of them.
    """

    def __init__(self, prompt_len: int, lengths: range, prompt: NgramTable, common: dict[int, float]) -> None:
        self._prompt_len = prompt_len
        self._lengths = lengths
        self._prompt = prompt
        self._answer = NgramTable(prompt_len - 1, lengths)
        self._chances = Chances(common)
        self._behind = Match(lengths[0], 0)

    def take_in(self, tokens: Sequence[int], most: int) -> int:
        """Takes in tokens that it has not yet, at most so many. Returns how many that were."""
        taken = 0
        for table, end in ((self._prompt, self._prompt_len - 1), (self._answer, len(tokens) - 1)):
            if (count := min(end - table.end, most - taken)) > 0:
                table.extend(tokens, table.end + count)
                taken += count
        return taken

    def match(self, tokens: Sequence[int]) -> Match | None:
        """Returns the latest earlier place of the longest n-gram that ends here and that stood there too."""
        if self._answer.end < len(tokens) - 1:
            return None
        for length in reversed(self._lengths):
            ngram = tuple(tokens[-length:])
            if len(ngram) < length:
                continue
            for table in (self._answer, self._prompt):
                position = table.find(ngram)
                if position >= 0 and tuple(tokens[position - length : position]) == ngram:
                    return Match(length, position)
        return None

    def chance(self, match: Match) -> float:
        """Returns how likely a draft behind an n-gram of this length is right if those before it are."""
        return self._chances_of(match)[match.length]

    def draft(self, tokens: Sequence[int], match: Match, count: int) -> list[int]:
        """Returns `count` tokens that follow if all goes on as before, be that a repetition of what they are part of.

        With none, the chance of such drafts slowly becomes what it is elsewhere, and this what it was at first.
        """
        self._note(match, count)
        drafts = list(tokens[match.position : match.position + count])
        period = len(tokens) - match.position
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def verified(self, proposed: int, accepted: int) -> None:
        """Learns how many of the last drafts were right."""
        rate = accepted / min(accepted + 1, proposed)
        self._chances_of(self._behind).learn(self._behind.length, rate)

    def _note(self, match: Match, count: int) -> None:
        """Notes what the next drafts stand behind; or that there are none."""
        self._behind = match
        if not count:
            self._chances_of(match).rest(match.length)

    def _chances_of(self, match: Match) -> Chances:
        return self._chances


def first_chances(lengths: range) -> dict[int, float]:
    """Returns the chances of n-grams of these lengths before anything is known of any sequence."""
    return {length: first_chance(length) for length in lengths}


def first_chance(length: int) -> float:
    """Returns the chance that is given to drafts behind an n-gram of which nothing is known: the longer, the better."""
    return 1 - UNLIKELY**length
