"""PendingWork: what the device has not been told yet. Frame copies, and edits of its copy of the block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagemill.memory.work import Ints, MemoryWork


class PendingWork:
    """Gathers between two drains. A later edit of a table's entry replaces an earlier one.

    edits: by row, then by entry * groups + group, the frame.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._copies: list[tuple[int, int]] = []
        self.edits: dict[int, dict[int, int]] = {}

    def copy(self, source: int, target: int) -> None:
        """Copies the bytes of one frame to another, after all copies so far."""
        self._copies.append((source, target))

    @property
    def has_copies(self) -> bool:
        return bool(self._copies)

    def copy_targets(self) -> set[int]:
        """Returns the frames whose contents are still elsewhere."""
        return {target for _, target in self._copies}

    def place(self, row: int) -> None:
        """Gives a row to another table: edits of the one before are nothing to it."""
        self.edits[row] = {}

    def leave(self, row: int) -> None:
        """Drops the edits of a row that no table has any more."""
        self.edits.pop(row, None)

    def edit(self, row: int, group: int, start: int, frames: Sequence[int]) -> None:
        """Makes entries of a row from `start` on these frames (-1: none)."""
        if frames:
            groups = self._num_groups
            places = range(start * groups + group, (start + len(frames)) * groups, groups)
            self.edits.setdefault(row, {}).update(zip(places, frames, strict=True))

    def drain(self) -> MemoryWork:
        """Returns all since the last drain, for the device to do before its next step."""
        if not self._copies and not self.edits:
            return MemoryWork.none()
        rows: list[int] = []
        places: list[int] = []
        frames: list[int] = []
        for row, edits in self.edits.items():
            rows += [row] * len(edits)
            places += edits
            frames += edits.values()
        index, group = np.divmod(_ints(places), np.int32(self._num_groups))
        source, target = zip(*self._copies, strict=True) if self._copies else ((), ())
        self._copies.clear()
        self.edits.clear()
        return MemoryWork(
            copy_source=_ints(source),
            copy_target=_ints(target),
            edit_row=_ints(rows),
            edit_group=group,
            edit_index=index,
            edit_frame=_ints(frames),
        )


def _ints(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int32, len(values))
