"""What completions and chat have in common: the request's fields, and the answer around its choices.

A field that cannot be served is refused by name, never ignored; `WITHOUT_EFFECT` lists those that clients send
out of habit and that change nothing in any answer.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Collection, Mapping
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, create_model, model_validator

from pagemill.arguments import Argument, arguments_of
from pagemill.errors import (
    InvalidRequestError,
    PagemillError,
    PoolTooSmallError,
    PromptTooLongError,
    SamplingParamsError,
    UnknownArgumentError,
)
from pagemill.frontend.outputs import LogprobsOfPosition
from pagemill.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from pagemill.sampling.structured import OLDER_NAMES
from pagemill.server.protocol.body import FIRST_ERROR, Body, C, Name, Salt, Timeout, check_length
from pagemill.server.protocol.response_format import ResponseFormat

CACHE_HINTS = frozenset({"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"})
"""Fields that are accepted and dropped: they tune what this server does anyway."""
CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of messages and their parts that are accepted and dropped: equal beginnings are found without being marked."""
WITHOUT_EFFECT = CACHE_HINTS | {"user", "metadata", "safety_identifier", "parallel_tool_calls"}
"""Accepted and dropped."""

NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
"""Fields that this server does not serve: only these values (and null), which ask for nothing, are accepted."""


NOT_IN_REQUESTS = frozenset(
    {"max_tokens", "logprobs", "prompt_logprobs", "beam_width", "detokenize", "output_kind", "bad_words_token_ids"}
)
"""Declared parameters for which requests have fields of their own, or none."""

IN_JSON: dict[str, tuple[Any, str]] = {
    "stop": (str | list[str], "A text that ends the answer, or a list of such texts."),
    "logit_bias": (dict[str, float], "What is added to tokens' logits, by token id."),
    "structured_outputs": (
        dict[str, Any],
        "What the answer must be: an object with one of json, json_object, regex, choice and grammar.",
    ),
}
"""Types and descriptions of parameters that have another form in JSON."""


MAX_CHOICES = 4096
"""Sequences that one completion may ask for, over all its prompts."""
MAX_PROMPTS = MAX_CHOICES
"""Prompts of one completion."""
MAX_MESSAGES = 4096
"""Messages of one request."""
MAX_PARTS = 16384
"""Content parts of a conversation, over all its messages."""


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None
    continuous_usage_stats: bool = False


def _in_json(text: str) -> str:
    """Returns what is said of an argument's value in Python as it is said of JSON."""
    return re.sub(r"(?<= or )None\b|(?<=; )None\b", "null", text)


def _field(argument: Argument) -> Any:
    as_declared = argument.kind, f"{argument.description} It must be {_in_json(argument.limit)}."
    kind, description = IN_JSON.get(argument.name, as_declared)
    return _failing_fast(kind) | None, Field(None, description=description)


def _failing_fast(kind: Any) -> Any:
    """Returns a type with `FIRST_ERROR` on each list in it."""
    if get_origin(kind) in (Union, UnionType):
        parts = tuple(map(_failing_fast, get_args(kind)))
        return Union[parts]  # noqa: UP007
    return Annotated[kind, FIRST_ERROR] if get_origin(kind) is list else kind


DECLARED = arguments_of(BeamSearchParams) | arguments_of(SamplingParams)
MOST_ENTRIES = {name: argument.max_length for name, argument in DECLARED.items()} | {"messages": MAX_MESSAGES}
"""How many entries each field may have that is a list or a dict."""
ONLY_SEARCHED = ("length_penalty", "early_stopping")


def parameters_but(names: Collection[str]) -> Any:
    """Returns a body of the parameters of `SamplingParams` and `BeamSearchParams`, without some. None means: not
    given."""
    left_out = NOT_IN_REQUESTS.union(names)
    fields: Any = {name: _field(argument) for name, argument in DECLARED.items() if name not in left_out}
    return create_model("Parameters", __base__=Body, **fields)


if TYPE_CHECKING:
    Parameters = Body  # nothing here reads these fields by their own names
else:
    Parameters = parameters_but(())


def screened(
    kind: type[Body], body: Any, without_effect: Collection[str], neutral_only: Mapping[str, tuple[Any, ...]]
) -> Any:
    """Returns a body with the fields of its kind alone. Raises `InvalidRequestError` for one with too many entries, for
    an unknown one, and for one of `neutral_only` that asks for something."""
    if not isinstance(body, dict):
        return body
    kept = {}
    for name, value in body.items():
        if name in kind.model_fields:
            check_length(name, value, MOST_ENTRIES.get(name))
            kept[name] = value
        elif name in neutral_only:
            if value is not None and value not in neutral_only[name]:
                served = "".join(f" other than {json.dumps(one)}" for one in neutral_only[name][:1])
                raise InvalidRequestError(f"this server does not serve {name!r}{served}; leave it out", param=name)
        elif name in OLDER_NAMES:
            if value is not None:
                raise InvalidRequestError(
                    f'{name} is now a field of structured_outputs; give {{"structured_outputs": '
                    f'{{"{OLDER_NAMES[name]}": …}}}} instead',
                    param=name,
                )
        elif name not in without_effect:
            raise UnknownArgumentError.of("this endpoint", str(name), kind.model_fields)
    return kept


