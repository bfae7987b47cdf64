"""Finds stop strings in a stream of text, whatever the pieces it comes in.

Each stop string is followed character by character with the Knuth–Morris–Pratt automaton, so the work per character
does not depend on its length, and what might still become a match is exactly what is held back.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string is complete; never passes on text that is taken back later.

    The match that is complete first, reading character by character, counts; of several that are complete at the same
    character, the longest. So the result does not depend on how tokens cut the text. `include`
    keeps the stop string in the text. `matched` is the stop string that came, or None.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self.matched: str | None = None
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._include = include
        self._borders = [_borders(stop) for stop in self._stops]
        self._matching = [0] * len(self._stops)
        self._held = ""

    def add(self, text: str, *, can_stop: bool = True) -> str:
        """Returns the text that may now be shown. Without `can_stop` a match that ends within `text` does not count."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        self._held += text
        start = len(self._held) - len(text)
        for position in range(start, len(self._held)):
            stop = self._advance(self._held[position], can_stop)
            if stop is not None:
                self.matched = stop
                end = position + 1
                shown, self._held = self._held[: end if self._include else end - len(stop)], ""
                return shown
        keep = len(self._held) - max(self._matching)
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown

    def finish(self) -> str:
        """Returns what was held back, when the text has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str, can_stop: bool) -> str | None:
        """Takes one character. Returns the longest stop string that it completes, or None."""
        complete = None
        for i, stop in enumerate(self._stops):
            matching, borders = self._matching[i], self._borders[i]
            while matching and stop[matching] != character:
                matching = borders[matching - 1]
            if stop[matching] == character:
                matching += 1
            if matching == len(stop):
                complete = complete or stop
                matching = borders[matching - 1]
            self._matching[i] = matching
        return complete if can_stop else None


def _borders(text: str) -> list[int]:
    """Returns, for each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
