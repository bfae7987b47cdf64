"""The state of requests: what the engine has brought, as text, log probabilities and finish reasons.

`add` takes what a step has brought. `take` returns a stream's next output, `whole` everything that has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagemill.draft_counts import DraftCounts
from pagemill.engine.messages import EngineRequest, SequenceOutput
from pagemill.errors import PagemillError
from pagemill.frontend.outputs import CompletionOutput, Logprob, LogprobsOfPosition, RequestMetrics, RequestOutput
from pagemill.frontend.rates import Charge
from pagemill.namespace import Namespace
from pagemill.sampling.params import RequestOutputKind, SamplingParams, TokenLogprobs
from pagemill.sessions.record import SessionRecord
from pagemill.text.detokenizer import Detokenizer
from pagemill.text.stop import StopStrings
from pagemill.text.tokenizer import Tokenizer

POSITIONS_AT_ONCE = 200
"""Positions whose log probabilities are freed before another thread may run."""


class SequenceState:
    """One of a request's sequences: all that has come of it, and how much of that has been handed out."""

    def __init__(self, index: int, params: SamplingParams, prompt_token_ids: list[int], tokenizer: Tokenizer) -> None:
        self.output = CompletionOutput(index, "", [])
        """The sequence as it has come so far."""
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
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

    def add(self, new: SequenceOutput) -> bool:
        """Takes one step's tokens. Returns True if a stop string has ended the sequence, and the engine does not know
        that yet."""
        output, last = self.output, len(new.new_token_ids) - 1
        output.kv_blocks = new.kv_blocks or output.kv_blocks
        if new.cumulative_logprob is not None:
            output.cumulative_logprob = new.cumulative_logprob
        for position, token_id in enumerate(new.new_token_ids):
            output.token_ids.append(token_id)
            if new.logprobs is not None and output.logprobs is not None and output.cumulative_logprob is not None:
                entry = new.logprobs[position]
                output.logprobs.append(decode_logprobs(entry, self._tokenizer))
                output.cumulative_logprob += entry.logprobs[0]
            ends_it = position == last and new.finish_reason == "stop"
            if self._detokenizer is not None and (not ends_it or self._params.include_stop_str_in_output):
                can_stop = len(output.token_ids) > self._params.min_tokens
                output.text += self._stops.add(self._detokenizer.add([token_id]), can_stop=can_stop)
            if self._stops.matched is not None:
                self.finish("stop", self._stops.matched)
                return new.finish_reason is None
        if new.finish_reason is not None:
            if new.error is not None:
                output.error = new.error.to_error()
            self.finish(new.finish_reason, new.stop_reason)
        return False

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends the sequence: no token follows, so text that was held back belongs to it."""
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason
        if self._detokenizer is not None and self._stops.matched is None:
            self.output.text += self._stops.add(self._detokenizer.finish(), can_stop=False) + self._stops.finish()

    @property
    def finished(self) -> bool:
        """True once no token follows."""
        return self.output.finish_reason is not None

    @property
    def has_news(self) -> bool:
        """True if something has come since `take_delta`."""
        return len(self.output.token_ids) > self._given_tokens or (self.finished and not self._given_end)

    def take_delta(self) -> CompletionOutput:
        """Returns what is new since the last call."""
        output, tokens, chars = self.output, self._given_tokens, self._given_chars
        self._given_tokens, self._given_chars = len(output.token_ids), len(output.text)
        self._given_end = self.finished
        return CompletionOutput(  # `replace` takes four times as long, for every token of every stream
            index=output.index,
            text=output.text[chars:],
            token_ids=output.token_ids[tokens:],
            cumulative_logprob=output.cumulative_logprob,
            logprobs=None if output.logprobs is None else output.logprobs[tokens:],
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            error=output.error,
            kv_blocks=output.kv_blocks,
        )

    def so_far(self) -> CompletionOutput:
        """Returns all that has come, which later tokens do not change."""
        output = self.output
        logprobs = None if output.logprobs is None else [*output.logprobs]
        return replace(output, token_ids=[*output.token_ids], logprobs=logprobs)


class BestOf(NamedTuple):
    """Asks for the best sequences of a request: how many, and whether with their log probabilities."""

    n: int
    with_logprobs: bool


@dataclass(frozen=True, slots=True)
class ResponseTurn:
    """Makes a turn a response: it goes on from an earlier one, which stays as it is, and is kept under its own name.

    after: the earlier response, None for none. instructions: the system message before the conversation, of this turn
    alone. keep: False leaves no trace. on_begin: called in another thread with the session as the turn begins it; what
    it raises refuses the turn. on_end: called in another thread once the answer has ended; returns what is kept beside
    the conversation.
    """

    after: str | None
    instructions: str | None
    keep: bool
    on_begin: Callable[[SessionRecord], None]
    on_end: Callable[[RequestState], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A session's turn that has been taken from the store and must be given back.

    messages: the session's after this turn, but for the answer; None for a turn of a plain prompt. tools,
    instructions: those that it is rendered with. max_tool_calls, calls_only: see `AnswerFormats.reader`. response: None
    for a turn of a session that was named.
    """

    begun: SessionRecord
    messages: list[Mapping[str, Any]] | None
    tools: Sequence[Mapping[str, Any]] | None = None
    max_tool_calls: int | None = None
    calls_only: bool = False
    instructions: str | None = None
    response: ResponseTurn | None = None


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
        self.turn: Turn | None = None
        """The session's turn that it is."""
        self.charge: Charge | None = None
        """Counts it against its tenant's minute; None until it has been counted."""
        self.ends: Sequence[int] | None = None
        """Tokens that end its answer, which stands before a suffix; None for any other answer."""
        kind = asked.params.output_kind
        self.final_only = best_of is not None or kind is RequestOutputKind.FINAL_ONLY
        """Whether there is news at the end alone."""
        self._cumulative = kind is RequestOutputKind.CUMULATIVE
        self.has_given = False
        """True once `take` has returned a part of the answer: the request cannot begin again."""
        self.num_sent = 0
        """Engines that it was sent to."""
        self.on_news: Callable[[], None] | None = None
        """Called when `take` has something to return, or when the request has failed."""
        self._failure: PagemillError | None = None
        self._best_of = best_of
        self.prompt = prompt
        """The text that it came from; of a session's turn, the text of that turn."""
        self._tokenizer = tokenizer
        self.begin_again()

    def begin_again(self) -> None:
        """Forgets all that has come, which comes once more."""
        asked = self.asked
        self.sequences = [
            SequenceState(index, asked.params, asked.prompt_token_ids, self._tokenizer)
            for index in range(asked.params.n)
        ]
        self.metrics = RequestMetrics(asked.arrival_s)
        self.num_cached_tokens = 0
        self.pooled: bytes | None = None
        """The embedding, float32, if the request asked for one and has ended well."""
        self._undecoded: list[TokenLogprobs | None] | None = None
        self._prompt_logprobs: list[LogprobsOfPosition | None] | None = None
        self._prompt_logprobs_given = False

    @property
    def engine_id(self) -> str:
        """The engine's name for it."""
        return self.asked.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, as the engine gets it."""
        return self.asked.prompt_token_ids

    @property
    def finished(self) -> bool:
        """True once all its sequences have ended."""
        for sequence in self.sequences:  # noqa: SIM110, `all` takes three times as long, several times for every token
            if sequence.output.finish_reason is None:
                return False
        return True

    @property
    def num_logprobs(self) -> int:
        """How many positions there are with log probabilities, of the prompt and of what has come."""
        return sum(
            len(each or ()) for each in (self._prompt_logprobs, *(one.output.logprobs for one in self.sequences))
        )

    @property
    def error(self) -> PagemillError | None:
        """Why the engine is gone, or else the first failed sequence's error."""
        return self._failure or next((each.output.error for each in self.sequences if each.output.error), None)

    def add(self, new: SequenceOutput, now: float) -> bool:
        """Does what `SequenceState.add` does. What still arrives for a sequence that has ended is dropped.

        now: seconds of `time.monotonic()`.
        """
        sequence, metrics = self.sequences[new.index], self.metrics
        if sequence.finished:
            return False
        self.num_cached_tokens = max(self.num_cached_tokens, new.num_cached_tokens)
        if new.prompt_logprobs is not None and self._prompt_logprobs is None:
            self._undecoded = new.prompt_logprobs
        self.pooled = new.pooled or self.pooled
        if new.scheduled_s and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = new.scheduled_s
        if new.new_token_ids:
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now
        before = len(sequence.output.token_ids)
        stopped = sequence.add(new)
        if new.drafted is not None:
            metrics.drafts = metrics.drafts or DraftCounts()
            come = len(sequence.output.token_ids) - before
            metrics.drafts.note(new.drafted._replace(accepted=min(new.drafted.accepted, come)))
        if sequence.finished and self.finished:
            metrics.finished_time = now
        return stopped

    def abort(self) -> None:
        """Ends all sequences with `finish_reason` "abort"."""
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.finish("abort")
        self.metrics.finished_time = time.monotonic()
        self.tell()

    def fail(self, error: PagemillError) -> None:
        """Ends the request with an error, which `error` is from now on."""
        self._failure = error
        self.tell()

    def tell(self) -> None:
        """Calls `on_news` for what has come; once all has come, if that is asked for."""
        if self.on_news is not None and (not self.final_only or self.finished or self._failure is not None):
            self.on_news()

    @property
    def has_undecoded_logprobs(self) -> bool:
        """True if `take` would look up the texts of a prompt's log probabilities, which may take long."""
        return self._undecoded is not None

    def decode_prompt_logprobs(self) -> None:
        """Looks up the texts of the prompt's log probabilities, if they have come."""
        undecoded, self._undecoded = self._undecoded, None
        if undecoded is not None:
            self._prompt_logprobs = [
                None if entry is None else decode_logprobs(entry, self._tokenizer) for entry in undecoded
            ]

    def forget_logprobs(self) -> None:
        """Frees all log probabilities, also those in outputs, some positions at a time: freed at once, those of a few
        thousand positions hold the interpreter for tens of milliseconds."""
        for positions in (self._prompt_logprobs, *(one.output.logprobs for one in self.sequences)):
            while positions:
                del positions[-POSITIONS_AT_ONCE:]

    def take(self) -> RequestOutput:
        """Returns the next output, of the kind that was asked for; its `outputs` are empty where nothing is new. Of
        deltas, the first has the prompt's log probabilities."""
        if self.final_only and not self.finished:
            return self._output([], None)
        self.decode_prompt_logprobs()
        if self._best_of is not None:
            return self.whole()
        outputs = [sequence.take_delta() for sequence in self.sequences if sequence.has_news]
        self.has_given = self.has_given or bool(outputs)
        if outputs and self._cumulative:
            return self._output([sequence.so_far() for sequence in self.sequences], self._prompt_logprobs)
        prompt_logprobs = None if self._prompt_logprobs_given else self._prompt_logprobs
        self._prompt_logprobs_given = self._prompt_logprobs is not None
        return self._output(outputs, prompt_logprobs)

    def whole(self) -> RequestOutput:
        """Returns all that has come."""
        self.decode_prompt_logprobs()
        outputs = [replace(sequence.output) for sequence in self.sequences]
        if self._best_of is not None:
            outputs = _best(outputs, self._best_of)
        return self._output(outputs, self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[LogprobsOfPosition | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
        )


def _best(outputs: list[CompletionOutput], best_of: BestOf) -> list[CompletionOutput]:
    """Returns the sequences of the largest cumulative log probability, the best first; failed ones last."""
    order = sorted(outputs, key=lambda output: (output.error is not None, -(output.cumulative_logprob or 0.0)))
    return [
        replace(output, index=index, logprobs=output.logprobs if best_of.with_logprobs else None)
        for index, output in enumerate(order[: best_of.n])
    ]


def decode_logprobs(entry: TokenLogprobs, tokenizer: Tokenizer) -> LogprobsOfPosition:
    """Returns the token that stands there, under its own rank, then the most likely ones, ranked 1, 2, …"""
    ranked = [entry.rank, *range(1, len(entry.token_ids))]
    decoded: LogprobsOfPosition = {}
    text = tokenizer.text_of_token
    for token_id, logprob, rank in zip(entry.token_ids, entry.logprobs, ranked, strict=True):
        if token_id not in decoded:
            decoded[token_id] = Logprob(logprob, rank, text(token_id))
    return decoded
