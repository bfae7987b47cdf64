"""Defines what a request asks of sampling and gets from it: SamplingParams, BeamSearchParams, TokenLogprobs.

Plain data that msgspec sends between processes; knows no torch. Names and meanings are vLLM's. Parameters refuse by
themselves what is wrong; `check_vocabulary` refuses what the model's vocabulary does not have.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from pagemill.arguments import Count, about, as_list, check_fields, suggest_arguments
from pagemill.errors import SamplingParamsError, TokenOutOfVocabularyError, shown
from pagemill.fixed_arguments import OF_SAMPLING, takes_fixed
from pagemill.sampling.structured import StructuredOutputsParams, structured_outputs_of

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_WORDS = 1024
"""Entries that `stop`, `stop_token_ids` and `bad_words` may have: each is looked for after every token."""
MAX_CHARACTERS = {"stop": 4096, "bad_words": 65536}
"""Characters that the texts of a list may have together."""
MAX_TOKEN_IDS = 2**20
"""Entries that `allowed_token_ids` may have: more than any vocabulary."""
MAX_BIASES = 16384
"""Entries that `logit_bias` may have: `allowed_token_ids` says in less what to forbid."""
GREEDY_BELOW = 1e-5
"""A temperature below this is 0: dividing by it would leave the range of float32."""

TokenId = Annotated[int, Meta(ge=0)]
Words = Annotated[
    list[Annotated[str, Meta(min_length=1)]],
    Meta(max_length=MAX_WORDS, title=f"a list of at most {MAX_WORDS} texts, none of them empty"),
]
StopIds = Annotated[
    list[TokenId],
    Meta(max_length=MAX_WORDS, title=f"a list of at most {MAX_WORDS} token ids, integers of at least 0"),
]
TokenIds = Annotated[
    list[TokenId],
    Meta(
        min_length=1,
        max_length=MAX_TOKEN_IDS,
        title=f"a list of 1 to {MAX_TOKEN_IDS} token ids, integers of at least 0",
    ),
]
Biases = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-MAX_LOGIT_BIAS, le=MAX_LOGIT_BIAS)]],
    Meta(
        max_length=MAX_BIASES,
        title=f"a dict of at most {MAX_BIASES} token ids to numbers from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}",
    ),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

_OFF_AT_0 = "0 switches it off"
_OFF_AT_1 = "1 switches it off"
_FLAG = "give True or False"


class RequestOutputKind(IntEnum):
    """Says what each output of a stream holds. `LLM` returns whole outputs, whatever is asked for."""

    CUMULATIVE = 0
    """Each output holds all that has come so far, of all sequences."""
    DELTA = 1
    """Each output holds what is new since the last one, of the sequences that have something new."""
    FINAL_ONLY = 2
    """There is one output, at the end, which holds the whole answer."""


@takes_fixed(OF_SAMPLING, SamplingParamsError)
@suggest_arguments
@dataclass(kw_only=True)
class SamplingParams:
    """Parameters by which one request is sampled.

    `stop` may be given as one string, `structured_outputs` as a dict, None stands for an empty list, and arrays and
    tensors for lists of token ids.
    `n` sequences share one prefill. Log probabilities are of the model's distribution, before any of these parameters
    changes it. Raises `SamplingParamsError` for values out of range and contradictions, `UnknownArgumentError` for
    unknown names.
    """

    n: Annotated[Count, about("Sequences that are returned.", "ask for one at least")] = 1
    best_of: Annotated[
        Count | None,
        about(
            "Sequences that are sampled; the n of the largest cumulative log probability are returned, the best first. "
            "Default: n.",
            "it counts all sequences, the n returned among them",
        ),
    ] = None
    presence_penalty: Annotated[
        Penalty, about("Above 0 discourages tokens that the answer has already.", _OFF_AT_0)
    ] = 0.0
    frequency_penalty: Annotated[
        Penalty, about("Above 0 discourages tokens the more often the answer has them.", _OFF_AT_0)
    ] = 0.0
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=1e-6, le=2)], about("Above 1 discourages what was said before.", _OFF_AT_1)
    ] = 1.0
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1e6)],
        about("0 always takes the most likely token.", "0 always takes the most likely token"),
    ] = 1.0
    top_p: Annotated[
        Annotated[float, Meta(gt=0, le=1)],
        about("Sample among the most likely tokens that together have this probability.", _OFF_AT_1),
    ] = 1.0
    top_k: Annotated[
        Annotated[int, Meta(ge=-1)],
        about("Sample among this many most likely tokens; 0 is off.", "0 or -1 switches it off"),
    ] = 0
    min_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about("Leave out tokens less likely than this share of the most likely one.", _OFF_AT_0),
    ] = 0.0
    seed: Annotated[
        int | None,
        about("Seed of the random choices. None or -1: from the engine's seed.", "None takes one from the engine's"),
    ] = None
    stop: Annotated[
        Words, about("Text that ends the answer; may be given several times.", "for example stop=['END']")
    ] = field(default_factory=list)
    stop_token_ids: Annotated[
        StopIds,
        about("Tokens that end the answer.", "take them from the tokenizer: stop_token_ids=[2]"),
    ] = field(default_factory=list)
    bad_words: Annotated[Words, about("Texts that the answer must not have.", "for example bad_words=['no']")] = field(
        default_factory=list
    )
    include_stop_str_in_output: Annotated[bool, about("Keep in the answer what ended it.", _FLAG)] = False
    ignore_eos: Annotated[bool, about("Go on behind the end-of-sequence token.", _FLAG)] = False
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about(
            "Longest answer in tokens; 0 only computes the prompt. Default: what is left of max_model_len.",
            "None goes on as far as fits",
        ),
    ] = 16
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0)], about("Tokens before which the answer does not end.", _OFF_AT_0)
    ] = 0
    logprobs: Annotated[
        Logprobs | None,
        about("Give the log probability of each token, and of so many most likely ones.", "None gives none"),
    ] = None
    prompt_logprobs: Annotated[Logprobs | None, about("The same for the prompt's tokens.", "None gives none")] = None
    detokenize: Annotated[bool, about("Turn the answer into text.", _FLAG)] = True
    skip_special_tokens: Annotated[bool, about("Leave special tokens out of the text.", _FLAG)] = True
    logit_bias: Annotated[
        Biases | None,
        about("What is added to tokens' logits.", "for example {42: -100}; bad_words forbids tokens altogether"),
    ] = None
    allowed_token_ids: Annotated[
        TokenIds | None, about("The only tokens that the answer may have.", "None allows every token")
    ] = None
    structured_outputs: Annotated[
        Annotated[StructuredOutputsParams, Meta(title="StructuredOutputsParams(...), or a dict with its fields")]
        | None,
        about(
            "What the answer must be: JSON that follows a schema, a match of a regular expression, one of several "
            "texts, or a sentence of a grammar.",
            "for example StructuredOutputsParams(choice=['yes', 'no'])",
        ),
    ] = None
    output_kind: Annotated[
        Annotated[RequestOutputKind, Meta(title="RequestOutputKind.CUMULATIVE, .DELTA or .FINAL_ONLY")],
        about("What each output of `AsyncLLM` holds.", "DELTA gives what is new since the last one"),
    ] = RequestOutputKind.CUMULATIVE
    bad_words_token_ids: Annotated[
        list[list[TokenId]] | None, about("Made from bad_words; not for callers.", "use bad_words")
    ] = None

    def __post_init__(self) -> None:
        self._take_convenient_forms()
        check_fields(self, SamplingParamsError)
        self._check_characters()
        self._check_contradictions()

    def clone(self) -> SamplingParams:
        """Returns a copy that shares nothing with these parameters."""
        return copy.deepcopy(self)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def reads_answer(self) -> bool:
        """True if a token is sampled by what the answer has so far: by a grammar, penalties, or words of several tokens
        that it must not come to have."""
        return (
            self.structured_outputs is not None
            or self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or any(len(word) > 1 for word in self.bad_words_token_ids or ())
        )

    def _take_convenient_forms(self) -> None:
        """Takes a string for `stop`, None for an empty list, arrays for lists, JSON's "123" for 123 in `logit_bias`."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        for name in ("stop", "stop_token_ids", "bad_words"):
            value = getattr(self, name)
            setattr(self, name, [] if value is None else as_list(value))
        self.allowed_token_ids = as_list(self.allowed_token_ids)
        if isinstance(self.seed, int) and self.seed == -1:
            self.seed = None
        if isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_BIASES:
            self.logit_bias = {_token_id_of_key(key): bias for key, bias in self.logit_bias.items()} or None
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = structured_outputs_of(self.structured_outputs)

    def _check_characters(self) -> None:
        for name, limit in MAX_CHARACTERS.items():
            texts: list[str] = getattr(self, name)
            characters = sum(map(len, texts))
            if characters > limit:
                raise SamplingParamsError(
                    f"{name} has {characters} characters in all; give at most {limit}", param=name
                )
            try:
                "".join(texts).encode()
            except UnicodeEncodeError:
                raise SamplingParamsError(
                    f"{name} is {shown(texts)}; it must be valid Unicode; leave out what is half of a surrogate pair",
                    param=name,
                ) from None

    def _check_contradictions(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise SamplingParamsError(
                f"best_of is {self.best_of}; it must be at least {self.n}, which is n: it counts all sequences, the n "
                f"returned among them",
                param="best_of",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens is {self.min_tokens}, above max_tokens ({self.max_tokens}); "
                f"lower the first or raise the second",
                param="min_tokens",
            )
        name, count = ("n", self.n) if self.best_of is None else ("best_of", self.best_of)
        if self.max_tokens == 0 and count > 1:
            raise SamplingParamsError(
                f"{name} is {count} with max_tokens 0: nothing is sampled; leave {name} out, or raise max_tokens",
                param=name,
            )
        if self.greedy and count > 1:
            raise SamplingParamsError(
                f"{name} is {count} with temperature {self.temperature:g}: all {count} sequences would be the same; "
                f"set {name}=1, or a temperature above 0",
                param=name,
            )
        if self.stop and not self.detokenize:
            raise SamplingParamsError(
                f"stop is {shown(self.stop)} with detokenize=False: stop strings are looked for in text; "
                f"set detokenize=True, or use stop_token_ids",
                param="stop",
            )
        if self.allowed_token_ids is not None and self.min_tokens > 0:
            left = set(self.allowed_token_ids) - set(self.stop_token_ids)
            if not left:
                raise SamplingParamsError(
                    f"allowed_token_ids {shown(self.allowed_token_ids)} are all in stop_token_ids, which are "
                    f"forbidden up to min_tokens ({self.min_tokens}): no token would be left; set min_tokens=0 or "
                    f"allow another token",
                    param="allowed_token_ids",
                )


@suggest_arguments
@dataclass
class BeamSearchParams:
    """Parameters of one beam search.

    `beam_width` sequences go on side by side, and as many are returned, the best first. A sequence's score is the sum
    of its log probabilities over its length to the power of `length_penalty`, the end-of-sequence token counted: above
    0 longer ones gain. `ignore_eos` makes that token one like others.
    `early_stopping` says when a search with `beam_width` finished sequences ends: True at once; False when the best of
    those that go on has a lower score now than the worst finished one; "never" when it could not get a higher one at
    any length.
    Nothing is drawn, so `temperature` is 0, or 1, which is the model's own distribution as well.
    Raises `SamplingParamsError` for values out of range, `UnknownArgumentError` for unknown names.
    """

    beam_width: Annotated[Count, about("Sequences that go on side by side.", "for example beam_width=4")]
    max_tokens: Annotated[Count, about("Longest answer in tokens.", "for example max_tokens=16")]
    ignore_eos: Annotated[bool, about("Go on behind the end-of-sequence token.", _FLAG)] = False
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=1)],
        about("0 or 1: nothing is drawn.", "beam search draws nothing, SamplingParams does"),
    ] = 0.0
    length_penalty: Annotated[
        float, about("Above 0 prefers longer answers.", "0 compares sums of log probabilities")
    ] = 1.0
    include_stop_str_in_output: Annotated[bool, about("Keep the end-of-sequence token in the answer.", _FLAG)] = False
    early_stopping: Annotated[bool | Literal["never"], about("When a search ends.", "leave it out for False")] = False

    def __post_init__(self) -> None:
        check_fields(self, SamplingParamsError)
        if self.temperature not in (0, 1):
            raise SamplingParamsError(
                f"temperature is {self.temperature}; it must be 0 or 1; beam search draws nothing, SamplingParams does",
                param="temperature",
            )


class TokenLogprobs(Struct, array_like=True):
    """Log probabilities of some tokens at one position.

    The first entry is the token that stands there. The other entries, as many as were asked for, are the most likely
    tokens, most likely first and the smaller id first among equals; the first entry's token may be among them again.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry in the vocabulary: 1 + the number of tokens that are more likely."""


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises `TokenOutOfVocabularyError` for a token id of at least `vocab_size`, the model's number of logits."""
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


def _token_id_of_key(key: Any) -> Any:
    """Returns the integer that a JSON object's key stands for, and any other key as it is."""
    return int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
