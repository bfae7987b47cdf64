"""Bodies of HTTP: OpenAI's requests and responses for models, completions and chat, with vLLM's extra fields.

A field that cannot be served is refused by name, never ignored; `WITHOUT_EFFECT` lists those that clients send
out of habit and that change nothing in any answer.
"""

from __future__ import annotations

from abc import abstractmethod
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, create_model, model_validator

from pagemill.arguments import Argument, arguments_of
from pagemill.errors import (
    InvalidRequestError,
    PagemillError,
    PoolTooSmallError,
    PromptTooLongError,
    UnknownArgumentError,
)
from pagemill.sampling.params import BeamSearchParams, SamplingParams

WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"}
)
"""Accepted and dropped: they identify callers, or tune what this server does anyway."""

NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "suffix": ("",),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
}
"""Fields that this server does not serve: only these values (and null), which ask for nothing, are accepted."""


NOT_IN_REQUESTS = frozenset(
    {"max_tokens", "logprobs", "prompt_logprobs", "beam_width", "detokenize", "bad_words_token_ids"}
)
"""Declared parameters for which requests have fields of their own, or none."""

IN_JSON: dict[str, tuple[Any, str]] = {
    "stop": (str | list[str], "A text that ends the answer, or a list of such texts."),
    "logit_bias": (dict[str, float], "What is added to tokens' logits, by token id."),
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

Name = Annotated[str, Field(max_length=256)]
FIRST_ERROR = Field(fail_fast=True)
"""For a list of which the first wrong entry is enough for a refusal: there may be a million."""
Ids = Annotated[list[int], FIRST_ERROR]


def check_length(name: str, entries: Any, limit: int | None, way_out: str = "") -> None:
    """Raises `InvalidRequestError` for a list or a dict of too many entries, before anybody looks at each."""
    if limit is not None and isinstance(entries, (list, dict)) and len(entries) > limit:
        raise InvalidRequestError(f"{name} has {len(entries)} entries; give at most {limit}{way_out}", param=name)


class Body(BaseModel):
    """A request's body, or an object in it: these fields and no other."""

    model_config = ConfigDict(extra="forbid")


class KVMemory(Body):
    """The KV pool's size. In a request: what the setting `kv_memory` may be, "used", or null for the size at the start;
    in an answer: bytes."""

    kv_memory: StrictInt | StrictFloat | StrictStr | None


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


def _field(argument: Argument) -> Any:
    as_declared = argument.kind, f"{argument.description} It must be {argument.limit}."
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

if TYPE_CHECKING:
    Parameters = Body  # nothing here reads these fields by their own names
else:
    taken = {name: _field(argument) for name, argument in DECLARED.items() if name not in NOT_IN_REQUESTS}
    Parameters = create_model("Parameters", __base__=Body, **taken)
    """The fields that are parameters of `SamplingParams` and `BeamSearchParams`. None means: not given."""


class GenerationRequest(Parameters):
    """The fields that completions and chat have in common. None means: the default."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    use_beam_search: bool | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    fork_of: Name | None = None
    fork_index: int | None = None
    priority: int = 0

    _BEGINNING: ClassVar[str]
    """The field that holds what is answered or continued."""

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.model_fields:
                check_length(name, value, MOST_ENTRIES.get(name))
                kept[name] = value
            elif name in NEUTRAL_ONLY:
                if value is not None and value not in NEUTRAL_ONLY[name]:
                    raise InvalidRequestError(f"this server does not serve {name!r}; leave it out", param=name)
            elif name not in WITHOUT_EFFECT:
                raise UnknownArgumentError.of("this endpoint", str(name), cls.model_fields)
        return kept

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
    def _check_beginning(self) -> GenerationRequest:
        name = self._BEGINNING
        if self.fork_of is None:
            if self.fork_index is not None:
                raise InvalidRequestError("fork_index needs fork_of; leave it out", param="fork_index")
            if getattr(self, name) in (None, []):
                raise InvalidRequestError(f"{name} is missing or empty; give at least one, or fork_of", param=name)
        for other in (name, "session_id", "echo") if self.fork_of is not None else ():
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
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

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
        if isinstance(error, PoolTooSmallError):
            given = getattr(self, str(error.param)) is not None
            error = PromptTooLongError(error.message, param=error.param if given else names["prompt"])
        return error

    def _own_names(self) -> dict[str, str]:
        """Returns this request's names of the engine's arguments, by the engine's name, where the two differ."""
        return {
            "prompt": self._BEGINNING if self.fork_of is None else "fork_of",
            "beam_width": "best_of" if "best_of" in self.given else "n",
        }

    def _params(self, **more: Any) -> SamplingParams | BeamSearchParams:
        """more: what the request says in words of its own."""
        given = {**self.given, **more}
        if self.use_beam_search:
            return self._search_params(given)
        for name in ONLY_SEARCHED:
            if name in given:
                raise InvalidRequestError(f"{name} needs use_beam_search to be true", param=name)
        return SamplingParams(**given)

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


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `max_tokens` defaults to 16, as OpenAI's does."""

    _BEGINNING = "prompt"

    prompt: str | Ids | Annotated[list[str], FIRST_ERROR] | Annotated[list[Ids], FIRST_ERROR] | None = None
    logprobs: int | None = None
    echo: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_prompts(cls, body: Any) -> Any:
        prompt = body.get("prompt") if isinstance(body, dict) else None
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            check_length("prompt", prompt, MAX_PROMPTS, "; send them in several requests")
        return body

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        each = max(self.num_choices, int(self.given.get("best_of", 1)))
        count = len(self.prompts()) if self.prompt else 1
        if count * each > MAX_CHOICES and count > 1:
            raise InvalidRequestError(
                f"{count} prompts with {each} sequences each make {count * each}; ask for at most {MAX_CHOICES} in one "
                f"request, and send them in several requests",
                param="n",
            )
        return self

    def prompts(self) -> list[str | list[int]]:
        """Returns one entry per prompt: its text or its token ids."""
        assert self.prompt is not None
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self) -> SamplingParams | BeamSearchParams:
        return self._params(
            max_tokens=SamplingParams.max_tokens if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TextPart(Body):
    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One turn. `developer` is OpenAI's newer name for `system` and is given to the template as `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], FIRST_ERROR]
    name: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, message: Any) -> Any:
        """Drops what is empty (clients send answers back with all their fields) and refuses what is not text."""
        if not isinstance(message, dict):
            return message
        kept = {name: value for name, value in message.items() if value not in (None, [])}
        unknown = next((name for name in kept if name not in cls.model_fields), None)
        if unknown is not None or kept.get("role") in ("tool", "function"):
            what = repr(unknown) if unknown is not None else f"the role {kept['role']!r}"
            raise InvalidRequestError(f"this server does not serve {what} in a message; leave it out", param="messages")
        content = kept.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") != "text":
                raise InvalidRequestError(
                    f"this server takes text only, not a content part of type {part.get('type')!r}; leave it out",
                    param="messages",
                )
        return kept

    def for_template(self) -> dict[str, str]:
        """Returns the turn as chat templates take it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Without a maximum, an answer may fill what is left of `max_model_len`."""

    _BEGINNING = "messages"

    messages: Annotated[list[ChatMessage], FIRST_ERROR] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_parts(cls, body: Any) -> Any:
        messages = body.get("messages") if isinstance(body, dict) else None
        if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
            contents = [message.get("content") for message in messages if isinstance(message, dict)]
            parts = sum(len(content) for content in contents if isinstance(content, list))
            if parts > MAX_PARTS:
                raise InvalidRequestError(
                    f"messages have {parts} content parts; give at most {MAX_PARTS}", param="messages"
                )
        return body

    def for_template(self) -> list[dict[str, str]]:
        """Returns the conversation as chat templates take it."""
        return [message.for_template() for message in self.messages or ()]

    def params(self) -> SamplingParams | BeamSearchParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens} and max_completion_tokens is {self.max_completion_tokens}; "
                f"they mean the same, give one",
                param="max_tokens",
            )
        return self._params(
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    def _own_names(self) -> dict[str, str]:
        names = {**super()._own_names(), "logprobs": "top_logprobs"}
        if self.max_tokens is None and self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


C = TypeVar("C")


class Answer(BaseModel, Generic[C]):
    """A whole answer, or one chunk of a stream, with fewer things in it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[C]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Parallel lists over tokens. An echoed prompt's first token has no log probability."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Completion(Answer[CompletionChoice]):
    """OpenAI gives whole answers and chunks the same shape."""

    object: Literal["text_completion"] = "text_completion"


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """The token's UTF-8; None for a token that is not whole UTF-8 by itself."""


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(Answer[ChatChoice]):
    object: Literal["chat.completion"] = "chat.completion"


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(Answer[ChunkChoice]):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagemill"
    max_model_len: int | None = None
    """Tokens of a prompt and its answer, or fewer where the KV pool holds no more; None until the model is loaded."""


class Listing(BaseModel, Generic[C]):
    object: Literal["list"] = "list"
    data: list[C]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody
