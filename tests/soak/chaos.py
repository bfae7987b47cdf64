"""A soak: random requests on the real model while everything about its memory changes and fails.

Requests of three tenants, some of them longer than the pool, parallel samples, beams, forks of running requests, turns
of sessions, pins, aborts, drafts, answers held to forms, other pool sizes and limits, idle time-outs; a disk that is
full, reads that fail, blocks that rot on disk, streamed blocks that cannot be written or read or are lost later, steps
that break, plans that cannot be carried out. The KV format is drawn. Every answer must be, to the bit, what a calm
engine gives, or its beginning where a fault ended it, and in the end every block is free.

`python tests/soak/chaos.py --seconds 600` is `make soak`; `test_soak.py` runs it for a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from pagemill import LLM, SamplingParams, TenantLimits
from pagemill.arguments import arguments_of
from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineRequest, Failure
from pagemill.errors import ConfigError, InvalidRequestError, KVMemoryError, KVStoreError
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.worker import immediately
from pagemill.kvcache import read_ahead, streamed_file
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.kv_format import kv_format
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams

MODEL = "smollm2-135m"
HIDDEN = 576
FORMATS = {"float32": 40, "int4_mixed": 52, "fp8": 40, "int8": 40}
"""Names of KV formats, and the frames of a pool; where the latest tokens have remainders, these need some."""
MAX_LEN = 800
"""50 blocks."""
TENANTS = ("default", "calm", "wild")
SALTS = ("", "s")
FORMS = (
    None, None, None, {"regex": "[a-z ]{2,30}"}, {"choice": ["Manchester", "Man", "the Atlas computer"]},
    {"grammar": 'start: ("paging" | /[0-9]{1,3}/ | " ")+'},
    {"json": {"type": "array", "items": {"enum": ["Atlas", 1961, None]}, "minItems": 2}},
)  # fmt: skip
ENOUGH = 10_000
"""Steps in which everything ends, unless a block that has been lost is waited for."""


@dataclass
class Answer:
    """What has come of one request, by sequence: token ids, log probabilities, how it ended."""

    request: EngineRequest
    state: RequestState | None = None
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    score: dict[int, float | None] = field(default_factory=dict)

    def take(self, output) -> None:
        index = output.index
        self.tokens.setdefault(index, []).extend(output.new_token_ids)
        self.logprobs.setdefault(index, []).extend([*(output.prompt_logprobs or []), *(output.logprobs or [])])
        if output.finish_reason is not None:
            assert index not in self.ended, f"{output.request_id} ended twice"
            self.ended[index], self.score[index] = output.finish_reason, output.cumulative_logprob

    @property
    def is_over(self) -> bool:
        return len(self.ended) == self.request.params.n

    @property
    def waits_for_its_form(self) -> bool:
        """Whether it may still be refused: the scheduler learns of it once its form is compiled."""
        return self.request.params.structured_outputs is not None and not any(self.tokens.values())


class Faults:
    """Of the disk, and of steps. `random` decides; all are mended by `stop`. ending: those that may end requests."""

    ending = ("unplanned", "unwritten", "unread", "lost")

    def __init__(self, core, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.full = self.unreadable = self.breaking = self.harm = 0.0
        self._next: list[tuple[float, float, float, float]] = []
        self._disk: DiskStore = core.tiers.offload.tiers[-1]
        self._streamed = core.executor.pool.streamed_file
        put, read, run, apply = self._disk.put, self._disk.read, core.executor.run, core.executor.apply
        write_below, read_below, read_layer = self._streamed.write, self._streamed.read, read_ahead.read_runs

        def failing_put(*args):
            if self._happens("full", self.full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return put(*args)

        def failing_read(*args):
            if self._happens("unreadable", self.unreadable):
                raise KVStoreError("the disk answers no more")
            return read(*args)

        def failing_run(plan):
            if self._happens("lost", self.harm):
                self._lose()
            # Of several rows: then the engine runs halves of it again. A row that fails alone would be an error.
            if len(plan.rows) > 1 and self._happens("broken steps", self.breaking):
                raise RuntimeError("the device hiccups")
            return run(plan)

        def failing_apply(plan):
            if len(plan.rows) and self._happens("unplanned", self.harm):
                raise RuntimeError("the device is gone")
            return apply(plan)

        def failing_write_below(*args):
            if self._happens("unwritten", self.harm):
                raise KVStoreError("the disk takes no more")
            return write_below(*args)

        def failing_read_below(*args):
            if self._happens("unread", self.harm):
                raise KVStoreError("the disk answers no more")
            return read_below(*args)

        def failing_read_layer(*args):
            return not self._happens("unread", self.harm / 30) and read_layer(*args)

        self._disk.put, self._disk.read = failing_put, failing_read
        core.executor.run, core.executor.apply = failing_run, failing_apply
        self._streamed.write, self._streamed.read = failing_write_below, failing_read_below
        self._patched = streamed_file.written_back, read_layer
        read_ahead.read_runs = failing_read_layer

    def _lose(self) -> None:
        """The system drops what it could not write of streamed blocks, and says so once."""
        taken, due, file = self._patched[0], [False], self._streamed.fileno()
        os.pwrite(file, self.random.randbytes(4096) * (os.fstat(file).st_size // 4096), 0)
        streamed_file.written_back = lambda *at: due.pop() if due else taken(*at)

    @property
    def ended(self) -> int:
        """Faults so far that may have ended requests."""
        return sum(self.counts[what] for what in self.ending)

    def _happens(self, what: str, share: float) -> bool:
        happens = self.random.random() < share
        self.counts[what] += happens
        return happens

    def change(self) -> None:
        """Goes on to other faults, in a random order in which all of them have their turn."""
        if not self._next:
            self._next = [
                (0, 0, 0, 0), (0.3, 0, 0.1, 0), (0, 0.5, 0, 0), (1, 1, 0, 0), (0.1, 0.1, 0.3, 0), (0, 0, 0, 0.08),
            ]  # fmt: skip
            self.random.shuffle(self._next)
        self.full, self.unreadable, self.breaking, self.harm = self._next.pop()

    def rot(self) -> None:
        """Overwrites a few bytes of a block on disk."""
        size = (self._disk.folder / "blocks.dat").stat().st_size
        if size:
            self.counts["rotten"] += 1
            with (self._disk.folder / "blocks.dat").open("r+b") as file:
                file.seek(self.random.randrange(size))
                file.write(b"rotten")

    def stop(self) -> None:
        self.full = self.unreadable = self.breaking = self.harm = 0.0
        streamed_file.written_back, read_ahead.read_runs = self._patched


def save_heads(folder: Path) -> str:
    """Saves heads of random weights for the model, which guess a few tokens, and returns their folder."""
    torch.manual_seed(0)
    weights = {f"blocks.{head}.layers.0.weight": torch.randn(HIDDEN, HIDDEN) / HIDDEN for head in range(3)}
    weights |= {"lm_heads.0.weight": torch.randn(64, HIDDEN), "token_map": torch.arange(0, 640, 10)}
    heads = folder / "heads"
    heads.mkdir(parents=True, exist_ok=True)
    save_file(weights, heads / "model.safetensors")
    (heads / "config.json").write_text('{"original_lm_head": true}', encoding="utf-8")
    return str(heads)


class Soak:
    """One engine under chaos. `run`, then `settle`, then `differences` against a calm engine."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.kv_format = random.Random(seed).choice([*FORMATS])
        self.frames = FORMATS[self.kv_format]
        frame_bytes = self.frame_bytes = 30 * 16 * kv_format(self.kv_format).slot_bytes(3, 64, 64)
        self.llm = LLM(
            MODEL, dtype="float32", kv_cache_dtype=self.kv_format, max_model_len=MAX_LEN, max_num_seqs=8,
            max_num_batched_tokens=96, check_invariants=True, kv_memory=self.frames * frame_bytes,
            kv_host_memory=8 * frame_bytes,
            kv_host_compression=self.random.choice(arguments_of(EngineConfig)["kv_host_compression"].choices),
            speculative_config=self.random.choice(
                [{"method": "ngram"}, {"method": "suffix"}, {"method": "medusa", "model": save_heads(folder)}]
            ),
            kv_disk_memory=160 * frame_bytes, kv_disk_path=str(folder), max_sessions=6,
            tenants={name: TenantLimits() for name in TENANTS[1:]},
        )  # fmt: skip
        self.core = self.llm.client.core
        self.drafter = self.core.scheduler.drafter
        self.faults = Faults(self.core, seed)
        self.answers: dict[str, Answer] = {}
        self.live: dict[str, Answer] = {}
        self.numbers = iter(range(1 << 30))
        words = self.llm.tokenizer.encode("The history of paging begins with the Atlas computer in Manchester. " * 60)
        self.prompts = [words[at : at + length] for at in (0, 5, 9) for length in (9, 40, 75, 130, 190)]
        self.prompts += [words[:at] + words[5 : 760 - at] for at in (20, 200)]

    # What happens

    def run(self, seconds: float = math.inf, steps: int = 1 << 30) -> None:
        """For so long, or so many steps."""
        actions = {
            self.ask: 30, self.search: 4, self.fork: 8, self.talk: 20, self.change_sessions: 3, self.pin: 4,
            self.unpin: 4, self.abort: 3, self.resize: 4, self.limit: 4, self.faults.change: 3, self.faults.rot: 2,
            self.speculate: 1,
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
        faults = self.faults.ended
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
        return SamplingParams(
            n=n, seed=seed, temperature=0.0 if seed is None else 0.9, max_tokens=self.random.choice([2, 8, 20]),
            logprobs=1, ignore_eos=self.random.random() < 0.5, structured_outputs=self.random.choice(FORMS),
            prompt_logprobs=1 if self.random.random() < 0.1 else None,
        )  # fmt: skip

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

    def _process(self, prompt, params, tenant: str, salt: str):
        prompt = {"prompt_token_ids": prompt, "cache_salt": salt}
        name = f"r{next(self.numbers)}"
        return self.llm.frontend.inputs.process(
            prompt, params, name, priority=self.random.randint(-1, 1), tenant=tenant
        )

    def ask(self) -> None:
        tenant, salt = self.random.choice(TENANTS), self.random.choice(SALTS)
        self._add(self._process(self.random.choice(self.prompts), self._params(), tenant, salt))

    def search(self) -> None:
        params = BeamSearchParams(self.random.choice([2, 3]), max_tokens=8, ignore_eos=True)
        self._add(self._process(self.random.choice(self.prompts), params, self.random.choice(TENANTS), ""))

    def fork(self) -> None:
        going_on = [a for a in self.live.values() if a.request.beam is None and a.request.pin is None and a.tokens]
        if going_on:
            answer = self.random.choice(going_on)
            index = self.random.choice([*answer.tokens])
            prompt = answer.request.prompt_token_ids + answer.tokens[index]
            item = self._process(prompt, self._params(), answer.request.tenant, answer.request.cache_salt)
            self._add(item, fork_of=(answer.request.request_id, index))

    def talk(self) -> None:
        space, name = Namespace(self.random.choice(TENANTS), self.random.choice(SALTS)), self.random.choice("xy")
        piece = self.random.choice(self.prompts)[: self.random.choice([5, 30])]
        params = SamplingParams(
            temperature=0.0, max_tokens=self.random.choice([3, 10]), logprobs=1,
            structured_outputs=self.random.choice(FORMS),
        )  # fmt: skip
        self._add(self.llm.frontend.turns.begin(name, space, piece, params, f"r{next(self.numbers)}"))

    def change_sessions(self) -> None:
        """Forks a session if there is one, or deletes one that has grown."""
        store = self.llm.frontend.turns.store
        records = store.list(None)
        if records:
            record = self.random.choice(records)
            if len(record.token_ids) > 150:
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
        self.llm.resize_kv_memory(self.random.choice(["used", None, frames * self.frame_bytes]))

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
        self.core.scheduler.drafter = self.random.choice([self.drafter, self.drafter, None])

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
        with LLM(MODEL, dtype="float32", kv_cache_dtype=self.kv_format, max_model_len=MAX_LEN,
                 enable_prefix_caching=False, max_num_seqs=24, max_num_batched_tokens=512,
                 kv_memory="1GiB") as llm:  # fmt: skip
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
        return [name for name, answer in self.answers.items() if not _agrees(answer, calm[same_as[name]])]


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
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--steps", type=int, default=1 << 30, help="end after so many, if that is sooner")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), args.seed)
        soak.run(args.seconds, args.steps)
        soak.settle()
    different = soak.differences()
    sys.stdout.write(
        f"K/V in {soak.kv_format}\ndone:   {dict(soak.counts)}\nfaults: {dict(soak.faults.counts)}\n{soak.stats}\n"
    )
    sys.stdout.write(f"answers that differ from the calm engine's: {different or 'none'}\n")
    for name in different:
        sys.stdout.write(f"{name}: {soak.answers[name]}\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