class GenerationRequest(Parameters):
    """The fields that completions and chat have in common. None means: the default."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = Field(None, description=DECLARED["prompt_logprobs"].description)
    response_format: ResponseFormat | None = None
    use_beam_search: bool | None = None
    cache_salt: Salt | None = None
    session_id: str | None = None
    fork_of: Name | None = None
    fork_index: int | None = None
    priority: int = 0
    timeout: Timeout | None = None
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    return_token_ids: bool | None = None

    _NEUTRAL_ONLY: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL_ONLY
    _BEGINNING: ClassVar[str]
    """The field that holds what is answered or continued."""

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, body: Any) -> Any:
        return screened(cls, body, WITHOUT_EFFECT, cls._NEUTRAL_ONLY)

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true", param="stream_options")
        best_of = self.given.get("best_of", 0)
        if self.stream and (self.use_beam_search or best_of > self.num_choices):
            what = "use_beam_search is True" if self.use_beam_search else f"best_of is {best_of}"
            raise InvalidRequestError(
                f"{what} with n {self.num_choices}: which are the best is known at the end, so they cannot be "
                f"streamed; set stream to false, or leave {what.split()[0]} out",
                param="stream",
            )
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> GenerationRequest:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs come with the whole answer; set stream to false, or leave prompt_logprobs out",
                param="prompt_logprobs",
            )
        return self

    @model_validator(mode="after")
    def _check_beginning(self) -> GenerationRequest:
        name = self._BEGINNING
        if self.fork_of is None:
            if self.fork_index is not None:
                raise InvalidRequestError("fork_index needs fork_of; leave it out", param="fork_index")
            if getattr(self, name) in (None, []):
                raise InvalidRequestError(f"{name} is missing or empty; give at least one, or fork_of", param=name)
        for other in (name, "session_id", "echo", "suffix") if self.fork_of is not None else ():
            if getattr(self, other, None):
                raise InvalidRequestError(
                    f"fork_of goes on from another answer, and takes no {other}; leave one of them out", param=other
                )
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The sampling parameters that the request has, by name."""
        return {name: value for name in Parameters.model_fields if (value := getattr(self, name)) is not None}

    @property
    def num_choices(self) -> int:
        """The answers that are wanted to each prompt."""
        return int(self.given.get("n", 1))

    @property
    def num_sequences(self) -> int:
        """The sequences that run at once for each prompt."""
        return max(self.num_choices, int(self.given.get("best_of", 1)))

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """True if every event of a stream says how many tokens there have been."""
        return self.include_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    @abstractmethod
    def params(self) -> SamplingParams | BeamSearchParams:
        """Returns how the answer is generated. Raises `SamplingParamsError` and `InvalidRequestError`."""

    def in_own_words(self, error: PagemillError) -> PagemillError:
        """Returns an error of the engine's as one of this request: with a field that it has."""
        names = self._own_names()
        if error.param in names:
            own = names[error.param]
            if error.param != "prompt":
                error.message = error.message.replace(error.param, own)
            error.param = own
        if isinstance(error, SamplingParamsError):
            error.message = _in_json(error.message)
        if isinstance(error, PoolTooSmallError):
            given = getattr(self, str(error.param)) is not None
            error = PromptTooLongError(error.message, param=error.param if given else names["prompt"])
        return error

    def _own_names(self) -> dict[str, str]:
        """Returns this request's names of the engine's arguments, by the engine's name, where the two differ."""
        return {
            "prompt": self._BEGINNING if self.fork_of is None else "fork_of",
            "beam_width": "best_of" if "best_of" in self.given else "n",
            "index": "fork_index",
            "structured_outputs": "structured_outputs" if self.response_format is None else "response_format",
        }

    def _params(self, **more: Any) -> SamplingParams | BeamSearchParams:
        """more: what the request says in words of its own."""
        given = {"prompt_logprobs": self.prompt_logprobs, **self.given, **more}
        asked = None if self.response_format is None else self.response_format.structured_outputs()
        if asked is not None:
            if "structured_outputs" in given:
                raise InvalidRequestError(
                    "response_format and structured_outputs both say what the answer must be; give one of them",
                    param="response_format",
                )
            given["structured_outputs"] = asked
        if self.use_beam_search:
            return self._search_params(given)
        for name in ONLY_SEARCHED:
            if name in given:
                raise InvalidRequestError(f"{name} needs use_beam_search to be true", param=name)
        return SamplingParams(**given, output_kind=RequestOutputKind.DELTA)

    def _search_params(self, given: dict[str, Any]) -> BeamSearchParams:
        """Returns a search with `best_of` beams, of which the best `n` are returned; vLLM's name for both is `n`."""
        n = given.pop("n", 1)
        width = given.pop("best_of", n)
        if self.session_id is not None:
            raise InvalidRequestError(
                "a session goes on from one answer, not from a search; leave session_id out", param="session_id"
            )
        if given["max_tokens"] is None:
            raise InvalidRequestError("use_beam_search needs max_tokens; say how far to search", param="max_tokens")
        if not 1 <= n <= width:
            raise InvalidRequestError(f"n is {n}; it must be from 1 to best_of ({width}), the width", param="n")
        given = {name: value for name, value in given.items() if value is not None}
        for name in given:
            if name not in arguments_of(BeamSearchParams):
                raise InvalidRequestError(f"{name} has no meaning with use_beam_search; leave it out", param=name)
        return BeamSearchParams(beam_width=width, **given)


PromptLogprobs = list[LogprobsOfPosition | None]
"""A prompt's log probabilities in vLLM's form: by position, then by token id. The first position has none."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class CompletionTokensDetails(BaseModel):
    """Says how many drafts speculative decoding has verified, by whether they are tokens of the answer."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails | None = None


class Answer(BaseModel, Generic[C]):
    """A whole answer, or one chunk of a stream, with fewer things in it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | None = None
    service_tier: Literal["default"] | None = None
    """The only tier, where a request asks for one."""
