"""An executor that overlaps steps, as the engine sees it, around one that does not; it forbids what `Executor` forbids.

It runs a step when it is submitted, and tells of it only when it is collected, failures too. What was submitted behind
a step that has failed is void.
"""

from __future__ import annotations

from dataclasses import replace

from pagemill.executor.interface import StepHandle


class LateExecutor:
    """inner: the executor that does the work, whose `apply` and `run` tests may replace.

    overlapped: steps that were submitted while another was in flight. voided: those behind one that had failed.
    """

    def __init__(self, inner) -> None:
        self.inner = inner
        self.facts = replace(inner.facts, overlaps=True)
        self.overlapped = self.voided = 0
        self._flights: list[StepHandle] = []
        self._applied = None
        self._last = -1

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def apply(self, plan) -> list[int]:
        assert plan.step > self._last, "plans are applied in order"
        assert len(self._flights) <= 1, "a plan is made ahead of one step only"
        self._last = self._applied = plan.step
        return self.inner.apply(plan)

    def submit(self, plan) -> StepHandle:
        if self._flights:
            (before,) = self._flights
            assert plan.step == self._applied > before.plan.step, "steps are submitted as they are applied"
            self.overlapped += 1
            self._check_behind(before.plan, plan)
            if isinstance(before.pending, Exception):
                self.voided += 1
                handle = StepHandle(plan, RuntimeError("a step before this has failed"))
                self._flights.append(handle)
                return handle
        handle = self.inner.submit(plan)
        self._flights.append(handle)
        return handle

    def collect(self, handle):
        assert self._flights, "collected twice"
        assert handle is self._flights.pop(0), "steps are collected in order"
        return self.inner.collect(handle)

    def resize(self, num_frames) -> None:
        assert not self._flights
        self.inner.resize(num_frames)

    def load_adapter(self, number, path):
        assert not self._flights
        return self.inner.load_adapter(number, path)

    def close(self) -> None:
        assert not self._flights
        self.inner.close()

    def _check_behind(self, before, plan) -> None:
        """Checks that the rows of a step need nothing of the host that the step before is still to bring."""
        new = {row.row for row in plan.new_rows}
        accepts = dict(zip(before.sample_to.tolist(), before.max_accepted.tolist(), strict=True))
        tokens = self.inner.rows.tokens
        for row, start in zip(plan.rows.tolist(), plan.starts.tolist(), strict=True):
            if row in accepts and row not in new:
                assert accepts[row] == 1, "nobody knows yet how many drafts are right"
                assert not self.inner.sampler.params(row).reads_answer, "the host has not read the last token"
                tokens[row, start] = max(0, tokens[row, start])  # none came of a row that failed alone
