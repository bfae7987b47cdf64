"""What goes over HTTP: OpenAI's requests and responses for models, completions and chat, with vLLM's extra fields.

A field that cannot be served is refused by name, never ignored; `WITHOUT_EFFECT` lists those that clients send
out of habit and that change nothing in any answer.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, StrictStr, model_validator

from pagemill.errors import InvalidRequestError, UnknownArgumentError
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


class KVMemory(BaseModel):
    """The KV pool's size. In a request: what the setting `kv_memory` may be, "used", or null for the size at the start;
    in an answer: bytes."""

    model_config = ConfigDict(extra="forbid")

    kv_memory: StrictInt | StrictFloat | StrictStr | None


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class GenerationRequest(BaseModel):
    """The fields that completions and chat have in common. None means: the default."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    fork_of: str | None = None
    fork_index: int | None = None
    priority: int = 0

    _BEGINNING: ClassVar[str]
    """The field with what an answer follows."""

    _PASSED_ON: ClassVar[tuple[str, ...]] = (
        "n",
        "best_of",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "top_k",
        "min_p",
        "repetition_penalty",
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "bad_words",
        "allowed_token_ids",
    )
    _ONLY_SEARCHED: ClassVar[tuple[str, ...]] = ("length_penalty", "early_stopping")
    _ALSO_SEARCHED: ClassVar[tuple[str, ...]] = ("ignore_eos", "temperature", "include_stop_str_in_output")

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if name in cls.model_fields:
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
        if self.stream and (self.use_beam_search or (self.best_of is not None and self.best_of > (self.n or 1))):
            what = "use_beam_search" if self.use_beam_search else "best_of"
            raise InvalidRequestError(
                f"{what} is {getattr(self, what)} with n {self.n or 1}: which are the best is known at the end, so "
                f"they cannot be streamed; set stream to false, or leave {what} out",
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
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _params(self, **more: Any) -> SamplingParams | BeamSearchParams:
        given = {name: value for name in self._PASSED_ON if (value := getattr(self, name)) is not None}
        of_search = {name: value for name in self._ONLY_SEARCHED if (value := getattr(self, name)) is not None}
        if self.use_beam_search:
            return self._search_params({**given, **of_search}, **more)
        for name in of_search:
            raise InvalidRequestError(f"{name} needs use_beam_search to be true", param=name)
        return SamplingParams(**given, **more)

    def _search_params(self, given: dict[str, Any], max_tokens: int | None, **more: Any) -> BeamSearchParams:
        """`best_of` beams, of which the best `n` are returned; vLLM's name for both is `n`."""
        n, width = given.pop("n", 1), given.pop("best_of", None)
        width = n if width is None else width
        if self.session_id is not None:
            raise InvalidRequestError(
                "a session goes on from one answer, not from a search; leave session_id out", param="session_id"
            )
        if max_tokens is None:
            raise InvalidRequestError("use_beam_search needs max_tokens; say how far to search", param="max_tokens")
        if not 1 <= n <= width:
            raise InvalidRequestError(f"n is {n}; it must be from 1 to best_of ({width}), the width", param="n")
        for name, value in {**given, **more}.items():
            if value is not None and name not in self._ONLY_SEARCHED + self._ALSO_SEARCHED:
                raise InvalidRequestError(f"{name} has no meaning with use_beam_search; leave it out", param=name)
        return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `max_tokens` defaults to 16, as OpenAI's does."""

    _BEGINNING = "prompt"

    prompt: str | list[int] | list[str] | list[list[int]] | None = None
    logprobs: int | None = None
    echo: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """One entry per prompt."""
        assert self.prompt is not None
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self) -> SamplingParams | BeamSearchParams:
        """Raises `SamplingParamsError` and `InvalidRequestError`."""
        return self._params(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One turn. `developer` is OpenAI's newer name for `system` and is given to the template as `system`."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

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
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatCompletionRequest(GenerationRequest):
    """`POST /v1/chat/completions`. Without a maximum, an answer may fill what is left of `max_model_len`."""

    _BEGINNING = "messages"

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self) -> SamplingParams | BeamSearchParams:
        """Raises `SamplingParamsError` and `InvalidRequestError`."""
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


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


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


class Completion(BaseModel):
    """A whole answer, and, with fewer things in it, one chunk of a stream: OpenAI gives both the same shape."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None
    """None for a token that is not whole UTF-8 by itself."""


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


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | None = None


class Delta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(BaseModel):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagemill"
    max_model_len: int | None = None
    """None until the model is loaded."""


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody
