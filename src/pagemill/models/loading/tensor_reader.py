"""TensorReader: reads a checkpoint's tensors, joined, converted and checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from pagemill.errors import CorruptWeightsError
from pagemill.models.loading.checkpoint import Checkpoint
from pagemill.models.loading.matrices import Pairs, empty_matrix, joined_rows, unpaired
from pagemill.models.loading.pieces import PIECE_BYTES, each_piece
from pagemill.ops.quantized import QuantizedWeight

_STAGING_BYTES = 16 << 20
_STAGING_PART = 24
"""Staging takes up to one part in so many of a large checkpoint."""

Progress = Callable[[int, int], None]


class TensorReader:
    """Reads tensors to `device`. Raises CorruptWeightsError for one that is missing, not finite or of a wrong shape.

    counted: names of the tensors that make up the total. progress: called with (done, total) stored bytes after each.
    stages: whether matrices are copied when they are packed, so that their memory may serve again.
    used: names of what has been read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        counted: Sequence[str],
        progress: Progress | None,
        *,
        stages: bool,
    ) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._progress = progress
        self._stages = stages
        self._staging: Tensor | None = None
        self._done = 0
        self._total = sum(checkpoint.tensors[name].nbytes for name in counted)
        self.used: set[str] = set()

    def integers(
        self, parts: Sequence[str], rows: tuple[int, ...], columns: int, unpair: Sequence[Pairs | None]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the joined parts as the integers of the file: values, scale and low, as `read_affine` does.

        If one part has a scale for each 16 columns, all have.
        """
        values, scales, lows = self._narrow(parts, rows, columns, unpair, self._checkpoint.read_affine)
        most = max(scale.shape[1] for scale in scales)
        scale, low = (
            torch.cat([each.repeat_interleave(most // each.shape[1], dim=1) for each in part])
            for part in (scales, lows)
        )
        return joined_rows(values), scale, low

    def rounded(
        self, parts: Sequence[str], rows: tuple[int, ...], columns: int, unpair: Sequence[Pairs | None], bits: int
    ) -> QuantizedWeight:
        """Returns the joined parts in 4 or 8 bits, as the checkpoint rounds them while it reads them.

        It must be packed before the next matrix is read.
        """
        if len(parts) == 1:
            rows = (sum(rows),)
        for part, count in zip(parts, rows, strict=True):
            self._expect(f"{part}.weight", (count, columns))
        staged = self._stage((sum(rows), columns), torch.uint8 if bits == 4 else torch.int8)
        joined = QuantizedWeight.empty(sum(rows), columns, bits, staged)
        begin = 0
        for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
            name, out = f"{part}.weight", joined.rows(itemgetter(slice(begin, begin + count)))
            if not self._checkpoint.round_into(name, out):
                raise CorruptWeightsError(
                    f"tensor {name!r} in {self._checkpoint.path} is not finite; download it again"
                )
            self._count(name)
            for each in out.parts:
                if (ordered := _in_order(each, unpair, index)) is not each:
                    each.copy_(ordered)
            begin += count
        return joined

    def float8(
        self, parts: Sequence[str], rows: tuple[int, ...], columns: int, unpair: Sequence[Pairs | None]
    ) -> tuple[Tensor, Tensor, int]:
        """Returns the joined parts in fp8: values as uint8, scale and columns of a scale, as `read_float8` does."""
        groups = set()

        def read(name: str) -> tuple[Tensor, Tensor]:
            weight = self._checkpoint.read_float8(name)
            groups.add(weight.group)
            return weight.values.view(torch.uint8), weight.scale

        values, scales = self._narrow(parts, rows, columns, unpair, read)
        (group,) = groups
        return joined_rows(values), joined_rows(scales), group

    def _narrow(
        self,
        parts: Sequence[str],
        rows: tuple[int, ...],
        columns: int,
        unpair: Sequence[Pairs | None],
        read: Callable[[str], tuple[Tensor, ...]],
    ) -> list[tuple[Tensor, ...]]:
        """Returns what `read` reads of each part, values first: all parts' values, all parts' scales, and so on."""
        if len(parts) == 1:
            rows = (sum(rows),)
        joined: list[tuple[Tensor, ...]] = []
        for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
            name = f"{part}.weight"
            self._expect(name, (count, columns))
            found = read(name)
            self._check_finite(name, torch.cat(found[1:]))
            self._count(name)
            joined.append(tuple(_in_order(each, unpair, index) for each in found))
        return [*zip(*joined, strict=True)]

    def matrix(
        self,
        parts: Sequence[str],
        rows: tuple[int, ...],
        columns: int,
        *,
        unpair: Sequence[Pairs | None] = (),
        dtype: torch.dtype,
    ) -> Tensor:
        """Returns the parts joined by rows, [sum(rows), columns]; with columns = 0 their biases, [sum(rows)].

        It must be packed before the next matrix is read, unless `leave` is called.
        unpair: of the leading parts, the rows in which rotary pairs lie side by side; they are put in halves.
        """
        if len(parts) == 1:
            rows = (sum(rows),)
        kind, tail = ("weight", (columns,)) if columns else ("bias", ())
        for part, count in zip(parts, rows, strict=True):
            self._expect(f"{part}.{kind}", (count, *tail))
        shape = (sum(rows), *tail)
        joined = self._stage(shape, dtype) if columns else empty_matrix(shape, dtype, self._device)
        begin = 0
        for index, (part, count) in enumerate(zip(parts, rows, strict=True)):
            out = joined[begin : begin + count]
            self._read(f"{part}.{kind}", out)
            if (ordered := _in_order(out, unpair, index)) is not out:
                out.copy_(ordered)
            begin += count
        return joined

    def vector(self, name: str, size: int) -> Tensor:
        """Returns a tensor of one dimension, fp32 [size]."""
        self._expect(name, (size,))
        values = torch.empty(size, dtype=torch.float32, device=self._device)
        self._read(name, values)
        return values

    def leave(self) -> None:
        """Lets the last matrix keep its memory."""
        self._staging = None

    def _stage(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Returns memory for a matrix until it is packed.

        The last matrix's memory serves again where it may, because fresh pages cost more time than writing into them.
        Large matrices get memory of their own, which goes back to the system.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        most = max(_STAGING_BYTES, self._total // _STAGING_PART)
        if nbytes > most or not self._stages:
            return empty_matrix(shape, dtype, self._device)
        if self._staging is None:
            self._staging = empty_matrix((most,), torch.uint8, self._device)
        return self._staging[:nbytes].view(dtype).view(shape)

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        """Checks a tensor before memory is taken for it."""
        info = self._checkpoint.tensors.get(name)
        path = self._checkpoint.path
        if info is None:
            raise CorruptWeightsError(
                f"{path} has no tensor {name!r}, which its configuration asks for; download it again"
            )
        if info.shape != shape:
            raise CorruptWeightsError(
                f"tensor {name!r} in {path} has shape {list(info.shape)}, but the configuration asks for "
                f"{list(shape)}; weights and configuration belong to different models"
            )

    def _read(self, name: str, out: Tensor) -> None:
        self._checkpoint.read_into(name, out)
        self._check_finite(name, out)
        self._count(name)

    def _check_finite(self, name: str, out: Tensor) -> None:
        flat = out.view(-1)
        ends: list[Tensor] = []

        def look(begin: int, end: int) -> None:
            ends.extend(torch.aminmax(flat[begin:end]))  # NaN goes through; cheaper than a mask of all elements

        each_piece(len(flat), PIECE_BYTES // out.itemsize, look)
        low, high = torch.aminmax(torch.stack(ends))
        if not (math.isfinite(low) and math.isfinite(high)):
            dtype = str(out.dtype).removeprefix("torch.")
            raise CorruptWeightsError(
                f"tensor {name!r} in {self._checkpoint.path} is not finite in {dtype} (from {low:g} to {high:g}); "
                f"download it again, or load it with dtype='float32' if it is sound"
            )

    def _count(self, name: str) -> None:
        self.used.add(name)
        self._done += self._checkpoint.tensors[name].nbytes
        if self._progress is not None:
            self._progress(self._done, self._total)


def _in_order(rows: Tensor, unpair: Sequence[Pairs | None], part: int) -> Tensor:
    """Returns a part's rows with rotary pairs in halves."""
    pairs = unpair[part] if part < len(unpair) else None
    return rows if pairs is None else unpaired(rows, pairs)
