"""Finds stop strings in a stream of text, whatever the pieces it comes in.

All stop strings are followed at once, character by character, with the Aho-Corasick automaton. So the work per
character depends neither on their number nor on their length, and what might still become a match is exactly what is
held back.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete; never passes on text that is taken back later.

    The match that is complete first, reading character by character, counts; of several that are complete at the same
    character, the longest. So the result does not depend on how tokens cut the text. `include`
    keeps the stop string in the text. `matched` is the stop string that came, or None.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._include = include
        self._state = _automaton(tuple(stops)) if stops else None
        self._held = ""

    def add(self, text: str, *, can_stop: bool = True) -> str:
        """Returns the text that may now be shown. Without `can_stop` a match that ends within `text` does not count."""
        if self.matched is not None:
            return ""
        state = self._state
        if state is None:
            return text
        self._held += text
        for position, character in enumerate(text, len(self._held) - len(text) + 1):
            state = state.after(character)
            if state.complete is not None and can_stop:
                self.matched = state.complete
                shown = self._held[: position if self._include else position - len(state.complete)]
                self._held = ""
                return shown
        self._state = state
        keep = len(self._held) - state.open_length
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def finish(self) -> str:
        """Returns what was held back, when the text has ended without a match."""
        held, self._held = self._held, ""
        return held


class _State:
    """How far the text's end is into stop strings: the longest beginning of one that the text ends with.

    complete: the longest stop string that the text ends with. open_length: the length of the longest beginning of a
    stop string, shorter than that, which the text ends with. shorter: the state of the next shorter beginning.
    """

    __slots__ = ("complete", "following", "length", "open_length", "shorter")

    def __init__(self, length: int) -> None:
        self.length = length
        self.complete: str | None = None
        self.open_length = 0
        self.following: dict[str, _State] = {}
        self.shorter = self

    def after(self, character: str) -> _State:
        state = self
        while (found := state.following.get(character)) is None and state.length:
            state = state.shorter
        return state if found is None else found


@functools.lru_cache(maxsize=16)
def _automaton(stops: tuple[str, ...]) -> _State:
    """Returns the state before any text. Sequences of a request, and requests alike, share it."""
    start = _State(0)
    for stop in stops:
        state = start
        for length, character in enumerate(stop, 1):
            state = state.following.setdefault(character, _State(length))
        state.complete = stop
    reached = deque([start])
    while reached:
        state = reached.popleft()
        for character, longer in state.following.items():
            longer.shorter = start if state is start else state.shorter.after(character)
            longer.open_length = longer.length if longer.following else longer.shorter.open_length
            longer.complete = longer.complete or longer.shorter.complete
            reached.append(longer)
    return start
