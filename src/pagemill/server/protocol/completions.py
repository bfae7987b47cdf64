"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from pagemill.errors import InvalidRequestError
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.protocol.body import FIRST_ERROR, Ids, check_length
from pagemill.server.protocol.generation import (
    MAX_CHOICES,
    MAX_PROMPTS,
    NEUTRAL_ONLY,
    Answer,
    GenerationRequest,
    PromptLogprobs,
)


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`. `max_tokens` defaults to 16, as OpenAI's does."""

    _NEUTRAL_ONLY = NEUTRAL_ONLY | {"add_special_tokens": (True,)}
    _BEGINNING = "prompt"

    prompt: str | Ids | Annotated[list[str], FIRST_ERROR] | Annotated[list[Ids], FIRST_ERROR] | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = Field(None, description="What follows the answer, which is written to fit between the two.")

    @model_validator(mode="before")
    @classmethod
    def _check_prompts(cls, body: Any) -> Any:
        prompt = body.get("prompt") if isinstance(body, dict) else None
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            check_length("prompt", prompt, MAX_PROMPTS, "; send them in several requests")
        return body

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        each = self.num_sequences
        count = len(self.prompts()) if self.prompt else 1
        if count * each > MAX_CHOICES and count > 1:
            raise InvalidRequestError(
                f"{count} prompts with {each} sequences each make {count * each}; ask for at most {MAX_CHOICES} in one "
                f"request, and send them in several requests",
                param="n",
            )
        return self

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionRequest:
        """Refuses what has no place around an answer that stands between two texts."""
        if not self.suffix:
            return self
        count = len(self.prompts())
        if count > 1:
            raise InvalidRequestError(
                f"suffix needs one prompt, and here are {count}; send them in several requests", param="suffix"
            )
        for other, why in (("echo", "the model reads them in another order"), ("session_id", "it goes on behind one")):
            if getattr(self, other):
                raise InvalidRequestError(
                    f"{other} has no meaning for an answer between two texts: {why}; leave out {other} or suffix",
                    param="suffix",
                )
        return self

    def prompts(self) -> list[str | list[int]]:
        """Returns one entry per prompt: its text or its token ids."""
        assert self.prompt is not None
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def params(self) -> SamplingParams | BeamSearchParams:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise InvalidRequestError(
                "max_tokens is 0, so there would be no answer; set echo or prompt_logprobs to get the prompt's log "
                "probabilities, or ask for one token at least",
                param="max_tokens",
            )
        echoed = self.logprobs if self.echo else None
        if None not in (echoed, self.prompt_logprobs) and echoed != self.prompt_logprobs:
            raise InvalidRequestError(
                f"with echo, logprobs ({echoed}) is for the prompt too, and prompt_logprobs is {self.prompt_logprobs}; "
                f"leave it out",
                param="prompt_logprobs",
            )
        return self._params(
            max_tokens=SamplingParams.max_tokens if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if echoed is None else echoed,
        )


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
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(Answer[CompletionChoice]):
    """OpenAI gives whole answers and chunks the same shape."""

    object: Literal["text_completion"] = "text_completion"
