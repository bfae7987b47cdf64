"""From the engine's tokens to what callers see: text, stop strings, log probabilities, finish reasons.

State is kept per request and read from outside: `take_delta` gives what is new, `whole` everything. Nothing is sent
from here: `OutputProcessor.process` says which sequences a stop string has ended, and the caller tells the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.errors import PagemillError, error_of
from pagemill.frontend.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestMetrics, RequestOutput
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams, TokenLogprobs
from pagemill.sessions.store import SessionRecord
from pagemill.text.detokenizer import Detokenizer
from pagemill.text.stop import StopStrings
from pagemill.text.tokenizer import Tokenizer


class SequenceState:
    """One of a request's sequences: what it has produced and how much of that has been handed out."""

    def __init__(self, index: int, params: SamplingParams, prompt_token_ids: list[int], tokenizer: Tokenizer) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[LogprobsOfPosition] | None = None if params.logprobs is None else []
        self.cumulative_logprob: float | None = None if params.logprobs is None else 0.0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: PagemillError | None = None
        self.kv_blocks: tuple[int, int] | None = None
        self._params = params
        self._tokenizer = tokenizer
        self._detokenizer = (
            Detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
            if params.detokenize
            else None
        )
        self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._given_tokens = 0
        self._given_chars = 0
        self._given_end = False

    def add(self, output: SequenceOutput) -> bool:
        """Takes one step's tokens. True if a stop string has ended the sequence and the engine does not know it yet."""
        last = len(output.new_token_ids) - 1
        self.kv_blocks = output.kv_blocks or self.kv_blocks
        if output.cumulative_logprob is not None:
            self.cumulative_logprob = output.cumulative_logprob
        for position, token_id in enumerate(output.new_token_ids):
            self.token_ids.append(token_id)
            if output.logprobs is not None and self.logprobs is not None and self.cumulative_logprob is not None:
                entry = output.logprobs[position]
                self.logprobs.append(decode_logprobs(entry, self._tokenizer))
                self.cumulative_logprob += entry.logprobs[0]
            ends_it = position == last and output.finish_reason == "stop"
            if not ends_it or self._params.include_stop_str_in_output:
                self._add_text(token_id)
            if self._stops.matched is not None:
                self._finish("stop", self._stops.matched)
                return output.finish_reason is None
        if output.finish_reason is not None:
            if output.error is not None:
                self.error = error_of(output.error_type or "", output.error, output.error_param)
            self._finish(output.finish_reason, output.stop_reason)
        return False

    def abort(self) -> None:
        if self.finish_reason is None:
            self._finish("abort", None)

    @property
    def has_news(self) -> bool:
        return len(self.token_ids) > self._given_tokens or (self.finish_reason is not None and not self._given_end)

    def take_delta(self) -> CompletionOutput:
        """What is new since the last call."""
        tokens, chars = self._given_tokens, self._given_chars
        self._given_tokens, self._given_chars = len(self.token_ids), len(self.text)
        self._given_end = self.finish_reason is not None
        return self._output(
            self.text[chars:], self.token_ids[tokens:], None if self.logprobs is None else self.logprobs[tokens:]
        )

    def whole(self) -> CompletionOutput:
        return self._output(self.text, self.token_ids, self.logprobs)

    def _output(self, text: str, token_ids: list[int], logprobs: list[LogprobsOfPosition] | None) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            kv_blocks=self.kv_blocks,
            error=self.error,
        )

    def _add_text(self, token_id: int) -> None:
        if self._detokenizer is not None:
            can_stop = len(self.token_ids) > self._params.min_tokens
            self.text += self._stops.add(self._detokenizer.add([token_id]), can_stop=can_stop)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        """No token follows: what was held back is text after all."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        if self._detokenizer is not None and self._stops.matched is None:
            self.text += self._stops.add(self._detokenizer.finish(), can_stop=False) + self._stops.finish()


class BestOf(NamedTuple):
    """How many of a request's sequences are returned, the best ones, and whether their log probabilities are."""

    n: int
    with_logprobs: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """A session's turn that has been taken from the store and must be given back.

    messages: the session's after this turn, but for the answer; None for a turn of a plain prompt.
    """

    begun: SessionRecord
    messages: list[Mapping[str, Any]] | None


