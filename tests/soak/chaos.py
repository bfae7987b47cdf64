"""A soak: random requests on the real model while everything about its memory changes and fails.

Requests of three tenants, some of them longer than the pool, parallel samples, beams, forks of running requests, turns
of sessions, pins, aborts, drafts, LoRA adapters, embeddings, answers held to forms, other pool sizes and limits, idle
time-outs; and faults (`soak_faults.py`). Engine after engine is drawn (`drawn_engine.py`), so that every KV format and
every way of drafting has its turn. Every answer must be, to the bit, what a calm engine gives, or its beginning where a
fault ended it, and in the end every block is free.

`python -m tests.soak.chaos --seconds 600` is `make soak`; `test_soak.py` runs it for a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
from tests.eager_drafter import Eager
from tests.late_executor import LateExecutor
from tests.soak.drawn_engine import ADAPTERS, FORMATS, HEADS, MODEL, TEXT, DrawnEngine
from tests.soak.soak_faults import Faults

from pagemill import LLM, PoolingParams, SamplingParams, TenantLimits
from pagemill.engine.messages import EngineRequest, Failure
from pagemill.errors import ConfigError, InvalidRequestError, KVMemoryError
from pagemill.executor.load import open_executor
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.worker import immediately
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams

MAX_LEN = 800
"""50 blocks."""
TENANTS = ("default", "calm", "wild")
SALTS = ("", "s")
FORMS = (
    None, None, None, {"regex": "[a-z ]{2,30}"}, {"choice": ["Manchester", "Man", "the Atlas computer"]},
    {"grammar": 'start: ("paging" | /[0-9]{1,3}/ | " ")+'},
    {"json": {"type": "array", "items": {"enum": ["Atlas", 1961, None]}, "minItems": 2}},
)  # fmt: skip
SAMPLING: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"top_p": 0.8, "top_k": 40}, {"min_p": 0.05, "logit_bias": {28: 2.0}},
    {"min_tokens": 6, "stop_token_ids": [28, 30], "structured_outputs": None},
    {"bad_words": [" the"], "allowed_token_ids": [*range(16, 9000)], "structured_outputs": None},
)  # fmt: skip
ENOUGH = 10_000
"""Steps in which everything ends, unless a block that has been lost is waited for."""


@dataclass
class Answer:
    """Holds what has come of one request, by sequence: tokens, log probabilities, how it ended, score and embedding."""

    request: EngineRequest
    state: RequestState | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    score: dict[int, tuple[float | None, bytes | None]] = field(default_factory=dict)

    def take(self, output) -> None:
        index = output.index
        self.tokens.setdefault(index, []).extend(output.new_token_ids)
        self.logprobs.setdefault(index, []).extend([*(output.prompt_logprobs or []), *(output.logprobs or [])])
        if output.finish_reason is not None:
            assert index not in self.ended, f"{output.request_id} ended twice"
            self.ended[index], self.score[index] = output.finish_reason, (output.cumulative_logprob, output.pooled)

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.request.params.n

    @property
    def waits_for_its_form(self) -> bool:
        """Whether it may still be refused: the scheduler learns of it once its form is compiled."""
        return self.request.params.structured_outputs is not None and not any(self.tokens.values())


class Soak:
    """One engine under chaos. `run`, then `settle`, then `differences` against a calm engine."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.drawn = DrawnEngine(folder, seed)
        self.frames, frame_bytes = self.drawn.frames, self.drawn.frame_bytes
        opens = (lambda *args: LateExecutor(open_executor(*args))) if self.drawn.overlaps else open_executor
        with mock.patch("pagemill.engine.core.open_executor", opens):
            self.llm = LLM(
                MODEL, max_model_len=MAX_LEN, max_num_seqs=8, max_num_batched_tokens=96, check_invariants=True,
                kv_memory=self.frames * frame_bytes, kv_host_memory=8 * frame_bytes, kv_disk_memory=160 * frame_bytes,
                kv_disk_path=str(folder), max_sessions=6, tenants={name: TenantLimits() for name in TENANTS[1:]},
                **self.drawn.same, **self.drawn.others,
            )  # fmt: skip
        assert self.llm.stats().block_bytes == frame_bytes
        self.core = self.llm.client.core
        own = self.core.scheduler.drafter
        self.drafters = [own, own, None]
        if self.core.executor.facts.drafts is not None:
            self.drafters += [Eager(seed, most=HEADS, branches=seed % 3)] * 3
        self.core.scheduler.drafter = self.drafters[-1] or own
        self.faults = Faults(self.core, seed)
        self.faults_before = 0
        self.answers: dict[str, Answer] = {}
        self.live: dict[str, Answer] = {}
        self.numbers = iter(range(1 << 30))
        words = self.llm.tokenizer.encode(TEXT * 60)
        self.prompts = [words[at : at + length] for at in (0, 5, 9) for length in (9, 40, 75, 130, 190)]
        self.prompts += [words[:at] + words[5 : 760 - at] for at in (20, 200)]

    # What happens

    def run(self, seconds: float = math.inf, steps: int = 1 << 30) -> None:
        """For so long, or so many steps."""
        actions = {
            self.ask: 30, self.search: 4, self.embed: 3, self.fork: 8, self.talk: 20, self.change_sessions: 3,
            self.pin: 4, self.unpin: 4, self.abort: 3, self.resize: 4, self.limit: 4, self.faults.change: 8,
            self.faults.rot: 2, self.speculate: 3,
        }  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.counts["steps"] < steps:
            if len(self.live) < 14 or self.random.random() < 0.2:
                (action,) = self.random.choices([*actions], [*actions.values()])
                with contextlib.suppress(InvalidRequestError, ConfigError, KVMemoryError):
                    action()
                    self.counts[action.__name__] += 1
            self.step()
            self.counts["steps"] += 1

    def step(self) -> None:
        faults, self.faults_before = self.faults_before, self.faults.ended  # layers are read ahead of their step
        for output in self.core.step():
            answer = self.answers[output.request_id]
            answer.take(output)
            answer.state.add(output, time.monotonic())
            self.counts["streamed"] += (output.kv_blocks or (0, 0))[1] > 0
            if output.finish_reason == "error" and answer.waits_for_its_form and is_refusal(output.error):
                self.counts["refused late"] += 1
            elif output.finish_reason == "error":
                assert self.faults.ended > faults, f"{output.request_id} failed: {output.error}"
                self.counts["ended by faults"] += 1
            if answer.is_over:
                self.live.pop(output.request_id, None)
                if answer.ended[0] == "error":
                    self.llm.frontend.end_turn(answer.state)
                else:
                    immediately(self.llm.frontend.commit_turn(answer.state))
        if not self.core.has_work():
            self.core.rest()

    def _params(self) -> SamplingParams:
        n, seed = self.random.choice([(1, None), (1, None), (1, 1), (2, 2), (3, 3)])
        params = {
            "max_tokens": self.random.choice([2, 8, 20, 40]), "ignore_eos": self.random.random() < 0.5,
            "structured_outputs": self.random.choice(FORMS),
            "prompt_logprobs": 1 if self.random.random() < 0.1 else None,
        } | self.random.choice(SAMPLING)  # fmt: skip
        return SamplingParams(n=n, seed=seed, temperature=0.0 if seed is None else 0.9, logprobs=1, **params)

    def _add(self, state: RequestState, fork_of: tuple[str, int] | None = None) -> None:
        request = state.asked
        request.fork_of = fork_of
        answer = Answer(request, state)
        try:
            self.core.add_request(request)
        except InvalidRequestError:
            self.counts["refused"] += 1
            self.llm.frontend.end_turn(state)
            raise
        self.counts["held to forms"] += request.params.structured_outputs is not None
        self.answers[request.request_id] = self.live[request.request_id] = answer

    def _process(self, prompt, params, tenant: str, salt: str, **how: Any):
        prompt = {"prompt_token_ids": prompt, "cache_salt": salt}
        name = f"r{next(self.numbers)}"
        return self.llm.frontend.inputs.process(
            prompt, params, name, priority=self.random.randint(-1, 1), tenant=tenant, **how
        )

    def _adapter(self) -> int:
        return self.random.choice((0, 0, 0, *ADAPTERS))

    def ask(self) -> None:
        tenant, salt = self.random.choice(TENANTS), self.random.choice(SALTS)
        prompt = self.random.choice(self.prompts)
        self._add(self._process(prompt, self._params(), tenant, salt, adapter=self._adapter()))

    def embed(self) -> None:
        pooling = PoolingParams(pooling_type=self.random.choice(["LAST", "MEAN"]))
        self._add(
            self._process(self.random.choice(self.prompts), None, self.random.choice(TENANTS), "", pooling=pooling)
        )

    def search(self) -> None:
        params = BeamSearchParams(self.random.choice([2, 3]), max_tokens=8, ignore_eos=True)
        prompt, tenant = self.random.choice(self.prompts), self.random.choice(TENANTS)
        self._add(self._process(prompt, params, tenant, "", adapter=self._adapter()))

    def fork(self) -> None:
        going_on = [
            a for a in self.live.values() if a.request.beam is None and a.request.pin is None and any(a.tokens.values())
        ]
        if going_on:
            answer = self.random.choice(going_on)
            index = self.random.choice([*answer.tokens])
            prompt = answer.request.prompt_token_ids + answer.tokens[index]
            of = answer.request
            item = self._process(prompt, self._params(), of.tenant, of.cache_salt, adapter=of.adapter)
            self._add(item, fork_of=(of.request_id, index))

    def talk(self) -> None:
        space, name = Namespace(self.random.choice(TENANTS), self.random.choice(SALTS)), self.random.choice("xy")
        piece = self.random.choice(self.prompts)[: self.random.choice([5, 30])]
        adapter = self.llm.client.facts.adapters[0] if name == "y" else None
        params = SamplingParams(
            temperature=0.0, max_tokens=self.random.choice([3, 10]), logprobs=1,
            structured_outputs=self.random.choice(FORMS),
        )  # fmt: skip
        request = self.llm.frontend.turns.begin(name, space, piece, params, f"r{next(self.numbers)}", adapter=adapter)
        self._add(request)

    def change_sessions(self) -> None:
        """Forks a session if there is one, or deletes one that has grown."""
        store = self.llm.frontend.turns.store
        records = store.list(None)
        if records:
            record = self.random.choice(records)
            if record.num_tokens > 150:
                store.delete(record.name, record.space)
            else:
                store.fork(record.name, record.space, f"fork{next(self.numbers)}")

    def pin(self) -> None:
        tenant, salt = self.random.choice(TENANTS), self.random.choice(SALTS)
        prompt = {"prompt_token_ids": self.random.choice(self.prompts), "cache_salt": salt}
        expires_s = self.random.choice([None, 0.5])
        name = self.random.choice("pq")
        self._add(immediately(self.llm.frontend.prepare_pin(prompt, name, expires_s, salt, tenant)))

    def unpin(self) -> None:
        for pin in self.llm.pins()[:1]:
            self.llm.unpin(pin.name, cache_salt=pin.cache_salt, tenant=pin.tenant)

    def abort(self) -> None:
        for name in self.random.sample([*self.live], min(2, len(self.live))):
            self.core.abort([name])
            answer = self.live.pop(name)
            self.llm.frontend.end_turn(answer.state)

    def resize(self) -> None:
        frames = self.frames * self.random.choice([20, 30, 40, 55]) // 40
        self.llm.resize_kv_memory(self.random.choice(["used", None, frames * self.drawn.frame_bytes]))

    def limit(self) -> None:
        limits = TenantLimits(
            guaranteed_blocks=self.random.choice([0, 0, "20%", 10]),
            max_blocks=self.random.choice([None, None, 35, "60%"]),
            max_blocks_per_request=self.random.choice([None, 20]),
            max_blocks_per_session=self.random.choice([None, 12]),
            idle_timeout_s=self.random.choice([None, 0.3]),
            max_running=self.random.choice([None, 1, 2, 4]),
            weight=self.random.choice([1.0, 0.5]),
        )
        self.llm.set_tenant(self.random.choice(TENANTS), limits)

    def speculate(self) -> None:
        """Goes on with drafts, or without."""
        self.core.scheduler.drafter = self.random.choice(self.drafters)

    # What is left

    def settle(self) -> None:
        """Lets everything end. Afterwards every block is free, and nothing is held."""
        self.faults.stop()
        for _ in range(ENOUGH):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), [*self.live]
        assert not self.live, [*self.live]
        for pin in self.llm.pins():
            self.llm.unpin(pin.name, cache_salt=pin.cache_salt, tenant=pin.tenant)
        stats = self.llm.stats()
        assert (stats.running, stats.waiting, stats.frames_active, stats.blocks_streamed) == (0, 0, 0, 0)
        for name in TENANTS:
            self.llm.set_tenant(name, TenantLimits(idle_timeout_s=1e-6))
        self.core.rest()
        self.core.memory.check()
        stats = self.llm.stats()
        assert stats.frames_free == stats.frames, stats
        assert all(tenant.blocks_active == tenant.blocks_cached == 0 for tenant in stats.tenants.values())
        self.stats = stats
        self.llm.close()

    def differences(self) -> list[str]:
        """Requests whose answer is not that of a calm engine: no cache, no tiers, a large pool, other steps. What
        had come of one that was aborted must be its beginning."""
        calm: dict[str, Answer] = {}
        with LLM(MODEL, max_model_len=MAX_LEN, enable_prefix_caching=False, max_num_seqs=24, kv_memory="1GiB",
                 max_num_batched_tokens=512, **self.drawn.same) as llm:  # fmt: skip
            core = llm.client.core
            alike: dict[bytes, str] = {}
            same_as = {}
            for name, answer in self.answers.items():
                request = msgspec.structs.replace(
                    answer.request, request_id="", pin=None, pin_expires_s=None, fork_of=None, in_session=False,
                    tenant="default", cache_salt="", priority=0, arrival_s=0.0,
                )  # fmt: skip
                key = msgspec.msgpack.encode(request)
                same_as[name] = alike.setdefault(key, name)
                if same_as[name] == name:
                    request.request_id = name
                    calm[name] = Answer(request)
                    core.add_request(request)
            while core.has_work():
                for output in core.step():
                    calm[output.request_id].take(output)
        self.counts["compared"] = len(self.answers)
        self.calm = {name: calm[same] for name, same in same_as.items()}
        return [name for name, answer in self.answers.items() if not _agrees(answer, self.calm[name])]


