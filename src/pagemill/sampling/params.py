"""SamplingParams: how one request's tokens are chosen and when it ends. Names and meanings are vLLM's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pagemill.arguments import suggest_arguments
from pagemill.errors import SamplingParamsError

MAX_LOGPROBS = 20


@suggest_arguments
@dataclass(kw_only=True)
class SamplingParams:
    """Parameters of one request.

    temperature 0 is greedy. `top_k` 0 or -1 is off. `seed` None takes one from the engine's own seed.
    `max_tokens` None means: up to `max_model_len`. `n` sequences share one prefill.
    Raises `SamplingParamsError` for values out of range and for contradictions, `UnknownArgumentError` for unknown names.
    """

    n: int = 1
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
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        raise NotImplementedError  # validation: text/sampling owner