class RequestState:
    """One request: what the engine is asked, its sequences, and what belongs to all of them."""

    def __init__(
        self, asked: EngineRequest, tokenizer: Tokenizer, prompt: str | None = None, best_of: BestOf | None = None
    ) -> None:
        """prompt: the text it came from, None if it came as tokens. best_of: None returns every sequence."""
        self.request_id = asked.request_id
        """The caller's name for it; the engine's may become another, which is nobody's after its end."""
        self.asked = asked
        self.space = Namespace(asked.tenant, asked.cache_salt)
        self.metrics = RequestMetrics(arrival_time=asked.arrival_s)
        self.sequences = [
            SequenceState(index, asked.params, asked.prompt_token_ids, tokenizer) for index in range(asked.params.n)
        ]
        self.turn: Turn | None = None
        """The session's turn that it is."""
        self.on_news: Callable[[], None] | None = None
        """Told when `take_delta` has something to give, or when it has failed."""
        self._failure: PagemillError | None = None
        self._best_of = best_of
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._num_cached_tokens = 0
        self._prompt_logprobs: list[LogprobsOfPosition | None] | None = None
        self._prompt_logprobs_given = False

    @property
    def engine_id(self) -> str:
        """The engine's name for it."""
        return self.asked.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.asked.prompt_token_ids

    @property
    def searches(self) -> bool:
        """Returns whether the request is a beam search."""
        return self.asked.beam is not None

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def has_news(self) -> bool:
        """Whether `take_delta` has something to give: until all have ended, nobody knows which are the best."""
        return self._best_of is None or self.finished

    @property
    def error(self) -> PagemillError | None:
        """Why the engine is gone, or else the first failed sequence's error."""
        return self._failure or next(
            (sequence.error for sequence in self.sequences if sequence.error is not None), None
        )

    def add(self, output: SequenceOutput, now: float) -> bool:
        """See `SequenceState.add`. What still arrives for a sequence that has ended is dropped."""
        sequence = self.sequences[output.index]
        if sequence.finish_reason is not None:
            return False
        self._num_cached_tokens = max(self._num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._prompt_logprobs = [
                None if entry is None else decode_logprobs(entry, self._tokenizer) for entry in output.prompt_logprobs
            ]
        if output.scheduled_s and self.metrics.first_scheduled_time is None:
            self.metrics.first_scheduled_time = output.scheduled_s
        if output.new_token_ids:
            self.metrics.last_token_time = now
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
        stopped = sequence.add(output)
        if self.finished:
            self.metrics.finished_time = now
        return stopped

    def abort(self) -> None:
        """Ends all sequences with `finish_reason` "abort"."""
        for sequence in self.sequences:
            sequence.abort()
        self.metrics.finished_time = time.monotonic()
        self.tell()

    def fail(self, error: PagemillError) -> None:
        """Says that no answer comes any more, and why."""
        self._failure = error
        self.tell()

    def tell(self) -> None:
        """Tells `on_news`, if there is any."""
        if self.on_news is not None and (self.has_news or self._failure is not None):
            self.on_news()

    def take_delta(self) -> RequestOutput:
        """What is new since the last call; prompt log probabilities come once."""
        if self._best_of is not None:
            return self.whole()
        outputs = [sequence.take_delta() for sequence in self.sequences if sequence.has_news]
        prompt_logprobs = None if self._prompt_logprobs_given else self._prompt_logprobs
        self._prompt_logprobs_given = self._prompt_logprobs is not None
        return self._output(outputs, prompt_logprobs)

    def whole(self) -> RequestOutput:
        outputs = [sequence.whole() for sequence in self.sequences]
        return self._output(outputs if self._best_of is None else _best(outputs, self._best_of), self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[LogprobsOfPosition | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self._num_cached_tokens,
        )


@dataclass(slots=True)
class Update:
    """What one step has brought: the requests that have something new, each once, and the sequences to be ended."""

    changed: list[RequestState] = field(default_factory=list)
    stopped: list[tuple[str, int]] = field(default_factory=list)


class OutputProcessor:
    """The requests that are running, by the engine's id. Outputs for others are dropped: their end has just crossed
    with a step."""

    def __init__(self) -> None:
        self._requests: dict[str, RequestState] = {}

    def add(self, request: RequestState) -> None:
        self._requests[request.engine_id] = request

    def process(self, outputs: Iterable[SequenceOutput]) -> Update:
        now = time.monotonic()
        update = Update()
        changed: dict[str, RequestState] = {}
        for output in outputs:
            state = self._requests.get(output.request_id)
            if state is None:
                continue
            if state.add(output, now):
                update.stopped.append((output.request_id, output.index))
            changed[output.request_id] = state
        update.changed.extend(changed.values())
        return update

    def remove(self, state: RequestState) -> None:
        """Forgets a request, finished or not."""
        self._requests.pop(state.engine_id, None)


def _best(outputs: list[CompletionOutput], best_of: BestOf) -> list[CompletionOutput]:
    """Those of the largest cumulative log probability, the best first; failed ones last."""
    order = sorted(outputs, key=lambda output: (output.error is not None, -(output.cumulative_logprob or 0.0)))
    return [
        replace(output, index=index, logprobs=output.logprobs if best_of.with_logprobs else None)
        for index, output in enumerate(order[: best_of.n])
    ]


def decode_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsOfPosition:
    """The token that stands there first, under its own rank; then the most likely ones, ranked 1, 2, …"""
    chosen = entry.token_ids[0]
    decoded = {chosen: Logprob(entry.logprobs[0], entry.rank, _text_of(chosen, tokenizer))}
    likely = zip(entry.token_ids[1:], entry.logprobs[1:], strict=True)
    for rank, (token_id, logprob) in enumerate(likely, start=1):
        if token_id != chosen:
            decoded[token_id] = Logprob(logprob, rank, _text_of(token_id, tokenizer))
    return decoded


def _text_of(token_id: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)