def _agrees(answer: Answer, calm: Answer) -> bool:
    if answer.is_over and "error" not in answer.ended.values():
        return (answer.tokens, answer.logprobs, answer.ended, answer.score) == (
            calm.tokens, calm.logprobs, calm.ended, calm.score
        )  # fmt: skip
    begun = [(answer.tokens[i], calm.tokens[i]) for i in answer.tokens]
    begun += [(answer.logprobs[i], calm.logprobs[i]) for i in answer.logprobs]
    return all(part == whole[: len(part)] for part, whole in begun)


def is_refusal(failure: Failure) -> bool:
    return isinstance(failure.to_error(), InvalidRequestError)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of all engines together")
    parser.add_argument("--steps", type=int, default=1 << 30, help="end each engine after so many, if that is sooner")
    parser.add_argument("--seed", type=int, default=0, help="of the first engine; the next has the next")
    parser.add_argument("--engines", type=int, default=len(FORMATS), help="so many are drawn, one after another")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    wrong = 0
    for seed in range(args.seed, args.seed + args.engines):
        with tempfile.TemporaryDirectory() as folder:
            soak = Soak(Path(folder), seed)
            soak.run(args.seconds / args.engines, args.steps)
            soak.settle()
            different = soak.differences()
        drafts = f"{soak.stats.accepted_tokens} of {soak.stats.draft_tokens} drafts accepted"
        say(f"seed {seed}: {soak.drawn}\ndone:   {dict(soak.counts)}, {drafts}\nfaults: {dict(soak.faults.counts)}")
        say(f"answers that differ from the calm engine's: {different or 'none'}")
        for name in different:
            say(f"{name}: {soak.answers[name]}\nnot {soak.calm[name]}")
        wrong += bool(different)
    return bool(wrong)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
