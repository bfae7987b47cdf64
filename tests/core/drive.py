"""Drives an EngineCore from tests: requests in, tokens and the logits behind them out."""

from __future__ import annotations

from dataclasses import dataclass, field

import psutil
import torch

from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.executor import ranks
from pagemill.sampling.params import SamplingParams, TokenLogprobs


def request(name: str, prompt: list[int], params: SamplingParams, **fields) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_s=0.0, **fields)


def ranks_of(pid: int) -> list[psutil.Process]:
    """Returns the ranks that a process has started."""
    return [child for child in psutil.Process(pid).children() if ranks.MODULE in " ".join(child.cmdline())]


@dataclass
class Run:
    """By (request id, index): tokens, log probabilities (of the prompt first), the last output; by request id: prompt
    tokens found in the cache; by (request id, index, position): the logits.
    """

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    last: dict[tuple[str, int], SequenceOutput] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprobs | None]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    logits: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def take(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            key = (output.request_id, output.index)
            self.tokens.setdefault(key, []).extend(output.new_token_ids)
            found = self.logprobs.setdefault(key, [])
            found += [*(output.prompt_logprobs or []), *(output.logprobs or [])]
            self.cached[output.request_id] = output.num_cached_tokens
            if output.finish_reason is not None:
                assert key not in self.last, "a sequence ended twice"
                self.last[key] = output


def record_logits(core: EngineCore, run: Run) -> None:
    sampler, scheduler = core.executor.sampler, core.scheduler
    sample = sampler.sample

    def recording(logits, rows):
        flight = scheduler.state.batch.flights[-1]
        for i, (position, index) in enumerate(flight.samples):
            entry = flight.entries[position]
            run.logits[entry.sequence.request.request_id, index or entry.sequence.index, entry.end] = logits[i].clone()
        return sample(logits, rows)

    sampler.only_argmax = lambda rows: False  # else there are no logits
    sampler.sample = recording


def drive(core: EngineCore, requests: list[EngineRequest], *, every: int = 0, record: bool = False) -> Run:
    """Runs all requests to their end; with `every` > 0 they arrive one per that many steps."""
    run = Run()
    if record:
        record_logits(core, run)
    left = list(requests)
    steps = 0
    while left or core.has_work():
        while left and (every == 0 or steps % every == 0 or not core.has_work()):
            core.add_request(left.pop(0))
            if every:
                break
        run.take(core.step())
        steps += 1
    stats = core.stats()
    assert stats.frames_active == 0
    assert stats.running == stats.waiting == 0
    return run
