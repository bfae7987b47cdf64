"""How long the next load from an offload store will take, and computing a prompt instead, by what recent ones took."""

from __future__ import annotations

FADING = 0.8
"""The weight of a load compared with the one after it."""
TRIAL_SHARE = 0.05
"""The largest share of steps' time that may be lost on loads that are expected to take too long."""

MIN_PREFILL_TOKENS = 64
"""Steps with fewer tokens of prompts say nothing about how fast these are computed."""


class LoadTime:
    """Fits seconds for a load and seconds for each of its blocks, for one store: least squares over loads that fade.

    A store's first load is not counted: it pays for pages and caches that later ones find warm.
    """

    def __init__(self) -> None:
        self._warm = self._doubted = False
        self._weight = self._blocks = self._seconds = self._squares = self._products = 0.0
        self._unconfirmed_s = 0.0

    def note(self, blocks: int, seconds: float) -> None:
        """Notes how long a load of so many blocks took. After a trial, nothing older counts."""
        self._unconfirmed_s = 0.0
        fading = FADING if self._warm and not self._doubted else 0.0
        self._doubted = False
        if not self._warm:
            self._warm = True
            return
        self._weight = fading * self._weight + 1
        self._blocks = fading * self._blocks + blocks
        self._seconds = fading * self._seconds + seconds
        self._squares = fading * self._squares + blocks * blocks
        self._products = fading * self._products + blocks * seconds

    def note_step(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._unconfirmed_s += seconds

    def of(self, blocks: int) -> float | None:
        """Returns the seconds that a load of so many blocks will take; None if nothing is known."""
        line = self.line
        return None if line is None else line[0] + line[1] * blocks

    @property
    def line(self) -> tuple[float, float] | None:
        """Returns the seconds of a load, whatever it has, and those of each block; None if nothing is known."""
        if not self._weight:
            return None
        each = self._seconds / self._blocks
        spread = self._weight * self._squares - self._blocks**2
        if spread > 1e-6 * self._blocks**2:
            slope = (self._weight * self._products - self._blocks * self._seconds) / spread
            each = min(max(slope, 0.0), each)
        return (self._seconds - each * self._blocks) / self._weight, each

    def pays(self, blocks: int, otherwise_s: float) -> bool:
        """Returns whether so many blocks are to be loaded, where doing without them takes `otherwise_s`.

        They are if that takes longer, if nothing is known, or as a trial: what is never done is never found to be fast
        again. A trial is due when TRIAL_SHARE of the time that steps took since the last load is as much as it is
        expected to lose.
        """
        seconds = self.of(blocks)
        if seconds is None or seconds < otherwise_s:
            return True
        if seconds - otherwise_s > TRIAL_SHARE * self._unconfirmed_s:
            return False
        self._unconfirmed_s = 0.0
        self._doubted = True
        return True


class PrefillTime:
    """Estimates how long computing a token of a prompt takes, by recent steps. s_per_token: 0 if nothing is known."""

    def __init__(self) -> None:
        self.s_per_token = 0.0

    def note_step(self, tokens: int, generating: int, seconds: float) -> None:
        """Notes how long a step took with so many tokens, so many of them of sequences that generate.

        It tells how fast prompts are computed if most of its tokens belong to prompts.
        """
        if tokens - generating >= max(MIN_PREFILL_TOKENS, generating):
            each, known = seconds / tokens, self.s_per_token
            self.s_per_token = 0.8 * known + 0.2 * each if known else each

    def exceeds(self, load_time: LoadTime, blocks: int, tokens: int) -> bool:
        """Returns whether to load so many blocks instead of computing so many tokens; True if nothing is known."""
        return not self.s_per_token or load_time.pays(blocks, tokens * self.s_per_token)
