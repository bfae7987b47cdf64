"""GpuExecutor: the executor of a device that works while the host does something else.

The rows lie on the device. A plan becomes one copy of a few arrays, from which the device computes the rest, and the
tokens that it samples become the input of the next step where they are: `submit` waits for nothing, and `collect` for
these tokens only. Rows that need the host between two tokens (`_runs_ahead`) run as on CPU.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from pagemill.errors import DeviceLostError, EngineDeadError, NonFiniteLogitsError
from pagemill.executor.device import Device
from pagemill.executor.device_rows import Edits
from pagemill.executor.device_steps import DeviceSteps, Together
from pagemill.executor.graphs import Shape
from pagemill.executor.interface import ExecutorMemory, GraphFacts, StepHandle
from pagemill.executor.local import LocalExecutor, Parts
from pagemill.executor.staging import Place, Ring, Slot
from pagemill.executor.step_arrays import nobodys_arrays, padded_arrays, step_arrays
from pagemill.executor.trial_steps import LargestStep
from pagemill.scheduling.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)

TELL_S = 10.0
"""Seconds after which captures that go on tell how far they are."""


class LaunchedStep:
    """Holds a step that the device has been given, until its tokens have come.

    places: by sample, where its token is among the results. seats: by sample, how often its row had been given when the
    step began.
    """

    def __init__(self, plan: StepPlan, slot: Slot, places: NDArray[np.int32], seats: NDArray[np.int64]) -> None:
        self.plan = plan
        self.slot = slot
        self.places = places
        self.seats = seats
        self.result: StepResult | None = None


class GpuExecutor(LocalExecutor):
    """Implements `Executor` on a `Device`. enforce_eager: no decode steps are captured as graphs.

    largest: what steps are like at most.
    measures: whether such a step is run at once, and what steps need counts as used memory from then on.
    together: joins the device with others; see `DeviceSteps`.
    If a step fails, those submitted after it, which stand on its tokens, fail too, until it has been collected.
    Raises KVMemoryError if the largest step has too little memory.
    """

    def __init__(
        self,
        device: Device,
        parts: Parts,
        *,
        largest: LargestStep,
        measures: bool,
        enforce_eager: bool = False,
        together: Together | None = None,
    ) -> None:
        facts = replace(parts.facts, overlaps=True, counts_steps=measures)
        super().__init__(parts._replace(facts=facts), streams=device)
        self._accelerator = device
        max_num_seqs = parts.max_num_seqs
        eager = enforce_eager or parts.draft is not None  # with drafts on the device, no step runs ahead of the host
        self._steps = DeviceSteps(device, self, parts.backend, max_num_seqs, facts.max_model_len, eager, together)
        self._edits = Edits(self.rows)
        self._ring = Ring(device, max_num_seqs)
        self._flights: deque[LaunchedStep] = deque()
        self._seats = np.zeros(max_num_seqs, np.int64)
        self._failed: Exception | None = None
        """Why a step that was submitted, and has not been collected, failed."""
        self._largest = largest
        if measures:
            self.measure()

    def measure(self) -> None:
        """Measures what the largest steps need beside the pool."""
        self._steps.measure(self._largest, self._shape, "host" in self.facts.streams)

    def compile(self) -> None:
        """Has the kernels compiled that steps use."""
        self._steps.compile(self._largest, self._shape)

    def warm_up(self) -> str:
        """Has kernels compiled, and captures the usual decode steps, as steps of nobody's rows. Does what the memory
        allows."""
        logger.info("compiling the kernels of steps, which takes minutes where Triton has not kept them")
        begin = time.monotonic()
        self.compile()
        done = f"kernels compiled in {time.monotonic() - begin:.1f} s"
        logger.info(done)
        if captured := self._capture_ahead():
            logger.info(captured)
            done = f"{done}, {captured}"
        return done

    def _capture_ahead(self) -> str:
        """Captures the usual decode steps. Returns how many, in words; nothing if there are none."""
        begin = told = time.monotonic()
        for shape in self._steps.ahead():
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                logger.info("%d decode steps are captured; %d rows come next", self.graphs().number, shape.tokens)
            self._steps.survives(f"decode steps of {shape.tokens} rows", self._capture, shape)
        count, nbytes = self.graphs()
        seconds = time.monotonic() - begin
        return f"{count} decode steps captured as graphs in {seconds:.1f} s, {nbytes >> 20} MiB" if count else ""

    @torch.inference_mode()
    def _capture(self, shape: Shape) -> None:
        """Runs a decode step of rows without queries, and with that captures it."""
        rows, slot = self._steps.rows, self._ring.take()
        arrays = nobodys_arrays(shape.tokens, rows.nobody, rows.nowhere)
        try:
            self.give(slot, slot.stage([*arrays, *self._edits.take()]), shape, shape)
        finally:
            self._accelerator.synchronize()
            self._ring.give_back(slot)

    def graphs(self) -> GraphFacts:
        return self._steps.graphs

    def memory(self) -> ExecutorMemory:
        return self._steps.memory()

    def apply(self, plan: StepPlan) -> list[int]:
        self._seats[[new.row for new in plan.new_rows]] += 1
        if self.draft is None:
            self._edits.note_plan(plan)
        try:
            return super().apply(plan)
        except RuntimeError as error:
            if (lost := self._lost(error)) is not None:
                raise lost from error
            raise

    def submit(self, plan: StepPlan) -> StepHandle:
        if not len(plan.rows):
            return StepHandle(plan, StepResult())
        if self._failed is None:
            try:
                return StepHandle(plan, self._launch(plan) if self._runs_ahead(plan) else self._run_here(plan))
            except Exception as error:
                self._failed = self._lost(error) or error
        return StepHandle(plan, self._failed)

    def collect(self, handle: StepHandle) -> StepResult:
        if isinstance(handle.pending, LaunchedStep):
            return self._land(handle.pending)
        if isinstance(handle.pending, Exception) and not isinstance(handle.pending, EngineDeadError):
            self._failed = None
        return super().collect(handle)

    def resize(self, num_frames: int) -> None:
        self._steps.check_growth(num_frames)
        try:
            super().resize(num_frames)
        except RuntimeError as error:
            if (lost := self._lost(error)) is not None:
                raise lost from error
            raise

    def _runs_ahead(self, plan: StepPlan) -> bool:
        """Returns whether a plan's rows need nothing of the host until their tokens are there."""
        return (
            self.draft is None
            and not (len(plan.draft_tokens) or len(plan.prompt_logprobs) or len(plan.pooled))
            and not self.rows.adapter_numbers[plan.rows].any()
            and self.sampler.samples_on_device(plan.sample_to, truncated=self._steps.truncates)
        )

    def _streams_blocks(self, plan: StepPlan) -> bool:
        """Returns whether a plan's rows read streamed frames: others in each step, so that no graph can hold it."""
        return self.pool.streamed_view is not None and any(map(len, self.streamed_frames(plan)))

    def _run_here(self, plan: StepPlan) -> StepResult:
        """Runs a step as on CPU, by what the host knows: all tokens so far. Waits for it."""
        for flight in [*self._flights]:
            self._land(flight)
        result = self.run(plan)
        if self.draft is not None:  # then no step runs by what lies on the device
            return result
        ends = (plan.starts + plan.query_lens)[plan.sample_from]
        for row, begin, end in zip(plan.sample_to.tolist(), ends + 1 - plan.max_accepted, ends + 1, strict=True):
            known = self.rows.tokens[row, begin:end]
            np.maximum(known, 0, out=known)  # of a row that has failed, and may be in the next plan already
            self._edits.note_tokens(row, int(begin), int(end))
        return result

    @torch.inference_mode()
    def _launch(self, plan: StepPlan) -> LaunchedStep:
        """Gives a step to the device."""
        rows, ends = plan.sample_to, (plan.starts + plan.query_lens)
        choices = self.sampler.choices_ahead(rows)
        tokens = plan.num_tokens
        shape = Shape(
            tokens=tokens,
            longest_query=int(plan.query_lens.max()),
            longest_context=int(ends.max()),
            samples=len(rows),
            picks=plan.forks or len(rows) < tokens,
            draws=bool(choices.temperature.any()),
            truncates=choices.truncate,
        )
        decodes = shape.longest_query == 1 and len(rows) > 0 and not plan.forks and not self._streams_blocks(plan)
        padded = self._steps.padded(shape) if decodes else None
        size = len(plan.rows) if padded is None else padded.tokens
        order, common = self.common_keys.find(plan.rows, plan.starts, plan.query_lens, size, moves=True)
        given, samples = plan, np.arange(len(rows))
        if order is not None:
            given, samples = plan.in_order(order)
            choices = choices.at(samples)
        written = self._steps.rows.place(rows, ends[plan.sample_from])[samples]
        places = np.empty(len(rows), np.int32)
        if padded is None:
            places[samples] = np.arange(len(rows))
            arrays = step_arrays(given, common, written, choices)
        else:
            places[samples] = given.sample_from
            nobody, nowhere = self._steps.rows.nobody, self._steps.rows.nowhere
            arrays = padded_arrays(given, common, written, choices, padded.tokens, nobody, nowhere)
        slot = self._ring.take()
        try:
            self.give(slot, slot.stage([*arrays, *self._edits.take()]), shape, padded)
            slot.download(int(places.max(initial=-1)) + 1)
        except BaseException:
            self._accelerator.synchronize()  # it may still read what the slot holds
            self._ring.give_back(slot)
            raise
        self.sampler.note_ahead(rows)
        flight = LaunchedStep(plan, slot, places, self._seats[rows])
        self._flights.append(flight)
        return flight

    def give(self, slot: Slot, places: Sequence[Place], shape: Shape, padded: Shape | None) -> None:
        """Has the device take a step's arrays, with the edits that it has not got yet, and run it."""
        memory = self._steps.take(slot, places)
        self._edits.clear()
        tokens = self._steps.run(slot, memory, places, shape, padded)
        if len(tokens):
            slot.results[: len(tokens)].copy_(tokens)

    def _land(self, flight: LaunchedStep) -> StepResult:
        """Waits for a step's tokens, and returns its result."""
        if flight.result is not None:
            return flight.result
        plan = flight.plan
        self._flights.remove(flight)
        try:
            tokens = flight.slot.wait(int(flight.places.max(initial=-1)) + 1)[flight.places]
        except RuntimeError as error:
            if (dead := self._lost(error)) is not None:
                raise dead from error
            raise
        self._ring.give_back(flight.slot)
        same = self._seats[plan.sample_to] == flight.seats
        ends = (plan.starts + plan.query_lens)[plan.sample_from]
        self.rows.tokens[plan.sample_to[same], ends[same]] = np.maximum(tokens[same], 0)
        failed: dict[int, Exception] = {
            int(plan.sample_from[i]): NonFiniteLogitsError.of("logits") for i in np.flatnonzero(tokens < 0)
        }
        lost = [row in failed for row in plan.sample_from.tolist()]
        accepted = [[] if gone else [token] for gone, token in zip(lost, tokens.tolist(), strict=True)]
        flight.result = StepResult(accepted, [None] * len(accepted), failed)
        return flight.result

    def _lost(self, error: Exception) -> EngineDeadError | None:
        """Returns what an error of a step means if the device does no more work; None if it does. Where memory was too
        little, graphs give theirs up: the step is run again."""
        if isinstance(error, RuntimeError):
            try:
                self._accelerator.synchronize()
            except RuntimeError as last:
                self._failed = lost = DeviceLostError.of(self._accelerator.where, last)
                return lost
        if isinstance(error, torch.OutOfMemoryError):
            self._give_memory_up()
        return None

    def _give_memory_up(self) -> None:
        """Gives up the memory of graphs, for the step that is run again."""
        if (graphs := self.graphs()).number:
            what = (
                "a step had too little memory: %d decode steps give up their graphs, %d MiB, until they come up again"
            )
            logger.warning(what, graphs.number, graphs.nbytes >> 20)
            self._steps.clear()
