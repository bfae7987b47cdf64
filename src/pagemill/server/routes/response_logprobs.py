"""ReadLogprobs: which tokens wrote an answer's content, told as the answer is read.

Log probabilities belong to tokens, and an answer's text is read apart from its tokens: marks, calls and reasoning have
tokens that are nobody's text, and stop strings hold text back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from pagemill.frontend.outputs import CompletionOutput, LogprobsOfPosition
from pagemill.text.answer.reader import AnswerPart, AnswerReader
from pagemill.text.detokenizer import Detokenizer


class ReadLogprobs:
    """Reads one answer, token by token, so that the outcome depends on the tokens alone."""

    def __init__(self, reader: AnswerReader, detokenizer: Detokenizer) -> None:
        """detokenizer: one that has not begun, and gives the texts that the answer is made of."""
        self._reader = reader
        self._detokenizer = detokenizer
        self._num_tokens = 0
        self._num_read = 0
        """Characters of the answer that have been read."""
        self._end = 0
        self._open: list[LogprobsOfPosition] = []
        """Tokens that make text only with those that follow."""
        self._waiting: deque[tuple[float, list[LogprobsOfPosition]]] = deque()
        """Tokens whose text has not been read, with the place where it ends."""
        self._unclaimed: list[tuple[str, list[LogprobsOfPosition]]] = []
        """Text that has been read and not given, with the tokens that wrote it."""

    def read(self, output: CompletionOutput) -> Iterator[tuple[AnswerPart, list[LogprobsOfPosition]]]:
        """Yields what is new of an answer, with the log probabilities of the tokens that wrote new content."""
        self._take_tokens(output)
        while self._waiting and self._waiting[0][0] <= len(output.text):
            yield from self._read_next(output.text)

    def finish(self, output: CompletionOutput) -> Iterator[tuple[AnswerPart, list[LogprobsOfPosition]]]:
        """Yields the rest of an answer that has ended."""
        self._take_tokens(output)
        self._waiting.append((math.inf, self._open))
        while self._num_read < len(output.text):
            yield from self._read_next(output.text)
        yield from self._claimed(self._reader.finish())

    def _take_tokens(self, output: CompletionOutput) -> None:
        positions = output.logprobs or []
        for at in range(self._num_tokens, len(positions)):
            text = self._detokenizer.add([output.token_ids[at]])
            self._open.append(positions[at])
            if text:
                self._end += len(text)
                self._waiting.append((self._end, self._open))
                self._open = []
        self._num_tokens = len(positions)

    def _read_next(self, text: str) -> Iterator[tuple[AnswerPart, list[LogprobsOfPosition]]]:
        end, positions = self._waiting.popleft()
        new = text[self._num_read : int(min(end, len(text)))]
        self._num_read += len(new)
        self._unclaimed.append((new, positions))
        return self._claimed(self._reader.add(new))

    def _claimed(self, part: AnswerPart) -> Iterator[tuple[AnswerPart, list[LogprobsOfPosition]]]:
        for piece in part.pieces:
            one = AnswerPart([piece])
            yield one, self._claim(one.content) if one.content else []

    def _claim(self, content: str) -> list[LogprobsOfPosition]:
        """Returns the tokens that wrote new content. What stands before it was something else, what stands behind it is
        held back."""
        begin = max("".join(text for text, _ in self._unclaimed).rfind(content), 0)
        end, at = begin + len(content), 0
        claimed: list[LogprobsOfPosition] = []
        left: list[tuple[str, list[LogprobsOfPosition]]] = []
        for text, positions in self._unclaimed:
            behind = at + len(text)
            if at < end and behind > begin:
                claimed += positions
                positions = []
            if behind > end:
                left.append((text[max(end - at, 0) :], positions))
            at = behind
        self._unclaimed = left
        return claimed
