"""SamplingParams: how one request's tokens are chosen and when it ends. Names and meanings are vLLM's.

A plain dataclass that msgspec can send between processes; it knows no torch. Everything that is wrong with a request's
parameters alone is refused here; what needs the model's vocabulary is refused by `check_vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagemill.arguments import suggest_arguments
from pagemill.errors import SamplingParamsError, TokenOutOfVocabularyError

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing by it would leave the range of float32."""
_INT64 = (-(2**63), 2**63 - 1)
"""What a message between processes carries; seeds are any of these."""


@suggest_arguments
@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request.

    temperature 0 is greedy (and so is one below 1e-5); `n` must then be 1, for all sequences would be the same.
    `best_of` sequences are sampled, and the `n` of the largest cumulative log probability returned, the best first;
    None is `n`.
    `top_k` 0 or -1 is off. `seed` None or -1 takes one from the engine's own seed.
    `max_tokens` None means: up to `max_model_len`, or as far as the KV pool goes. `n` sequences share one prefill.
    `logprobs` and `prompt_logprobs` k give the k most likely tokens beside the token itself, at most `MAX_LOGPROBS`;
    0 gives the token's own. They are of the model's distribution, before any of these parameters changes it.
    `logit_bias` lies between -100 and 100. `stop` may be given as one string, and None stands for an empty list.
    Raises `SamplingParamsError` for values out of range and contradictions, `UnknownArgumentError` for unknown names.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    """Filled in by the front end from `bad_words`; not for callers."""

    def __post_init__(self) -> None:
        self._take_convenient_forms()
        self._check_ranges()
        self._check_lists()
        self._check_contradictions()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def _take_convenient_forms(self) -> None:
        """A string for `stop`, None for an empty list, tuples for lists, JSON's "123" for 123 in `logit_bias`."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                setattr(self, name, [])
            elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, dict)):
                setattr(self, name, list(value))
        if self.seed == -1:
            self.seed = None
        if isinstance(self.logit_bias, dict):
            self.logit_bias = {_token_id_of_key(key): bias for key, bias in self.logit_bias.items()} or None

    def _check_ranges(self) -> None:
        self._integer("n", low=1, way_out="ask for one sequence at least")
        self._integer("best_of", low=self.n, none=True, way_out="it counts all sequences, the n returned among them")
        self._number("presence_penalty", -2.0, 2.0, "0 switches it off")
        self._number("frequency_penalty", -2.0, 2.0, "0 switches it off")
        self._number("repetition_penalty", 0.0, 2.0, "1 switches it off", above=True)
        self._number("temperature", 0.0, None, "0 always takes the most likely token")
        self._number("top_p", 0.0, 1.0, "1 switches it off", above=True)
        self._number("min_p", 0.0, 1.0, "0 switches it off")
        self._integer("top_k", low=-1, high=_INT64[1], way_out="0 or -1 switches it off")
        self._integer("seed", low=_INT64[0], high=_INT64[1], none=True, way_out="None takes one from the engine's seed")
        self._integer("max_tokens", low=1, none=True, way_out="None goes on as far as fits")
        self._integer("min_tokens", low=0, way_out="0 switches it off")
        for name in ("logprobs", "prompt_logprobs"):
            self._integer(name, low=0, high=MAX_LOGPROBS, none=True, way_out="None gives none")
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False", f"give {name}=True or {name}=False")

    def _check_lists(self) -> None:
        self._strings("stop")
        self._strings("bad_words")
        self._token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            self._token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise _wrong("allowed_token_ids", [], "None or at least one token id", "None allows every token")
        if self.bad_words_token_ids is not None:
            for sequence in self.bad_words_token_ids:
                self._token_ids("bad_words_token_ids", sequence)
        if self.logit_bias is None:
            return
        if not isinstance(self.logit_bias, dict):
            raise _wrong("logit_bias", self.logit_bias, "a dict of token id to number", "for example {42: -100}")
        self._token_ids("logit_bias", list(self.logit_bias))
        for token, bias in self.logit_bias.items():
            if not _is_number(bias) or not -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS:
                raise _wrong(f"logit_bias of token {token}", bias, f"a number from {-MAX_LOGIT_BIAS:g} to "
                             f"{MAX_LOGIT_BIAS:g}", "use bad_words or allowed_token_ids to forbid tokens altogether",
                             param="logit_bias")  # fmt: skip

    def _check_contradictions(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}); "
                f"lower the first or raise the second",
                param="min_tokens",
            )
        name, count = ("n", self.n) if self.best_of is None else ("best_of", self.best_of)
        if self.greedy and count > 1:
            raise SamplingParamsError(
                f"{name} is {count} with temperature {self.temperature:g}: all {count} sequences would be the same; "
                f"set {name}=1, or a temperature above 0",
                param=name,
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                f"stop is {self.stop!r} with detokenize=False: stop strings are looked for in text; "
                f"set detokenize=True, or use stop_token_ids",
                param="stop",
            )
        if self.allowed_token_ids is not None and self.min_tokens > 0:
            left = set(self.allowed_token_ids) - set(self.stop_token_ids)
            if not left:
                raise SamplingParamsError(
                    f"allowed_token_ids {self.allowed_token_ids} are all in stop_token_ids, which are forbidden up to "
                    f"min_tokens ({self.min_tokens}): no token would be left; set min_tokens=0 or allow another token",
                    param="allowed_token_ids",
                )

    def _number(self, name: str, low: float, high: float | None, way_out: str, *, above: bool = False) -> None:
        """A finite number in [low, high], or (low, high] with `above`; kept as a float."""
        value = getattr(self, name)
        limit = f"{'above' if above else 'at least'} {low:g}" + (f" and at most {high:g}" if high is not None else "")
        if not _is_number(value) or value < low or (above and value == low) or (high is not None and value > high):
            raise _wrong(name, value, f"a number {limit}", way_out)
        setattr(self, name, float(value))

    def _integer(self, name: str, low: int, way_out: str, high: int | None = None, *, none: bool = False) -> None:
        value = getattr(self, name)
        if none and value is None:
            return
        if not _is_integer(value) or value < low or (high is not None and value > high):
            limit = f"from {low} to {high}" if high is not None else f"of at least {low}"
            raise _wrong(name, value, f"an integer {limit}", way_out)

    def _strings(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise _wrong(name, value, "a list of strings", f"for example {name}=['END']")
        if "" in value:
            raise _wrong(name, value, "strings of at least one character", "leave the empty string out")

    @staticmethod
    def _token_ids(name: str, value: object) -> None:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list of token ids", f"for example {name}=[2]")
        for token in value:
            if not _is_integer(token) or token < 0:
                raise _wrong(name, token, "made of token ids, integers of at least 0", "take them from the tokenizer")


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `TokenOutOfVocabularyError` for a token id that is not below `vocab_size`, the model's number of logits."""
    named: list[tuple[str, Iterable[int]]] = [
        ("logit_bias", params.logit_bias or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("stop_token_ids", params.stop_token_ids),
        ("bad_words_token_ids", (token for sequence in params.bad_words_token_ids or () for token in sequence)),
    ]
    for name, tokens in named:
        largest = max(tokens, default=0)
        if largest >= vocab_size:
            raise TokenOutOfVocabularyError(
                f"{name} has token {largest}; this model's tokens are 0 to {vocab_size - 1}; leave it out", param=name
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _token_id_of_key(key: object) -> int:
    if isinstance(key, str) and key.isascii() and key.isdecimal():
        return int(key)
    if not _is_integer(key):
        raise _wrong("logit_bias", key, "keyed by token ids, integers of at least 0", "take them from the tokenizer")
    return key  # type: ignore[return-value]


def _wrong(name: str, value: object, limit: str, way_out: str, param: str | None = None) -> SamplingParamsError:
    text = repr(value)
    if len(text) > 200:
        text = f"{text[:200]}…"
    return SamplingParamsError(f"{name} is {text}; it must be {limit}; {way_out}", param=param or name)
