"""StepLoop: gives plans to an executor, and takes each result before the next plan; or after it, where steps overlap.

Where the executor overlaps steps, the next one is applied and submitted while this one runs: what the host does for a
step then takes no time of the device's. At most one step is in flight when a plan is made.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pagemill.engine import faults
from pagemill.errors import EngineDeadError
from pagemill.executor.interface import Executor, StepHandle
from pagemill.scheduling.scheduler import Scheduler
from pagemill.scheduling.sequence import SequenceUpdate
from pagemill.scheduling.step_plan import StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SubmittedStep:
    """A step in flight.

    begun, planned: when its plan was begun, and made.
    pending: what came of submitting it; None before, and once the executor has been asked for its result.
    """

    plan: StepPlan
    begun: float
    planned: float
    pending: StepHandle | Exception | None = None


class StepLoop:
    """Holds the steps in flight: none between two calls, or one where the executor overlaps steps.

    A step that fails as a whole is run again in parts (`faults`). What was submitted behind it has read tokens that
    never came, so it is void: it runs again once the first one's tokens are there, without the rows that have failed
    with that one.

    save_evicted: copies evicted blocks out of their frames, before a plan is applied.
    start_loads: begins loads into frames, once the edits of a plan have been applied.
    note_step: is told of each step that is over, of the seconds that it took, and of those without planning: since its
        plan was begun, or made, but not from before the end of the step in front of it. So where steps overlap both are
        the time from one step's end to the next one's.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        save_evicted: Callable[[], None],
        start_loads: Callable[[], None],
        note_step: Callable[[StepPlan, float, float], None],
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._save_evicted = save_evicted
        self._start_loads = start_loads
        self._note_step = note_step
        self._ahead = int(executor.facts.overlaps)
        self._flights: deque[SubmittedStep] = deque()
        self._last_end = 0.0

    @property
    def in_flight(self) -> bool:
        return bool(self._flights)

    def settle(self) -> list[SequenceUpdate]:
        """Takes in what is in flight, unless the next step should be planned ahead of that."""
        return [] if not self._flights or self._scheduler.plans_ahead else self.drain()

    def drain(self) -> list[SequenceUpdate]:
        """Takes in all that is in flight. Raises as `run` does."""
        updates: list[SequenceUpdate] = []
        with self._losing_all():
            while self._flights:
                updates += self._take_in()
        return updates

    def run(self, schedule: Callable[[], StepPlan | None], begun: float) -> list[SequenceUpdate] | None:
        """Begins the step that `schedule` plans, and takes in the one before it, or itself where steps do not overlap.
        Returns None, and does nothing, where it plans none.

        Whom a fault of a step ends is among the updates. Raises what is more than that (EngineDeadError, an interrupt);
        all in flight is lost then. begun: when the plan was begun.
        """
        with self._losing_all():
            plan = schedule()
            if plan is None:
                return None
            flight = SubmittedStep(plan, begun, time.monotonic())
            self._flights.append(flight)
            try:
                self._save_evicted()
                lost = self._executor.apply(plan)
                self._start_loads()
            except EngineDeadError:
                raise
            except Exception as error:
                return self._lose_last(error)
            try:
                flight.pending = self._executor.submit(plan)
            except EngineDeadError:
                raise
            except Exception as error:
                flight.pending = error
            updates = self._end_lost(set(lost)) if lost else []
            while len(self._flights) > self._ahead:
                updates += self._take_in()
        return updates

    def _take_in(self) -> list[SequenceUpdate]:
        """Takes in the oldest step in flight; all of them if it has failed as a whole."""
        try:
            result = self._collect()
        except EngineDeadError:
            raise
        except Exception as error:
            return self._run_again(error)
        return self._commit(result)

    def _collect(self) -> StepResult:
        """Returns the result of the oldest step in flight. Raises what failed it."""
        flight = self._flights[0]
        pending, flight.pending = flight.pending, None
        if isinstance(pending, Exception):
            raise pending
        assert pending is not None
        result = self._executor.collect(pending)
        result.check(flight.plan)
        return result

    def _commit(self, result: StepResult) -> list[SequenceUpdate]:
        """Commits the oldest step in flight."""
        updates = self._end_lost(set())
        flight = self._flights.popleft()
        updates += self._scheduler.commit(result, time.monotonic(), flight.plan.step)
        if result.failed:
            updates += self._end_lost(faults.unread_frames(self._executor, flight.plan, result))
        self._note_end(flight)
        return updates

    def _note_end(self, flight: SubmittedStep) -> None:
        now, last = time.monotonic(), self._last_end
        self._note_step(flight.plan, now - max(flight.begun, last), now - max(flight.planned, last))
        self._last_end = now

    # Faults

    def _end_lost(self, frames: set[int]) -> list[SequenceUpdate]:
        return faults.end_lost(self._executor, self._scheduler, frames, time.monotonic())

    def _run_again(self, error: Exception) -> list[SequenceUpdate]:
        """Runs the oldest step in flight in parts, since it has failed, and then those that are void by that."""
        self._forget_results()
        updates: list[SequenceUpdate] = []
        failure: Exception | None = error
        while self._flights:
            plan, going_on = self._flights[0].plan, self._scheduler.going_on()
            try:
                result = faults.run(self._executor, plan, going_on, failure)
            except EngineDeadError:
                raise
            except Exception as without_rows:
                updates += self._lose(without_rows)
            else:
                updates += self._commit(result)
            failure = None
        return updates

    def _lose_last(self, error: Exception) -> list[SequenceUpdate]:
        """Loses the last step, which could not be applied, once the one in front of it has been taken in. If that has
        failed too, it is lost as well: nobody knows on what state its rows would run again."""
        last, updates = self._flights[-1], list[SequenceUpdate]()
        if self._flights[0] is not last:  # whose commit would publish blocks that were to be copied
            copied, failure = set(last.plan.work.copy_target.tolist()), faults.step_failure(error)
            updates += self._scheduler.lose(copied, failure, time.monotonic())
            try:
                result = self._collect()
            except EngineDeadError:
                raise
            except Exception as earlier:
                updates += self._lose(earlier)
            else:
                updates += self._commit(result)
        return updates + self._lose(error)

    def _lose(self, error: BaseException) -> list[SequenceUpdate]:
        """Ends what the oldest step in flight concerns."""
        flight = self._flights.popleft()
        ended = self._scheduler.lose_plan(flight.plan, faults.step_failure(error), time.monotonic())
        if not ended:
            logger.error("a step that concerned no request failed: %s: %s", type(error).__name__, error)
        self._note_end(flight)
        return ended

    @contextlib.contextmanager
    def _losing_all(self) -> Iterator[None]:
        """Loses all plans in flight, those that nobody has begun too, with what is more than a fault of one of them."""
        try:
            yield
        except BaseException as error:
            self._forget_results()
            self._flights.clear()
            self._scheduler.lose_all(faults.step_failure(error), time.monotonic())
            raise

    def _forget_results(self) -> None:
        """Collects what nobody has asked for yet of the steps in flight, so that the executor is rid of it."""
        for flight in self._flights:
            pending, flight.pending = flight.pending, None
            if isinstance(pending, StepHandle):
                with contextlib.suppress(Exception):
                    self._executor.collect(pending)
