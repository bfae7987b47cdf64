"""The controller: holds the time between two tokens to a target by what a step takes beside its running sequences.

It is told how long each step took and sets three limits for the next ones. What makes steps longer is raised little by
little and lowered at once. It knows no clock.
"""

from __future__ import annotations

CALM = 0.8
"""Steps between this share of the target and the target change nothing."""
LEAST_PROMPT_TOKENS = 16
"""Prompts always get so many tokens of a step: none starves."""
RAISE = 8
"""After a short step, prompts get one token more for each `RAISE` that they had. That adds less than a tenth of the
target, whatever a token costs, so that no raise goes through the calm share and beyond the target."""
PATIENCE = 8
"""So many steps one after the other must ask for it before the number of running sequences changes."""
MOST_KEPT = 0.25
"""Of the pool, the most that is kept free at admission."""


class Controller:
    """Sets limits for the scheduler.

    target_s:      the longest that a step should take while sequences generate; infinite: the limits stay as they are.
    prompt_tokens: the most prompt tokens of a step beside generating sequences, at least LEAST_PROMPT_TOKENS.
    max_running:   the most running sequences, at least 1. It is lowered while steps with hardly any prompt tokens are
                   too long, since then nothing else is left to lower.
    watermark:     blocks that admission leaves free for running sequences to grow. Preemptions raise it, and each step
                   without one lowers it by one. A sequence that would run alone needs none.
    """

    def __init__(self, target_s: float, *, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.target_s = target_s
        self.prompt_tokens = self._most_tokens = max_num_batched_tokens
        self.max_running = self._most_running = max_num_seqs
        self.watermark = 0
        self._least = min(LEAST_PROMPT_TOKENS, max_num_batched_tokens)
        self._crowded = self._roomy = 0
        self._preemptions = 0

    def note_step(self, seconds: float, prompt_tokens: int, generating: int, running: int) -> None:
        """Notes how long a step took.

        prompt_tokens, generating: tokens of prompts in the step, and sequences that generated in it. running: sequences
        that run after it.
        """
        if not generating:
            return
        if seconds > self.target_s:
            self._too_long(seconds, prompt_tokens, running)
        elif seconds < CALM * self.target_s:
            self._short(prompt_tokens, running)
        else:
            self._crowded = self._roomy = 0

    def note_memory(self, preemptions: int, frames: int) -> None:
        """Notes, after a step, how many preemptions there were since the start, and how many frames the pool has."""
        new, self._preemptions = preemptions - self._preemptions, preemptions
        if new:
            self.watermark = min(int(MOST_KEPT * frames), 2 * self.watermark + new)
        elif self.watermark:
            self.watermark -= 1

    def _too_long(self, seconds: float, prompt_tokens: int, running: int) -> None:
        self._roomy = 0
        if prompt_tokens > self._least:
            self._crowded = 0
            share = max(0.5, CALM * self.target_s / seconds)
            self.prompt_tokens = max(self._least, min(self.prompt_tokens, int(share * prompt_tokens)))
            return
        self._crowded += 1
        if self._crowded == PATIENCE:
            self._crowded = 0
            self.max_running = max(1, min(self.max_running, running) * 9 // 10)

    def _short(self, prompt_tokens: int, running: int) -> None:
        self._crowded = 0
        if prompt_tokens >= self.prompt_tokens:
            self.prompt_tokens = min(self._most_tokens, self.prompt_tokens + max(1, self.prompt_tokens // RAISE))
        self._roomy = self._roomy + 1 if running >= self.max_running else 0
        if self._roomy == PATIENCE:
            self._roomy = 0
            self.max_running = min(self._most_running, self.max_running + 1)
