"""Keeps what requests have answered, by namespace, and finds where a sequence's last tokens stood in it.

As SuffixDecoding does (Oliaro et al., 2024, arXiv 2411.04975), a longer suffix is taken to say more about what follows.
In place of its tree there are chains of places, as in LZ77: bounded work per token, and a few bytes of each.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import islice

ANCHOR = 3
"""The shortest suffix that is looked up, in tokens."""
DEPTH = 16
"""The longest suffix that is compared; as many tokens of a prompt's end are kept before its answer."""
PLACES = 16
"""How many of the latest places of a sequence's last `ANCHOR` tokens are compared."""
NAMESPACE_SHARE = 0.25
"""The most of all kept tokens that may be of one namespace."""
END = -1
"""Stands behind each text: no token equals it."""


class Answers:
    """Texts of one namespace, the oldest first. A position counts all tokens that it has ever had, before it.

    chances, own_chances: how often drafts from here, and from sequences' own tokens, were right in this namespace.
    """

    def __init__(self, chances: dict[int, float], own_chances: dict[int, float]) -> None:
        self.chances = chances
        self.own_chances = own_chances
        self._tokens = array("i")
        self._before = array("i")
        """By position, how far before it its last `ANCHOR` tokens stood last; 0: nowhere."""
        self._latest: dict[int, int] = {}
        self._first = 0
        """The position of `_tokens[0]`."""
        self._begin = 0
        """Before this position all is forgotten."""

    def __len__(self) -> int:
        """Returns how many tokens are kept, with the end of each text."""
        return self._first + len(self._tokens) - self._begin

    def add(self, text: Sequence[int]) -> None:
        """Takes in a text. O(1) per token."""
        latest, before = self._latest, self._before
        start = self._first + len(self._tokens)
        self._tokens.extend(text)
        self._tokens.append(END)
        before.extend([0] * ANCHOR)
        for position, key in enumerate(_anchors(text), start + ANCHOR):
            before.append(position - latest.get(key, position))
            latest[key] = position
        del before[len(self._tokens) :]
        before.extend([0] * (len(self._tokens) - len(before)))

    def forget(self, count: int) -> None:
        """Forgets the oldest `count` tokens, which are a text and its end."""
        start = self._begin - self._first
        for position, key in enumerate(_anchors(self._tokens[start : start + count - 1]), self._begin + ANCHOR):
            if self._latest.get(key) == position:
                del self._latest[key]
        self._begin += count
        if 2 * (self._begin - self._first) > len(self._tokens):
            del self._tokens[: self._begin - self._first], self._before[: self._begin - self._first]
            self._first = self._begin

    def find(self, tokens: Sequence[int], follows: int) -> tuple[int, int]:
        """Returns the longest suffix's length, at most `DEPTH`, and the latest position behind it; or (0, -1).

        It looks at the latest `PLACES`, and at the position `follows`; -1 for none. Nothing follows at a text's end.
        """
        if len(tokens) < ANCHOR:
            return 0, -1
        suffix = list(tokens[-DEPTH:])
        suffix.reverse()
        best, place = 0, -1
        if self._begin < follows < self._first + len(self._tokens):
            best, place = self._length(suffix, follows), follows
            if best < ANCHOR:
                best, place = 0, -1
        position = self._latest.get(hash(tuple(tokens[-ANCHOR:])), -1)
        for _ in range(PLACES):
            if position < self._begin + ANCHOR:
                break
            length = self._length(suffix, position)
            if length >= ANCHOR and (length, position) > (best, place):
                best, place = length, position
            if best == DEPTH and place >= position:
                break
            distance = self._before[position - self._first]
            if not distance:
                break
            position -= distance
        return best, place

    def following(self, position: int, count: int) -> list[int]:
        """Returns at most `count` tokens from a position on, up to its text's end."""
        if position < self._begin:
            return []
        at = position - self._first
        tokens = self._tokens[at : at + count].tolist()
        return tokens[: tokens.index(END)] if END in tokens else tokens

    def _length(self, suffix: Sequence[int], position: int) -> int:
        """Returns how many tokens before a position equal the suffix, whose last token comes first; 0 at an end."""
        tokens, at = self._tokens, position - self._first
        if tokens[at] == END:
            return 0
        length, least = 0, self._begin - self._first
        for token in suffix:
            at -= 1
            if at < least or tokens[at] != token:
                break
            length += 1
        return length


class AnswerCache:
    """Keeps at most `most_requests` answers of `most_tokens` in all, `NAMESPACE_SHARE` of these for each namespace.

    Beyond that the oldest are forgotten. A namespace is known by the root of its digests, which differ with the model,
    adapter, tenant and salt, and freed with its last answer.
    """

    def __init__(self, most_requests: int, most_tokens: int, chances: dict[int, float], own: dict[int, float]) -> None:
        self.num_tokens = 0
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self._first_chances = chances, own
        self._spaces: dict[bytes, Answers] = {}
        self._counts: dict[bytes, deque[tuple[int, int]]] = {}
        """By namespace, the number and the length of each text."""
        self._order: OrderedDict[int, bytes] = OrderedDict()
        self._added = 0

    @property
    def num_requests(self) -> int:
        return len(self._order)

    def of(self, root: bytes) -> Answers:
        """Returns a namespace's texts, none at first."""
        if root not in self._spaces:
            chances, own = self._first_chances
            return Answers(chances.copy(), own.copy())
        return self._spaces[root]

    def add(self, root: bytes, tokens: Sequence[int], prompt_len: int) -> None:
        """Takes in a sequence's answer, of at most as many last tokens as a namespace may have."""
        most = int(NAMESPACE_SHARE * self._most_tokens)
        text = tokens[max(0, prompt_len - DEPTH, len(tokens) - most + 1) :]
        space = self._spaces.setdefault(root, self.of(root))
        counts = self._counts.setdefault(root, deque())
        space.add(text)
        self._added += 1
        counts.append((self._added, len(text) + 1))
        self._order[self._added] = root
        self.num_tokens += len(text) + 1
        while len(space) > most:
            self._forget(root)
        while self.num_tokens > self._most_tokens or len(self._order) > self._most_requests:
            self._forget(next(iter(self._order.values())))

    def clear(self) -> None:
        """Forgets all answers."""
        self.num_tokens = 0
        self._spaces.clear()
        self._counts.clear()
        self._order.clear()

    def _forget(self, root: bytes) -> None:
        """Forgets a namespace's oldest text."""
        number, count = self._counts[root].popleft()
        self._spaces[root].forget(count)
        self.num_tokens -= count
        del self._order[number]
        if not self._counts[root]:
            del self._counts[root], self._spaces[root]


def _anchors(text: Sequence[int]) -> map[int]:
    """Returns the hashes of the text's n-grams of `ANCHOR` tokens."""
    return map(hash, zip(*(islice(text, begin, None) for begin in range(ANCHOR)), strict=False))
