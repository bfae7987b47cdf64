"""CommonKeys: which rows of a step begin with the same frames, so that a device may attend them together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagemill import _kernels
from pagemill.attention.interface import JoinedRows
from pagemill.executor.rows import Rows
from pagemill.kvcache.layer_groups import LayerGroups


class CommonKeys:
    """Finds what rows have in common, by the tables on the host. joined: None where each row is attended by itself.

    Rows of one query token do, by the groups without a window. Where these have remainders, keys to which a query adds
    them are its own.
    """

    def __init__(self, rows: Rows, groups: LayerGroups, joined: JoinedRows | None) -> None:
        held = groups.groups[: len(groups.groups) - groups.remainders]
        self._groups = [index for index, group in enumerate(held) if group.window is None]
        self._joined = joined if self._groups else None
        self._rows = rows

    def __bool__(self) -> bool:
        """Returns whether rows may be attended together at all."""
        return self._joined is not None

    def find(
        self,
        rows: NDArray[np.int32],
        starts: NDArray[np.int32],
        query_lens: NDArray[np.int32],
        size: int,
        *,
        moves: bool,
    ) -> tuple[NDArray[np.int32] | None, NDArray[np.int32]]:
        """Returns an order of these rows, and `AttentionBatch.common` int32 [n] for rows in that order.

        rows, starts, query_lens: as in `StepPlan`. size: how many rows there are with those that pad. moves: whether
        rows may be given another order; the order is None where they keep theirs.
        """
        common = np.zeros(len(rows), np.int32)
        if self._joined is None or len(rows) < 2:
            return None, common
        own = max(0, self._rows.precise - 1)
        limits = np.where(query_lens == 1, np.maximum(starts - own, 0), 0).astype(np.int32)
        chunks = self._joined.chunks(starts + query_lens, size)
        if np.count_nonzero(limits >= chunks) < 2:
            return None, common
        order = np.empty(len(rows), np.int32)
        most, block_size = self._joined.most, self._rows.block_size
        _kernels.order_rows(
            self._rows.tables, self._groups, rows, limits, chunks, block_size, most, moves, order, common
        )
        return (order if moves and common.any() else None), common
