"""Faults of a device: whom they end, and what those are told. Everybody else goes on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pagemill.errors import EngineDeadError, KVStoreError, PagemillError, ResizeFailedError, StepFailedError
from pagemill.executor.interface import Executor
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan, StepResult


def run(executor: Executor, plan: StepPlan, going_on: Sequence[bool], failure: Exception | None = None) -> StepResult:
    """Runs a plan whose edits have been applied; if that fails, runs it in halves, until the rows that cannot run have
    failed alone.

    going_on: by row, whether its sequence goes on. Another's row may belong to somebody else by now: it is left out, as
        if it had failed.
    failure: why the plan has failed already as a whole; None: it has not been tried.

    Raises the executor's error if the plan has no rows that could fail, and EngineDeadError where it is broken as a
    whole.
    """
    rows = len(plan.rows)
    if rows and not any(going_on):
        return StepResult.failure(plan, StepFailedError("this request ended while its step ran"))
    if failure is None and all(going_on):
        try:
            result = executor.collect(executor.submit(plan))
            result.check(plan)
            return result
        except EngineDeadError:
            raise
        except Exception as error:
            failure = error
    if failure is not None:
        if rows == 0:
            raise failure
        if rows == 1:
            return StepResult.failure(plan, step_failure(failure))
    half = rows // 2
    first = run(executor, plan.select(0, half), going_on[:half])
    return first.join(run(executor, plan.select(half, rows), going_on[half:]), half)


def end_lost(executor: Executor, scheduler: Scheduler, frames: set[int], now: float) -> list[SequenceUpdate]:
    """Ends what needs contents of these frames, or of any streamed frame if the disk has lost some of those."""
    if executor.take_loss():
        frames.update(scheduler.memory.streamed.numbers)
    if not frames:
        return []
    failure = KVStoreError(
        "the disk has lost blocks of this context, which is longer than the KV pool; see the log, and name another "
        "kv_disk_path"
    )
    return scheduler.lose(frames, failure, now)


def unread_frames(executor: Executor, plan: StepPlan, result: StepResult) -> set[int]:
    """Returns the streamed frames of rows that failed because the disk could not read some of them."""
    rows = [row for row, error in result.failed.items() if isinstance(error, KVStoreError)]
    of_rows = [executor.streamed_frames(plan.select(row, row + 1)) for row in rows]
    return {int(frame) for groups in of_rows for frames in groups for frame in frames}


def undo_resize(
    scheduler: Scheduler, plan: StepPlan, before: int, error: BaseException
) -> tuple[list[SequenceUpdate], ResizeFailedError]:
    """Gives the pool the `before` frames back that it had until a resize whose plan the device has not carried out.

    Returns the ends of the requests whose blocks were to be moved, and what to tell who asked for the resize.
    """
    what = f"the KV pool of {before} blocks could not be resized: {type(error).__name__}: {error}"
    failure = ResizeFailedError(f"{what}; blocks of this request were to be moved and are lost: send it again")
    pins = scheduler.pins.list()
    ended = scheduler.undo_resize(plan, before, failure, time.monotonic())
    requests, kept = {update.sequence.request.request_id for update in ended}, scheduler.pins.list()
    gone = ", ".join(repr(pin.name) for pin in pins if pin not in kept) or "none"
    return ended, ResizeFailedError(
        f"{what}; it keeps its size. Ended: {len(requests)} requests; pins: {gone}. Send and pin these again; "
        f"another resize may succeed",
        param="kv_memory",
    )


def stuck() -> PagemillError:
    """Returns what to tell a request that waits though nothing else runs."""
    return StepFailedError(
        "this request waits, and cannot run although nothing else does: a bug; please report it, and ask again"
    )


def step_failure(error: BaseException) -> PagemillError:
    """Returns what to tell a request that a failed step ends."""
    if isinstance(error, KVStoreError):
        return error
    return StepFailedError(f"the model could not compute this request: {type(error).__name__}: {error}")
