"""Pacing: how many prompt tokens a step takes beside sequences that generate, so that they hardly notice prompts.

It needs no target. It is told how long steps took, learns from them what a step without prompts and what a prompt's
token takes, and lets prompts take as much as leaves a step `STRETCH` times as long as one in which all that run and
wait would generate (stall-free batching, Agrawal et al., "Taming throughput-latency tradeoff in LLM inference with
Sarathi-Serve", 2024, with a budget that the engine finds itself). It knows no clock.
"""

from __future__ import annotations

STRETCH = 1.75
"""A step with prompts takes at most so many times what the whole batch's step takes without."""
LEAST_PROMPT_TOKENS = 16
"""Prompts get so many tokens of a step, but for one step in `PROBE_AFTER`: none starves."""
PROBE_AFTER = 32
"""After so many steps with prompts beside generating sequences, one without prompts shows what these take alone."""
TELLING_TOKENS = 64
"""A step in which nothing generates tells what a token of a prompt takes if it has so many."""
FADING = 0.25
"""What the last step counts in what is known, beside all before it."""
REMEMBERED_TOKENS = 4_000_000
"""The mean counts about so many of the tokens of prompts that have told, the last ones most."""
OUTLIER = 2.0
"""A step counts as at most so many times what was expected, and as at least the reciprocal."""


class Pacer:
    """Learns from steps, and says how many prompt tokens the next one takes.

    most: the most tokens of a step, which is what prompts may have as long as nothing is known.

    A step is taken to last `plain_s` with as many generating sequences as were timed, and `token_s` longer for each
    further token, be it a generating sequence's or a prompt's: a sequence's token costs more than that, by its context,
    which makes the estimate for more sequences than generate now a low one.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = min(LEAST_PROMPT_TOKENS, most)
        self.plain_s = self.token_s = 0.0
        """Seconds of the last steps without prompts, and of one more token; 0 while they are not known."""
        self.tells = False
        """Says whether a step had enough tokens of prompts to tell what one takes: a few take what any step does."""
        self.told_s, self.told_tokens = 0.0, 0
        """Seconds and tokens of the prompts of all steps that told, of late."""
        self._plain_rows = 0
        self._mixed = PROBE_AFTER

    def note_step(self, seconds: float, prompt_tokens: int, generating: int) -> None:
        """Notes how long a step took with so many tokens of prompts and of sequences that generated."""
        if not prompt_tokens:
            expected = self._plain(generating)
            self.plain_s = _blend(expected if self.plain_s else 0.0, seconds)
            self._plain_rows, self._mixed = generating, 0
        elif not generating:
            if prompt_tokens >= TELLING_TOKENS:
                self._note_prompts(seconds, prompt_tokens)
            elif not self.token_s:
                self.token_s = seconds / prompt_tokens
        elif self.plain_s and self.token_s and prompt_tokens >= self._least:
            self._note_prompts(max(0.0, seconds - self._plain(generating)), prompt_tokens)

    def prompt_tokens(self, generating: int, batch: int) -> int:
        """Returns how many tokens of prompts the next step takes.

        generating: tokens that it has of sequences that generate. batch: sequences that could run at once, of those
        that run and wait now.
        """
        if self._mixed >= PROBE_AFTER:
            self._mixed = 0
            return 0
        self._mixed += 1
        if not (self.plain_s and self.token_s):
            return self._most
        more, plain_s = max(0, batch - generating), self._plain(generating)
        tokens = (STRETCH - 1) * plain_s / self.token_s + STRETCH * more
        return int(min(max(tokens, self._least), self._most))

    @property
    def mean_token_s(self) -> float:
        """Returns the seconds of a prompt's token in the mean of all steps that told, of late; 0 if none has."""
        return self.told_s / self.told_tokens if self.told_tokens else 0.0

    def _note_prompts(self, seconds: float, tokens: int) -> None:
        """Takes in what tokens of prompts took in a step that tells; the first takes the place of a guess."""
        self.token_s = _blend(self.token_s if self.tells else 0.0, seconds / tokens)
        self.tells = True
        self.told_s, self.told_tokens = self.told_s + seconds, self.told_tokens + tokens
        if self.told_tokens > REMEMBERED_TOKENS:
            self.told_s, self.told_tokens = self.told_s / 2, self.told_tokens // 2

    def _plain(self, generating: int) -> float:
        """Returns the seconds of a step in which so many tokens generate, and no prompt runs."""
        return max(self.plain_s + self.token_s * (generating - self._plain_rows), self.plain_s / OUTLIER)


def _blend(known: float, seen: float) -> float:
    if not known:
        return seen
    return known + FADING * (min(max(seen, known / OUTLIER), OUTLIER * known) - known)
