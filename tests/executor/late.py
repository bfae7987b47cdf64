"""Runs requests over a scheduler and an executor whose steps are collected late, at random times."""

from __future__ import annotations

import random
from collections import defaultdict, deque

from pagemill.config import EngineConfig
from pagemill.engine.build import build
from pagemill.executor.interface import Executor, StepHandle
from pagemill.memory.digest import root_digest
from pagemill.scheduling.sequence import Request
from pagemill.scheduling.step_plan import StepResult

Tokens = dict[tuple[str, int], list[int]]


class Late:
    """Drives an executor. tokens: what each sequence has got, by (request id, index)."""

    def __init__(self, config: EngineConfig, executor: Executor, seed: int = 0, depth: int = 3) -> None:
        self.executor = executor
        self.memory, _, self.scheduler, _ = build(config, executor, False, None)
        self.tokens: Tokens = defaultdict(list)
        self.errors: dict[str, Exception] = {}
        self.depth = depth
        self.most = 0
        self._random = random.Random(seed)
        self._flights: deque[StepHandle] = deque()

    def add(self, requests) -> None:
        for one in requests:
            self.scheduler.add(as_scheduled(one))

    def step(self) -> None:
        """Plans and submits a step, or collects one."""
        plan = self.scheduler.schedule(0.0) if len(self._flights) < self.depth else None
        if plan is not None:
            self.executor.apply(plan)
            self._flights.append(self.executor.submit(plan))
            self.most = max(self.most, len(self._flights))
        if plan is None or self._random.random() < 0.4:
            self.collect()

    def collect(self) -> None:
        if self._flights:
            handle = self._flights.popleft()
            result = self.executor.collect(handle)
            result.check(handle.plan)
            self.take(result)

    def take(self, result: StepResult) -> None:
        for update in self.scheduler.commit(result, 0.0):
            request = update.sequence.request
            self.tokens[request.request_id, update.sequence.index] += update.tokens
            if update.error is not None:
                self.errors[request.request_id] = update.error
        self.memory.check()

    def resize(self, frames: int) -> None:
        """Gives the pool another number of frames, between two steps."""
        while self._flights:
            self.collect()
        self.executor.apply(self.scheduler.resize(frames, 0.0))
        self.executor.resize(frames)
        self.take(StepResult())

    def run(self) -> Tokens:
        while self.scheduler.has_work():
            self.step()
        while self._flights:
            self.collect()
        return self.tokens


def as_scheduled(one) -> Request:
    """Returns what a scheduler takes for an engine's request."""
    return Request(
        request_id=one.request_id,
        prompt_token_ids=one.prompt_token_ids,
        params=one.params,
        seed=one.params.seed or 0,
        priority=0,
        arrival_s=0.0,
        root=root_digest(b"model", "format", "numerics", ""),
        max_len=len(one.prompt_token_ids) + one.params.max_tokens,
    )
