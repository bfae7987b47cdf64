"""Rows: what persists between steps by row of the batch, and what a decoder gets of it for a step."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, GroupBatch, HostLengths, join_remainders
from pagemill.kvcache.layer_groups import LayerGroups
from pagemill.memory.work import MemoryWork
from pagemill.scheduling.step_plan import StepPlan


class Inputs:
    """Describes query tokens of some rows, one row after the other.

    of_rows, starts, query_lens: int32 [rows]. rows, positions: int [tokens]. slots: int64 [groups, tokens], -1: do not
    write.
    """

    def __init__(
        self, state: Rows, rows: NDArray[np.int32], starts: NDArray[np.int32], query_lens: NDArray[np.int32]
    ) -> None:
        self._state = state
        self.of_rows = rows
        self.starts = starts
        self.query_lens = query_lens
        self.query_start = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=self.query_start[1:])
        self.rows = np.repeat(rows, query_lens)
        self.positions = np.repeat(starts - self.query_start[:-1], query_lens) + np.arange(len(self.rows))
        self.context_lens = starts + query_lens
        entries, offsets = np.divmod(self.positions, state.block_size)
        frames = state.tables[:, self.rows, entries].astype(np.int64, order="C")  # which indexing does not keep
        self.slots: NDArray[np.int64] = np.where(frames < 0, -1, frames * state.block_size + offsets)

    def token_ids(self) -> Tensor:
        """Returns the tokens, int64 [tokens], on the device."""
        return self._state.to_device(self._state.tokens[self.rows, self.positions].astype(np.int64))

    def batch(self, group: int | None = None) -> AttentionBatch:
        """Returns what attention needs, on the device.

        group: the only one of the layer groups, without remainders; None: all have what they have.
        """
        to_device, longest = self._state.to_device, int(self.context_lens.max())
        groups = slice(None) if group is None else slice(group, group + 1)
        tables = self._state.tables[groups][:, self.of_rows, : -(-longest // self._state.block_size)]
        parts = [
            GroupBatch(to_device(table), to_device(slots))
            for table, slots in zip(tables, self.slots[groups], strict=True)
        ]
        return AttentionBatch(
            query_start=to_device(self.query_start),
            context_lens=to_device(self.context_lens),
            positions=to_device(self.positions),
            groups=join_remainders(parts, self._state.num_remainders if group is None else 0, self._state.precise),
            max_query_len=int(self.query_lens.max()),
            max_context_len=longest,
            host=HostLengths(torch.from_numpy(self.query_lens), torch.from_numpy(self.context_lens)),
        )


class Rows:
    """Keeps the rows of the persistent batch, and edits them as plans say.

    tables int32 [groups, rows, entries]: frame numbers, -1 where nothing is held
    tokens int32 [rows, max_model_len + 1]: prompt, then what has been sampled, then drafts
    prompt_lens int32 [rows]
    adapter_numbers int32 [rows]: 0 for the model itself

    precise: tokens, as in `KVFormat`, where some of the layer groups hold remainders.

    All lie on the host, where a step's few rows and tokens are picked out of them by NumPy: torch would wake its own
    threads for that, beside the kernels'.
    """

    def __init__(
        self,
        groups: LayerGroups,
        rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        precise: int = 0,
    ) -> None:
        self.block_size = block_size
        self.tables = np.full((len(groups.groups), rows, -(-max_model_len // block_size)), -1, dtype=np.int32)
        self.num_remainders = groups.remainders
        self.precise = precise
        self.tokens = np.zeros((rows, max_model_len + 1), dtype=np.int32)
        self.prompt_lens = np.zeros(rows, dtype=np.int32)
        self.adapter_numbers = np.zeros(rows, dtype=np.int32)
        self._device = device

    def apply(self, plan: StepPlan) -> None:
        """Carries out a plan's edits of rows, but for their tables."""
        for new in plan.new_rows:
            self.tokens[new.row, : len(new.token_ids)] = new.token_ids
            self.prompt_lens[new.row] = new.prompt_len
            self.adapter_numbers[new.row] = new.adapter
        for row, position, token_ids in plan.chosen_tokens:
            self.tokens[row, position : position + len(token_ids)] = token_ids

    def begin_branches(self, plan: StepPlan) -> None:
        """Gives rows of branches what their first queries read of the rows that they branch off: the tokens of the last
        block, and the adapter."""
        for sample in np.flatnonzero(plan.branches).tolist():
            at, origin = int(plan.sample_from[sample]), int(plan.sample_to[sample])
            row, start = int(plan.rows[at]), int(plan.starts[at])
            last = slice(start // self.block_size * self.block_size, start + 1)
            self.tokens[row, last] = self.tokens[origin, last]
            self.adapter_numbers[row] = self.adapter_numbers[origin]

    def edit_tables(self, work: MemoryWork) -> None:
        if len(work.edit_row):
            self.tables[work.edit_group, work.edit_row, work.edit_index] = work.edit_frame

    def frames_from(self, first: int, rows: NDArray[np.int32], ends: NDArray[np.int32]) -> list[NDArray[np.int32]]:
        """Returns, by layer group, the frames numbered from `first` on in these rows' tables, up to the longest of
        their `ends`."""
        entries = -(-int(ends.max(initial=0)) // self.block_size)
        return [tables[tables >= first] for tables in self.tables[:, rows, :entries]]

    def inputs(self, rows: NDArray[np.int32], starts: NDArray[np.int32], query_lens: NDArray[np.int32]) -> Inputs:
        """Describes query tokens: of each of these rows so many, from its start on."""
        return Inputs(self, rows, starts, query_lens)

    def to_device(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)
