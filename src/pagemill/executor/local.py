"""LocalExecutor: the model, its KV pool and its rows on one device in this process.

It turns a step plan into device state, runs the model over it, and samples. It keeps what persists between steps (block
tables and tokens by row, the sampler's rows) and edits it as plans say.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagemill.errors import NonFiniteLogitsError, SamplingParamsError
from pagemill.executor.backend import Backend
from pagemill.executor.draft_source import DraftSource
from pagemill.executor.interface import AdapterFacts, ExecutorFacts, GraphFacts, StepHandle
from pagemill.executor.verification import Choose, Verified, logits_of, verify
from pagemill.executor.worker import Worker
from pagemill.kvcache.device_streams import DeviceStreams
from pagemill.kvcache.layout import FrameShape
from pagemill.models.adapter import Adapter, AdapterTokens
from pagemill.models.decoder import Decoder
from pagemill.models.loading.adapter import AdapterLoader
from pagemill.ops.interface import AllowedOutputs
from pagemill.sampling.kernels import take_rows
from pagemill.sampling.params import SamplingParams, TokenLogprobs
from pagemill.sampling.sampler import Sampled, Sampler
from pagemill.scheduling.step_plan import DraftWork, StepPlan, StepResult

LOGITS_ROWS = 64
"""Prompt log probabilities take this many rows of logits at a time: a bound on their memory."""


class Parts(NamedTuple):
    """Holds what every executor is made of. mapped_bytes: see `Worker`; those of all ranks together."""

    decoder: Decoder
    backend: Backend
    facts: ExecutorFacts
    shape: FrameShape
    max_num_seqs: int
    tokenizer_json: Callable[[], str]
    adapters: AdapterLoader
    draft: DraftSource | None = None
    mapped_bytes: int = 0


class LocalExecutor(Worker):
    """Implements `Executor` on the backend that the model was loaded with. A step runs when it is submitted: on CPU it
    would take the cores from whoever planned the next one meanwhile.
    """

    def __init__(self, parts: Parts, streams: DeviceStreams | None = None) -> None:
        decoder, backend, facts, shape, max_num_seqs, tokenizer_json, adapters, draft, mapped_bytes = parts
        super().__init__(decoder, backend, shape, max_num_seqs, facts.max_model_len, mapped_bytes, streams)
        self.facts = facts
        self.sampler = Sampler(max_num_seqs, facts.vocab_size, backend.sampling, facts.eos_token_ids, tokenizer_json)
        self.draft = draft
        self._adapter_loader = adapters
        self._adapters: dict[int, Adapter] = {}
        self._logits = torch.empty(0, facts.vocab_size, dtype=torch.float32, device="cpu")

    def allocate(self, num_frames: int, streamed_frames: int = 0, streamed_folder: Path | None = None) -> int:
        first_streamed = self.make_pool(num_frames, streamed_frames, streamed_folder, self.memory().total)
        if self.draft is not None:
            self.draft.begin(self.pool, self.rows, self.sampler)
        return first_streamed

    def warm_up(self) -> str:
        """Does nothing: a CPU's kernels are compiled already, and its steps are not captured."""
        return ""

    def graphs(self) -> GraphFacts:
        return GraphFacts(0, 0)

    def prepare(self, params: SamplingParams, root: bytes) -> Future[Any] | None:
        return self.sampler.prepare(params, root)

    def load_adapter(self, number: int, path: str) -> AdapterFacts:
        adapter = self._adapters[number] = self._adapter_loader.load(path, self.memory().free)
        return AdapterFacts(adapter.digest, adapter.nbytes)

    def apply(self, plan: StepPlan) -> list[int]:
        for row in plan.freed_rows:
            self.sampler.remove_row(row)
        for new in plan.new_rows:
            tokens = np.array(new.token_ids, dtype=np.int32)
            prompt, output = tokens[: new.prompt_len], tokens[new.prompt_len :]
            self.sampler.add_row(new.row, new.params, new.seed, prompt, output, new.root)
        self.rows.apply(plan)
        if self.draft is not None:
            self.draft.apply(plan)
        return self.edit(plan.work)

    def submit(self, plan: StepPlan) -> StepHandle:
        try:
            return StepHandle(plan, self.run(plan))
        except Exception as error:
            return StepHandle(plan, error)

    def collect(self, handle: StepHandle) -> StepResult:
        if isinstance(handle.pending, Exception):
            raise handle.pending
        assert isinstance(handle.pending, StepResult)
        return handle.pending

    def run(self, plan: StepPlan) -> StepResult:
        """Runs the model over the plan's rows, and samples. Running the same rows again gives the same result."""
        if not len(plan.rows):
            return StepResult()
        undrafted, draft_work = set[int](), DraftWork()
        if plan.branched:
            self.rows.begin_branches(plan)
        if self.draft is not None:
            plan, undrafted, draft_work = self.draft.propose(plan)
        inputs = self.rows.inputs(plan.rows, plan.starts, plan.query_lens)
        query_start = inputs.query_start
        ends = inputs.context_lens[plan.sample_from]
        if len(plan.draft_tokens):
            counts = plan.max_accepted - 1
            ends -= counts
            rows = np.repeat(plan.rows[plan.sample_from], counts)
            self.rows.tokens[rows, _runs(ends, counts)] = plan.draft_tokens
        only_argmax = self.sampler.only_argmax(plan.sample_to)
        on_layer = self.reading_ahead(plan.rows, inputs.context_lens)
        hidden = self.forward(inputs, inputs.token_ids(), on_layer, self._adapter_tokens(plan))
        of_prompts: dict[int, list[TokenLogprobs]] = {}
        for index in plan.prompt_logprobs.tolist():
            first, last = int(query_start[index]), int(query_start[index + 1])
            start, row = int(plan.starts[index]), int(plan.rows[index])
            of_prompts[index] = self._prompt_logprobs(hidden[first:last], start, row)
        pooled, not_finite = _pool(plan, hidden, query_start)
        # Sampling comes last: the sampler remembers what it chose, and a step that fails before may be run again.
        output = self._sample(plan, hidden, query_start, ends, only_argmax)
        output.prompt_logprobs, output.pooled = of_prompts, pooled
        output.failed |= not_finite
        output.undrafted, output.draft_work = undrafted, draft_work
        if self.draft is not None:
            try:
                self.draft.note_step(plan, inputs, hidden, output.tokens)
            except Exception:
                self._forget_samples(plan, ends)
                raise
        return output

    def _adapter_tokens(self, plan: StepPlan) -> list[AdapterTokens]:
        """Returns the adapters of the plan's rows, with the tokens of these."""
        if not self._adapters:
            return []
        numbers = np.repeat(self.rows.adapter_numbers[plan.rows], plan.query_lens)
        return [
            (self._adapters[number], self.rows.to_device(np.flatnonzero(numbers == number)))
            for number in np.unique(numbers[numbers > 0]).tolist()
        ]

    def streamed_frames(self, plan: StepPlan) -> list[NDArray[np.int32]]:
        return self.rows.frames_from(self.pool.first_streamed, plan.rows, plan.starts + plan.query_lens)

    def _sample(
        self, plan: StepPlan, hidden: Tensor, query_start: NDArray[np.int32], ends: NDArray[np.int32], only_argmax: bool
    ) -> StepResult:
        """Samples; `ends` says by sample where its first token goes."""
        samples, drafts = len(plan.sample_from), len(plan.draft_tokens) > 0 or plan.branched
        if samples == 0 or (plan.branched and plan.branches.all()):
            return StepResult([[] for _ in range(samples)], [None] * samples)
        last, which = hidden, None
        counts = logits_of(plan)
        if plan.forks or (counts.sum() if drafts else samples) < hidden.shape[0]:
            queries = query_start[plan.sample_from + 1] - counts
            if drafts:
                queries = _runs(queries, counts)
            if plan.forks:
                queries, which = np.unique(queries, return_inverse=True)
            last = take_rows(hidden, queries)
        choose = self._chooser(plan, last, which, only_argmax)
        if drafts:
            sampled, tokens, logprobs = self._verify(plan, choose, ends)
        else:
            sampled, tokens, logprobs = Verified.without_drafts(choose(None, plan.sample_to))
            self.rows.tokens[plan.sample_to, ends] = sampled.token_ids
        failed: dict[int, Exception] = {}
        for i in sampled.not_finite:
            failed[int(plan.sample_from[i])] = NonFiniteLogitsError.of("logits")
        for i in sampled.exhausted:
            structured = self.sampler.params(int(plan.sample_to[i])).structured_outputs is not None
            failed[int(plan.sample_from[i])] = SamplingParamsError(
                f"{'structured_outputs, ' if structured else ''}allowed_token_ids, bad_words and min_tokens together "
                f"forbid every token here; loosen one of them",
                param="structured_outputs" if structured else "allowed_token_ids",
            )
        for i, error in sampled.failed.items():
            failed[int(plan.sample_from[i])] = error
        lost = {i for i, row in enumerate(plan.sample_from.tolist()) if row in failed} if failed else ()
        for i in lost:
            tokens[i], logprobs[i] = [], None
        return StepResult(tokens, logprobs, failed)

    def _chooser(self, plan: StepPlan, hidden: Tensor, which: NDArray[np.int64] | None, only_argmax: bool) -> Choose:
        """Returns what samples from the logits of these hidden states; place i is that of `which[i]`, if given."""
        argmax = self.decoder.argmax(hidden, self._allowed(plan, len(hidden), which)) if only_argmax else None
        if argmax is not None:
            found = argmax if which is None else argmax[which]

            def take(places: NDArray[np.int64] | None, rows: NDArray[np.int32]) -> Sampled:
                tokens = found if places is None else found[places]
                if len(wrong := self.sampler.forbidden(tokens, rows)):
                    index = wrong if places is None else places[wrong]
                    some = take_rows(hidden, index if which is None else which[index])
                    with torch.inference_mode():
                        logits = self.logits(some, self._logits_of(len(wrong)))
                        tokens = tokens.copy()
                        tokens[wrong] = self.sampler.best_allowed(logits, rows[wrong])
                return self.sampler.take_argmax(tokens, rows)

            return take
        with torch.inference_mode():
            logits = self.logits(hidden, self._logits_of(hidden.shape[0]))

        def choose(places: NDArray[np.int64] | None, rows: NDArray[np.int32]) -> Sampled:
            index = places if which is None else which if places is None else which[places]
            with torch.inference_mode():
                return self.sampler.sample(logits if index is None else take_rows(logits, index), rows)

        return choose

    def _allowed(self, plan: StepPlan, count: int, which: NDArray[np.int64] | None) -> AllowedOutputs | None:
        """Returns what grammars let come next at the hidden state of each sample's first token. Behind drafts nobody
        knows it yet; forks of one prompt share its state and, so far, their grammar."""
        own = ~plan.branches if plan.branched else slice(None)
        allowed = self.sampler.allowed(plan.sample_to[own])
        if allowed is None:
            return None
        bits, of_samples = allowed
        counts = logits_of(plan)
        first = (np.cumsum(counts) - counts)[own]
        rows = np.full(count, -1, np.int64)
        rows[first if which is None else which[first]] = of_samples
        return AllowedOutputs(bits, rows)

    def _verify(self, plan: StepPlan, choose: Choose, ends: NDArray[np.int32]) -> Verified:
        """Samples with drafts. If that fails half-way, the sampler forgets it all, so that rows may be run again.

        ends: as of `_sample`.
        """
        try:
            verified = verify(plan, choose)
        except Exception:
            self._forget_samples(plan, ends)
            raise
        for row, end, accepted in zip(plan.sample_to.tolist(), ends.tolist(), verified.tokens, strict=True):
            self.rows.tokens[row, end : end + len(accepted)] = accepted
        return verified

    def _forget_samples(self, plan: StepPlan, ends: NDArray[np.int32]) -> None:
        """Makes the sampler forget a plan's samples, so that its rows may be run again. ends: as of `_sample`.

        What branches sample is their sequence's, whose own sample may be in another part of the step, and stay.
        """
        own = ~plan.branches
        for row, end in zip(plan.sample_to[own].tolist(), ends[own].tolist(), strict=True):
            prompt_len = int(self.rows.prompt_lens[row])
            self.sampler.rewind(row, self.rows.tokens[row, :prompt_len], self.rows.tokens[row, prompt_len:end])

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns what `Decoder.logits` does."""
        return self.decoder.logits(hidden, out)

    def _logits_of(self, rows: int) -> Tensor | None:
        """Returns memory for logits, kept between steps. NumPy's comes in huge pages."""
        if self._device.type != "cpu":
            return None
        if rows > len(self._logits):
            self._logits = torch.from_numpy(np.empty((rows, self._logits.shape[1]), dtype=np.float32))
        return self._logits[:rows]

    @torch.inference_mode()
    def _prompt_logprobs(self, hidden: Tensor, start: int, row: int) -> list[TokenLogprobs]:
        """Returns, for query tokens at start.. of a prompt, log probabilities of the prompt token that follows each."""
        targets = self.rows.tokens[row, start + 1 : min(start + 1 + len(hidden), int(self.rows.prompt_lens[row]))]
        found: list[TokenLogprobs] = []
        for begin in range(0, len(targets), LOGITS_ROWS):
            part = targets[begin : begin + LOGITS_ROWS]
            logits = self.logits(hidden[begin : begin + len(part)])
            found += self.sampler.prompt_logprobs(row, logits, part)
        return found


def _pool(
    plan: StepPlan, hidden: Tensor, query_start: NDArray[np.int32]
) -> tuple[dict[int, NDArray[np.float64]], dict[int, Exception]]:
    """Returns the vectors that the plan asks for, by row, and an error for each row that has NaN or infinity in it."""
    pooled: dict[int, NDArray[np.float64]] = {}
    failed: dict[int, Exception] = {}
    for index, all_tokens in zip(plan.pooled.tolist(), plan.pools_all.tolist(), strict=True):
        end = int(query_start[index + 1])
        first = int(query_start[index]) if all_tokens else end - 1
        vector = hidden[first:end].float().cpu().numpy().sum(axis=0, dtype=np.float64)
        if np.isfinite(vector).all():
            pooled[index] = vector
        else:
            failed[index] = NonFiniteLogitsError.of("hidden states")
    return pooled, failed


def _runs(begins: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int64]:
    """Returns begin, begin + 1, … of each run, one run after the other."""
    return np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
