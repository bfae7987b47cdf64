"""DeviceSteps: how a device runs steps whose arrays the host gives it, without waiting, one by one or as graphs.

Where several devices work as one, each has its own, and is given the same arrays in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagemill.attention.interface import HostLengths
from pagemill.errors import DeviceLostError, KVMemoryError
from pagemill.executor.activation_peak import STREAMING_BYTES, TRANSFER_BYTES, activation_peak, named_if_too_large
from pagemill.executor.backend import Backend
from pagemill.executor.device import Device
from pagemill.executor.device_rows import EDIT_ARRAYS, DeviceRows, Queries
from pagemill.executor.graphs import AHEAD_CONTEXT, WAYS, Graphs, Shape, budget
from pagemill.executor.interface import ExecutorMemory, GraphFacts
from pagemill.executor.staging import Place, Slot
from pagemill.executor.trial_steps import (
    LargestStep,
    Trial,
    choices_of,
    compiling_trials,
    largest_trial,
    prepare,
    widest_trial,
)
from pagemill.executor.worker import Worker
from pagemill.kvcache.device_pool import DevicePool
from pagemill.kvcache.layout import FrameShape
from pagemill.models.decoder import OnLayer
from pagemill.models.sharding import SummingExchange
from pagemill.sampling.kernels import DeviceChoices
from pagemill.sampling.torch_kernels import TorchSamplingKernels

logger = logging.getLogger(__name__)


class Together(NamedTuple):
    """Joins a device with others that work as one. agree: see `Graphs`."""

    exchange: SummingExchange
    agree: Callable[[bool], bool]


class DeviceSteps:
    """Runs steps of a worker's rows. enforce_eager: none is captured. together: None for a device that works alone."""

    def __init__(
        self,
        device: Device,
        worker: Worker,
        backend: Backend,
        max_num_seqs: int,
        max_model_len: int,
        enforce_eager: bool,
        together: Together | None = None,
    ) -> None:
        assert isinstance(backend.sampling, TorchSamplingKernels), "only these choose on the device"
        self.device = device
        self.rows = DeviceRows(worker.rows, device.where)
        self.truncates = backend.sampling.truncates_on_device
        """Says whether the device can leave tokens out before it draws."""
        self._worker = worker
        self._backend = backend
        self._sampling = backend.sampling
        self._max_model_len = max_model_len
        self._exchange = None if together is None else together.exchange
        waits = worker.decoder.waits or worker.decoder.attention.waits
        self._graphs: Graphs | None = None
        if not (enforce_eager or waits):
            agree = None if together is None else together.agree
            self._graphs = Graphs(device, self._step, max_num_seqs, max_model_len, agree)
        self._kept_bytes = 0
        """Memory that steps, graphs and transfers need, and is not the pool's."""
        self._row_bytes: int | None = None
        """Bytes that a row of a decode step takes; None while that is not known."""
        worker.decoder.reach(max_model_len)  # nothing that steps use moves afterwards

    def measure(self, largest: LargestStep, shape: FrameShape, streams: bool) -> None:
        """Runs the step of the most tokens, and that of the most rows. From then on, what steps need counts as used
        memory, and what transfers do, those of streamed frames where it `streams`. Raises KVMemoryError."""
        context = self._max_model_len - 1
        tokens = largest_trial(largest, self._max_model_len, self.truncates)
        rows = widest_trial(largest, max(1, context), self.truncates)
        peak = max(self._peak(trial, shape) for trial in (tokens, rows))
        graphs = 0 if self._graphs is None else budget(self.device.memory().free)
        self._kept_bytes = peak + graphs + TRANSFER_BYTES + (STREAMING_BYTES if streams else 0)

    def compile(self, largest: LargestStep, shape: FrameShape) -> None:
        """Looks what rows of a decode step take, and runs steps that have all kernels compiled which steps use: of more
        and more tokens, until one fails. Raises what `survives` does."""
        few = largest
        while few.rows and not self.survives(f"a trial step of {few.rows} rows", self._measure_rows, few, shape):
            few = few._replace(rows=few.rows // 2)
        for trial in compiling_trials(largest, self._max_model_len, self.truncates):
            what = f"trial steps of {trial.query_lens.sum()} tokens and more"
            if not self.survives(what, self._try, trial, shape):
                break
        self.survives("sampling behind the host", self._choose_as_from_host)

    def survives(self, what: str, work: Callable[..., object], *args: object) -> bool:
        """Does work of the warm-up, without which a device can serve too. Returns whether that went well; if not, a
        warning names it. Raises DeviceLostError, and any error of a device that works with others: they wait for
        it."""
        try:
            work(*args)
        except Exception as error:  # a full device has many: torch's, a library's, Triton's
            if self._exchange is not None:
                raise
            try:
                self.device.synchronize()
            except RuntimeError as last:
                raise DeviceLostError.of(self.device.where, last) from error
            logger.warning("the warm-up leaves out %s: %s", what, error)
            return False
        return True

    def _measure_rows(self, largest: LargestStep, shape: FrameShape) -> None:
        context = max(1, min(AHEAD_CONTEXT, self._max_model_len - 1))
        self._row_bytes = self._peak(widest_trial(largest, context, self.truncates), shape) // largest.rows

    @torch.inference_mode()
    def _try(self, trial: Trial, shape: FrameShape) -> None:
        with named_if_too_large(trial, self.device.where):
            prepare(trial, self.device, self._step_over, shape, self._backend.layout, self._max_model_len)()

    @torch.inference_mode()
    def _choose_as_from_host(self) -> None:
        """Samples as steps do that need the host between two tokens."""
        vocab, places = self._worker.decoder.spec.vocab_size, np.zeros(1, np.int64)
        logits = torch.zeros(1, vocab, dtype=torch.float32, device=self.device.where)
        for draws, truncates in WAYS:
            self._sampling.choose(logits, places, choices_of(1, draws, truncates))
        allowed = np.full((1, -(-vocab // 32)), 2**32 - 1, np.uint32)
        self._sampling.mask(logits, places, allowed, places)

    def ahead(self) -> Iterator[Shape]:
        """Gives the shapes of the decode steps that are to be captured before the first step, one after the other, once
        kernels have been compiled, and what rows take is known."""
        if self._graphs is not None and self._row_bytes is not None:
            yield from self._graphs.ahead(self._row_bytes, self.truncates)

    def _peak(self, trial: Trial, shape: FrameShape) -> int:
        return activation_peak(trial, self.device, self._step_over, shape, self._backend.layout, self._max_model_len)

    @property
    def graphs(self) -> GraphFacts:
        """Returns what decode steps have been captured."""
        return GraphFacts(0, 0) if self._graphs is None else GraphFacts(len(self._graphs), self._graphs.nbytes)

    def memory(self) -> ExecutorMemory:
        free, total = self.device.memory()
        if self._kept_bytes:
            free -= max(0, self._kept_bytes - self.device.idle())
        return ExecutorMemory(max(0, free), total)

    def check_growth(self, num_frames: int) -> None:
        """Raises KVMemoryError if the pool would have to take more than is free, or what steps need, to have so many
        frames."""
        wanted, free = self._worker.pool.missing(num_frames), self.memory().free
        if wanted > free:
            beside = " beside what steps need" if self._kept_bytes else ""
            raise KVMemoryError(
                f"the KV pool cannot grow to {num_frames} blocks: that takes {wanted} more bytes of "
                f"{self.device.where}, and {free} are free{beside}; ask for less, or free memory",
                param="kv_memory",
            )

    def padded(self, shape: Shape) -> Shape | None:
        """Returns the shape to which a decode step is to be padded; None if it runs as it is."""
        return None if self._graphs is None else self._graphs.padded(shape)

    def clear(self) -> None:
        """Gives up graphs, and their memory. Nothing may be running."""
        if self._graphs is not None:
            self._graphs.clear()

    def take(self, slot: Slot, places: Sequence[Place]) -> Tensor:
        """Has the device take a step's arrays, which lie in the slot, and make the edits behind them. Returns their
        memory there."""
        memory = slot.upload()
        self.rows.edit(*(place.of(memory) for place in places[-EDIT_ARRAYS:]))
        return memory

    def run(self, slot: Slot, memory: Tensor, places: Sequence[Place], shape: Shape, padded: Shape | None) -> Tensor:
        """Has the device run a step whose arrays it has taken. Returns the sampled tokens, int32 [samples]."""
        of_step = places[:-EDIT_ARRAYS]
        if padded is not None and self._graphs is not None:
            return self._graphs.run(memory, of_step, padded)
        staged = torch.from_numpy(slot.staged)
        rows, starts, query_start = (place.of(staged).numpy() for place in of_step[:3])
        query_lens = np.diff(query_start)
        ends = starts + query_lens
        host = HostLengths(torch.from_numpy(query_lens), torch.from_numpy(ends))
        on_layer = None if padded is not None else self._worker.reading_ahead(rows, ends)
        return self._step(memory, of_step, padded or shape, host, on_layer)

    def _step(
        self,
        memory: Tensor,
        places: Sequence[Place],
        shape: Shape,
        host: HostLengths | None = None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """Runs a step whose arrays lie there.

        host: its rows' lengths, unless it is captured for others. on_layer: brings the streamed blocks that it reads;
            None if there are none.
        """
        return self._step_over(self.rows, self._worker.pool, memory, places, shape, host, on_layer)

    @torch.inference_mode()
    def _step_over(
        self,
        there: DeviceRows,
        pool: DevicePool,
        memory: Tensor,
        places: Sequence[Place],
        shape: Shape,
        host: HostLengths | None,
        on_layer: OnLayer | None = None,
    ) -> Tensor:
        """Runs a step of these rows over this pool."""
        rows, starts, query_start, common, last, written, *choices = (place.of(memory) for place in places)
        lengths = shape.tokens, shape.longest_query, shape.longest_context
        queries = Queries(rows, starts, query_start, common, *lengths, host)
        token_ids, batch = there.inputs(queries)
        decoder = self._worker.decoder
        batch, caches = pool.attended(batch, streams=on_layer is not None)
        hidden = decoder.forward(token_ids, batch, caches, on_layer)
        if not shape.samples:
            return rows[:0]
        logits = decoder.logits(hidden[last] if shape.picks else hidden)
        tokens = self._sampling.choose_on_device(
            logits, DeviceChoices(*choices) if shape.draws else None, truncate=shape.truncates
        )
        if self._exchange is not None:
            self._exchange.broadcast(tokens)  # devices of different kinds may round differently where they draw
        there.write(written, tokens)
        return tokens
