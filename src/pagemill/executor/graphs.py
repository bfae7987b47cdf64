"""Graphs: decode steps that were captured once, and are launched as a whole.

A step in which every row has one query token depends, beside its arrays, on few numbers: how many rows there are, and
the longest context, by which attention is cut. Both are rounded up to the rungs of a ladder, and a step's arrays are
padded, so that few graphs do. Those of the usual contexts are captured before the first step, others when steps of
their kind have come up some times.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pagemill.executor.device import Captured, Device
from pagemill.executor.staging import Place

logger = logging.getLogger(__name__)

WORTH_IT = 3
"""Steps of a kind that come before it is captured: that takes as long as some tens of them."""
WORTH_MORE = 64
"""The same where a graph of longer contexts, or of more ways to sample, does for them."""
AHEAD_CONTEXT = 4096
"""The context of graphs that are captured before the first step, at least: shorter ones can use them too."""
WAYS = [(False, False), (True, False), (True, True)]
"""Ways to sample, `draws` and `truncates` of a shape: a graph of one does for those before it."""
LEAST_CONTEXT = 1024
"""The lowest rung of contexts; the others double it."""
MOST_BYTES = 1 << 30
FREE_SHARE = 0.25
"""The share of the free memory that graphs may take; see `budget`."""


class Shape(NamedTuple):
    """States what a step's work depends on beside its arrays.

    picks: whether samples are not of all query tokens, in order. draws: whether some do not take the argmax.
    truncates: whether some of those leave tokens out.
    """

    tokens: int
    longest_query: int
    longest_context: int
    samples: int
    picks: bool
    draws: bool
    truncates: bool


RunStep = Callable[[Tensor, Sequence[Place], Shape], Tensor]
"""Runs a step whose arrays lie at these places of memory. Returns the sampled tokens, int32 [samples]."""


class DecodeGraph(NamedTuple):
    """A captured step, and where its arrays are put."""

    captured: Captured
    memory: Tensor


def batch_sizes(most: int) -> list[int]:
    """Returns the rungs for rows: 1, 2, 4, then every 8 up to 256, every 16 beyond, up to `most`."""
    rungs = [1, 2, 4, *range(8, min(most, 256), 8), *range(256, most, 16)]
    return [*(size for size in rungs if size < most), most]


def context_lengths(most: int) -> list[int]:
    """Returns the rungs for contexts, up to `most`."""
    rungs = [LEAST_CONTEXT]
    while rungs[-1] < most:
        rungs.append(rungs[-1] * 2)
    return [*rungs[:-1], most]


def _decoding(rows: int, context: int, draws: bool, truncates: bool) -> Shape:
    """Returns the shape of decode steps of so many rows, with a sample each."""
    return Shape(rows, 1, context, rows, picks=False, draws=draws, truncates=truncates)


def budget(free: int) -> int:
    """Returns the bytes that graphs may take of those that are free without them."""
    return int(min(MOST_BYTES, FREE_SHARE * free))


class Graphs:
    """Captures and launches decode steps of up to `rows` rows and contexts of up to `context` tokens.

    run: what is captured.
    agree: told whether a step has been captured here, says whether it counts: on all of several devices that work as
        one, whose joint work must be captured everywhere or nowhere. Only one of them asks what is `padded`. None for a
        device alone, where a capture that has too little memory leaves those of fewer rows theirs.
    """

    def __init__(
        self,
        device: Device,
        run: RunStep,
        rows: int,
        context: int,
        agree: Callable[[bool], bool] | None = None,
    ) -> None:
        self._device = device
        self._run = run
        self._agree = agree
        self._sizes, self._contexts = batch_sizes(rows), context_lengths(context)
        self._captured: dict[Shape, DecodeGraph] = {}
        self._seen: Counter[Shape] = Counter()
        self._short: set[Shape] = set()
        """Shapes whose capture had too little memory: they are not tried again."""
        self._bytes = 0
        self._full = self._fails = False
        """`_full` says that no more steps are captured, `_fails` that this is for good: a capture has failed, and not
        for memory."""

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that they have taken."""
        return self._bytes

    def padded(self, shape: Shape) -> Shape | None:
        """Returns the shape to which a step is to be padded; None if it runs as it is.

        A step whose rows have one query token each, and at most one sample.
        """
        size = self._sizes[bisect_left(self._sizes, shape.tokens)]
        shape = _decoding(size, self._rung(shape.longest_context), shape.draws, shape.truncates)
        if shape in self._captured:
            return shape
        self._seen[shape] += 1
        other = self._doing_for(shape)
        worth_it = self._seen[shape] > (WORTH_IT if other is None else WORTH_MORE)
        return shape if worth_it and shape not in self._short and self._has_room() else other

    def ahead(self, row_bytes: int, truncates: bool) -> Iterator[Shape]:
        """Gives the shapes to capture before the first step, as long as there is room: all numbers of rows, the most
        first, since graphs share their memory; greedy, and with all that the device does to sample.

        row_bytes: what a row takes while a step runs. truncates: whether the device leaves tokens out.
        """
        context = self._rung(min(AHEAD_CONTEXT, self._contexts[-1]))
        ways = [WAYS[0], WAYS[2 if truncates else 1]]
        for size in reversed(self._sizes):
            for draws, truncates_here in ways:
                if not self._has_room():
                    return
                if size * row_bytes <= budget(self._device.memory().free + self._bytes):
                    yield _decoding(size, context, draws, truncates_here)

    def _rung(self, context: int) -> int:
        """Returns the rung for contexts up to this length."""
        return self._contexts[bisect_left(self._contexts, context)]

    def _doing_for(self, shape: Shape) -> Shape | None:
        """Returns the shape of a graph that does for steps of this one, though it does more than they need."""
        ways = WAYS[WAYS.index((shape.draws, shape.truncates)) :]
        for context in self._contexts[bisect_left(self._contexts, shape.longest_context) :]:
            for draws, truncates in ways:
                if (other := _decoding(shape.tokens, context, draws, truncates)) in self._captured:
                    return other
        return None

    def run(self, memory: Tensor, places: Sequence[Place], shape: Shape) -> Tensor:
        """Runs a step that was padded to `shape`, as a graph if there is one or can be. Returns what `RunStep` does:
        the memory of the result is the next step's too."""
        known = self._captured.get(shape) or self._capture(memory, places, shape)
        if known is None:
            return self._run(memory, places, shape)
        known.memory.copy_(memory[: len(known.memory)])
        known.captured.graph.replay()
        return known.captured.result

    def clear(self) -> None:
        """Gives up all graphs, and their memory. Nothing may be running. Later steps are captured again as they come
        up, if they can be."""
        self._captured.clear()
        self._seen.clear()
        self._short.clear()
        self._bytes = 0
        self._full = self._fails

    def _has_room(self) -> bool:
        """Returns whether one more step is to be captured; False from then on for all."""
        if not self._full and self._bytes > budget(self._device.memory().free + self._bytes):
            self._full = True
            logger.info("%d graphs of decode steps take %d MiB; no more are captured", len(self), self._bytes >> 20)
        return not self._full

    def _capture(self, memory: Tensor, places: Sequence[Place], shape: Shape) -> DecodeGraph | None:
        """Captures a step; None where that fails: from then on for all, unless it had too little memory."""
        if self._full or shape in self._short:
            return None
        arrays = memory[: places[-1].begin + places[-1].nbytes].clone()
        captured = self._try(lambda: self._run(arrays, places, shape), shape)
        if self._agree is not None and not self._agree(captured is not None):
            self._full = True
        if captured is None or self._full:
            return None
        self._bytes += captured.nbytes
        known = self._captured[shape] = DecodeGraph(captured, arrays)
        what, level = "drawn" if shape.draws else "greedy", logging.INFO if self._seen[shape] else logging.DEBUG
        logger.log(
            level, "captured %s decode steps of %d rows, contexts of %d", what, shape.tokens, shape.longest_context
        )
        return known

    def _try(self, run: Callable[[], Tensor], shape: Shape) -> Captured | None:
        """Captures what `run` does, if the device can."""
        try:
            return self._device.capture(run)
        except Exception as error:  # of torch, or of Triton, whose kernel for this shape may take too much of the GPU
            self._device.synchronize()
            if self._agree is None and isinstance(error, torch.OutOfMemoryError):
                self._short.add(shape)
                logger.warning("decode steps of %d rows have too little memory for a graph: %s", shape.tokens, error)
            else:
                # Of several devices, the others do not know why: all try again, or none.
                self._full, self._fails = True, self._agree is None
                logger.warning("decode steps run without CUDA graphs, more slowly: %s", error)
            return None
