"""Trial steps: steps over a row and a few frames of their own, which leave no trace. They show what memory steps take,
and have kernels compiled before the first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.interface import HostLengths
from pagemill.executor.device import Device
from pagemill.executor.device_rows import DeviceRows
from pagemill.executor.graphs import Shape
from pagemill.executor.rows import Rows
from pagemill.executor.staging import Place, lay, places_of
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import FrameShape, LayoutMaker
from pagemill.sampling.kernels import Choices

SHORT_CONTEXT = 16
"""Keys that attention reads in one piece, through a window too."""
FEW_TOKENS = 8
"""Tokens of the shortest trial prompt; the next ones have FURTHER times as many each. Products of few and of many rows
are different kernels."""
FURTHER = 4

RunOver = Callable[[DeviceRows, DevicePool, Tensor, Sequence[Place], Shape, HostLengths], Tensor]
"""Runs a step of these rows, whose lengths are the last argument, over a pool; the rest is what `RunStep` takes."""


class LargestStep(NamedTuple):
    """States how many query tokens, samples and rows a step has at most."""

    tokens: int
    samples: int
    rows: int


class Trial(NamedTuple):
    """States a step: query tokens and contexts, int32 [rows]; samples, all of the last token; draws and truncates, as
    in `Shape`."""

    query_lens: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    samples: int
    draws: bool
    truncates: bool


def largest_trial(largest: LargestStep, max_model_len: int, truncates: bool) -> Trial:
    """Returns the step of the most query tokens. Its rows end where the longest sequences do: some memory grows with
    contexts."""
    longest = _longest(max_model_len)
    query_lens = _cut(largest.tokens, longest)
    return Trial(query_lens, np.full_like(query_lens, longest), largest.samples, True, truncates)


def widest_trial(largest: LargestStep, context: int, truncates: bool) -> Trial:
    """Returns the step of the most rows, each with one query token behind contexts of this length."""
    rows = largest.rows
    return Trial(np.ones(rows, np.int32), np.full(rows, context, np.int32), rows, True, truncates)


def compiling_trials(largest: LargestStep, max_model_len: int, truncates: bool) -> list[Trial]:
    """Returns steps that start between them each kernel that serving does, in each way that it is compiled: of few
    tokens and many, over contexts that attention reads in one piece and in several, with all ways to sample."""
    longest = _longest(max_model_len)
    short = min(longest, SHORT_CONTEXT)
    sizes = [1, 1]
    while FEW_TOKENS * FURTHER ** (len(sizes) - 2) < largest.tokens:
        sizes.append(FEW_TOKENS * FURTHER ** (len(sizes) - 2))
    sizes.append(largest.tokens)
    ways = [(False, False), (True, False), (True, truncates)]
    trials = []
    for index, size in enumerate(sizes):
        prompts = _cut(size - 1, longest)
        context = longest if index % 2 else short
        trials.append(
            Trial(
                np.append(prompts, np.int32(1)),
                np.append(np.minimum(prompts, longest), np.int32(context)),
                min(largest.samples, len(prompts) + 1),
                *ways[index % len(ways)],
            )
        )
    return trials


def prepare(
    trial: Trial, device: Device, run: RunOver, frames: FrameShape, layout: LayoutMaker, max_model_len: int
) -> Callable[[], Tensor]:
    """Returns what runs a trial. All rows are one, and all of a layer group's blocks lie in one frame."""
    groups, rows = len(frames.groups.groups), len(trial.query_lens)
    state = Rows(frames.groups, 1, max_model_len, frames.block_size, device.where, frames.format.precise)
    there = DeviceRows(state, device.where)
    for group, table in enumerate(there.tables):
        table.fill_(group)
    pool = DevicePool(groups, frames, device.where, layout)
    pool.frames.bytes.zero_()
    tokens = int(trial.query_lens.sum())
    arrays = [
        np.zeros(rows, np.int32),
        trial.context_lens - trial.query_lens,
        np.concatenate(([0], trial.query_lens.cumsum())).astype(np.int32),
        np.zeros(rows, np.int32),
        np.full(trial.samples, tokens - 1),
        np.full(trial.samples, there.nowhere),
        *choices_of(trial.samples, trial.draws, trial.truncates),
    ]
    places, nbytes = places_of(arrays)
    host = np.zeros(nbytes, np.uint8)
    lay(arrays, places, host)
    memory = torch.from_numpy(host).to(device.where)
    shape = Shape(
        tokens,
        int(trial.query_lens.max()),
        int(trial.context_lens.max()),
        trial.samples,
        picks=True,
        draws=trial.draws,
        truncates=trial.truncates,
    )
    lengths = HostLengths(torch.from_numpy(trial.query_lens), torch.from_numpy(trial.context_lens))
    return lambda: run(there, pool, memory, places, shape, lengths)


def choices_of(samples: int, draws: bool, truncates: bool) -> Choices:
    """Returns choices that take a token in this way."""
    alike = Choices.argmax(samples)
    return alike._replace(
        temperature=alike.temperature + np.float32(draws), top_p=alike.top_p * np.float32(0.9 if truncates else 1)
    )


def _longest(max_model_len: int) -> int:
    """Returns the longest context that a step computes."""
    return max(1, max_model_len - 1)


def _cut(tokens: int, longest: int) -> NDArray[np.int32]:
    """Returns the lengths of rows, of up to `longest` tokens each, that have so many together."""
    query_lens = np.full(-(-tokens // longest), longest, np.int32)
    if tokens:
        query_lens[-1] -= query_lens.sum() - tokens
    return query_lens
