"""TensorParallelExecutor: a model in parts, one in this process (rank 0) and the others in processes of their own.

There is one scheduler and one memory manager: a frame's number means the same on every rank, which holds its KV heads'
part of the block there. Rank 0 plans and samples alone; the others hear of a plan what concerns layers and frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from torch import Tensor

from pagemill.errors import EngineDeadError, KVMemoryError
from pagemill.executor.late_errors import LateErrors
from pagemill.executor.local import LocalExecutor, Parts
from pagemill.executor.rank_messages import Allocate, Edit, Logits, Resize, Step, TakeLoss
from pagemill.executor.ranks import Ranks
from pagemill.executor.record_parts import RecordParts
from pagemill.executor.rows import Inputs
from pagemill.executor.sharded_frames import ShardedFrames
from pagemill.memory.work import MemoryWork
from pagemill.models.adapter import AdapterTokens
from pagemill.models.decoder import OnLayer


class TensorParallelExecutor(LocalExecutor):
    """Implements `Executor` over all ranks. It is broken, and raises RankLostError, when one of them is lost.

    shape: of the frames of rank 0's pool, and of each other's.
    """

    def __init__(self, parts: Parts, ranks: Ranks, record_parts: RecordParts) -> None:
        super().__init__(parts)
        self.ranks = ranks
        self._record_parts = record_parts

    def make_pool(self, num_frames: int, streamed_frames: int, streamed_folder: Path | None, room: int) -> int:
        room //= len(self.ranks) + 1  # the same for all of them
        first = super().make_pool(num_frames, streamed_frames, streamed_folder, room)
        others = self.ranks.ask(Allocate(num_frames, streamed_frames, streamed_folder, room))
        if streamed_frames and any(other != first for other in others):
            raise KVMemoryError(
                f"the ranks' pools could not be made alike: their streamed frames begin at {[first, *others]}; lower "
                f"kv_memory, or max_model_len to what the pool holds",
                param="kv_memory",
            )
        self.frames = ShardedFrames(self.frames, self.ranks, self._record_parts, self.facts.overlaps)
        return first

    def edit(self, work: MemoryWork) -> list[int]:
        with self._together():
            self.ranks.send(Edit.of(work))
            lost = super().edit(work)
        others = self.ranks.answers() if len(work.copy_source) else []
        return sorted({*lost}.union(*others))

    def forward(
        self,
        inputs: Inputs,
        token_ids: Tensor,
        on_layer: OnLayer | None = None,
        adapters: Sequence[AdapterTokens] = (),
    ) -> Tensor:
        tokens = token_ids.cpu().numpy().astype(np.int32)
        errors = LateErrors.of(on_layer)
        with self._together():
            self.ranks.send(Step.of(inputs.of_rows, inputs.starts, inputs.query_lens, tokens))
            hidden = super().forward(inputs, token_ids, errors, adapters)
        if errors is not None:
            self.ranks.answers()
            if errors.first is not None:
                raise errors.first
        return hidden

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        with self._together():
            self.ranks.send(Logits.of(hidden))
            return super().logits(hidden, out)

    def resize(self, num_frames: int) -> None:
        before = self.pool.num_frames
        try:
            self._resize_all(num_frames)
        except KVMemoryError:
            self._resize_all(before)  # some have grown
            raise

    def _resize_all(self, num_frames: int) -> None:
        self.ranks.send(Resize(num_frames))
        try:
            super().resize(num_frames)
        finally:
            self.ranks.answers()

    def take_loss(self) -> bool:
        if self.pool.streamed_file is None:
            return False
        return any([super().take_loss(), *self.ranks.ask(TakeLoss())])

    def close(self) -> None:
        super().close()
        self.ranks.close()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Holds while all ranks do the same. What one of them cannot do parts it from the others: they are lost. An
        interrupt does so too, and goes on."""
        try:
            yield
        except EngineDeadError:
            raise
        except Exception as error:
            raise self.ranks.lose(error) from error
        except BaseException as error:
            self.ranks.lose(error)
            raise
