"""DeviceRows: the state of the persistent batch's rows on the device, and what a decoder gets of it, computed there.

The host has the same in `Rows`, but for tokens that are still in flight. What it changes is copied over, cell by cell,
with the next step's arrays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.attention.interface import AttentionBatch, GroupBatch, HostLengths, join_remainders
from pagemill.executor.rows import Rows
from pagemill.memory.work import MemoryWork
from pagemill.scheduling.step_plan import StepPlan

EDIT_ARRAYS = 4
"""How many arrays `Edits.take` returns."""


class Edits:
    """Gathers the cells that plans have changed on the host since the device last got them. Values are read when they
    are `take`n, so the last one counts."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._cells: list[MemoryWork] = []
        self._spans: list[tuple[int, int, int]] = []

    def note_plan(self, plan: StepPlan) -> None:
        """Notes what a plan edits."""
        if len(plan.work.edit_row):
            self._cells.append(plan.work)
        for new in plan.new_rows:
            self.note_tokens(new.row, 0, len(new.token_ids))
        for row, position, token_ids in plan.chosen_tokens:
            self.note_tokens(row, position, position + len(token_ids))

    def note_tokens(self, row: int, begin: int, end: int) -> None:
        """Notes that a row's tokens at begin .. end - 1 are other ones."""
        self._spans.append((row, begin, end))

    def take(self) -> list[NDArray[np.int64] | NDArray[np.int32]]:
        """Returns what `DeviceRows.edit` takes: of tables and of tokens, the flat places of cells int64, and their
        values int32. They stay noted until `clear`."""
        tables, tokens, cells = self._rows.tables, self._rows.tokens, self._cells
        group, row, index = (
            np.concatenate([getattr(work, name) for work in cells] or [np.empty(0, np.int32)]).astype(np.int64)
            for name in ("edit_group", "edit_row", "edit_index")
        )
        table_places = (group * (tables.shape[1] + 1) + row) * tables.shape[2] + index
        places = [np.arange(begin, end) + at * tokens.shape[1] for at, begin, end in self._spans]
        values = [tokens[at, begin:end] for at, begin, end in self._spans]
        return [
            table_places,
            tables[group, row, index],
            np.concatenate([*places, np.empty(0, np.int64)]),
            np.concatenate([*values, np.empty(0, np.int32)]),
        ]

    def clear(self) -> None:
        """Forgets what the device has got."""
        self._cells.clear()
        self._spans.clear()


class Queries(NamedTuple):
    """Describes query tokens of some rows, one row after the other: arrays on the device, and what the host knows.

    rows, starts int32 [n]; query_start int32 [n + 1]; common int32 [n], see `AttentionBatch`. tokens: how many there
    are; they may be more than query_start[n]: what lies behind is of nobody. longest_query, longest_context: at least
    the maxima over rows. host: the rows' lengths, where the host knows them.
    """

    rows: Tensor
    starts: Tensor
    query_start: Tensor
    common: Tensor
    tokens: int
    longest_query: int
    longest_context: int
    host: HostLengths | None = None


class DeviceRows:
    """Keeps tables and tokens on the device.

    tables int32 [groups, rows + 1, entries]; tokens int32 [rows + 1, max_model_len + 1]. The last row is nobody's: a
    step that is padded reads and writes there. Its table is empty.
    """

    def __init__(self, rows: Rows, device: torch.device) -> None:
        groups, count, entries = rows.tables.shape
        self._host = rows
        self.nobody = count
        self.nowhere = count * rows.tokens.shape[1]
        """The flat place of nobody's first token."""
        self.tables = torch.full((groups, count + 1, entries), -1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(count + 1, rows.tokens.shape[1], dtype=torch.int32, device=device)

    def place(self, rows: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int64]:
        """Returns the flat places of tokens."""
        return rows.astype(np.int64) * self.tokens.shape[1] + positions

    def edit(self, table_places: Tensor, table_values: Tensor, token_places: Tensor, token_values: Tensor) -> None:
        """Puts values int32 into cells at flat places int64."""
        if len(table_places):
            self.tables.view(-1).index_put_((table_places,), table_values)
        if len(token_places):
            self.tokens.view(-1).index_put_((token_places,), token_values)

    def write(self, places: Tensor, sampled: Tensor) -> None:
        """Puts sampled tokens int32 into flat places int64; what is below 0 stands for none."""
        self.tokens.view(-1).index_put_((places,), sampled.clamp(min=0))

    def inputs(self, queries: Queries) -> tuple[Tensor, AttentionBatch]:
        """Returns the tokens, int64 [tokens], and what attention needs of them. Rows behind whose last query token
        others stand have no query and no context."""
        rows, starts, query_start, common, tokens, longest_query, longest_context, host = queries
        size, of_rows = self._host.block_size, rows.long()
        lens = query_start[1:] - query_start[:-1]
        if longest_query == 1 and tokens == len(rows):
            of_tokens, positions = of_rows, starts.long()
        else:
            places = torch.arange(tokens, dtype=torch.int32, device=rows.device)
            of = torch.searchsorted(query_start[1:], places, right=True)
            of_tokens = of_rows[of]
            positions = (places - query_start[of] + starts[of]).long()
        entries = -(-longest_context // size)
        frames = self.tables[:, of_tokens, positions // size].long()
        slots = torch.where(frames < 0, -1, frames * size + positions % size)
        tables = self.tables[:, :, :entries][:, of_rows]
        parts = [GroupBatch(table, of_group) for table, of_group in zip(tables, slots, strict=True)]
        batch = AttentionBatch(
            query_start=query_start,
            context_lens=torch.where(lens > 0, starts + lens, 0),
            positions=positions,
            groups=join_remainders(parts, self._host.num_remainders, self._host.precise),
            max_query_len=longest_query,
            max_context_len=longest_context,
            host=host,
            common=common,
        )
        return self.tokens.view(-1)[of_tokens * self.tokens.shape[1] + positions].long(), batch
