"""Makes requests of what callers write: reads every form of prompt, tokenizes, and checks all that needs no engine.

Nothing is shortened or clamped in silence: what cannot be served as it was asked for is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import time
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

from pagemill import errors
from pagemill.arguments import as_list
from pagemill.engine.messages import TOO_LONG, EngineReady, EngineRequest
from pagemill.errors import shown
from pagemill.frontend.request_state import BestOf, RequestState
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams, check_vocabulary
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.tenant_limits import DEFAULT_TENANT
from pagemill.text.tokenizer import Tokenizer, check_unicode

if TYPE_CHECKING:
    from pagemill.sampling.grammar import GrammarChecker

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict: `{"prompt": text}` or `{"prompt_token_ids": ids}`, either with a `"cache_salt"`.

Where a dict has both, the ids count and the text is only kept for the output. With `{"prompt": text, "suffix": text}`
the answer is what stands between the two.
"""
PromptType = Prompt
"""vLLM's name."""


class _TextOptions(TypedDict, total=False):
    suffix: str
    cache_salt: str


class TextPrompt(_TextOptions):
    """A prompt as text, under vLLM's name."""

    prompt: str


class _TokensOptions(TypedDict, total=False):
    prompt: str
    cache_salt: str


class TokensPrompt(_TokensOptions):
    """A prompt as token ids, under vLLM's name."""

    prompt_token_ids: Sequence[int]


PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "suffix")
MAX_PRIORITY = 2**31 - 1
MAX_PROMPTS = 65536
"""Prompts of one call: all are held until the last has its answer."""


class _Read(NamedTuple):
    """A prompt in one form."""

    text: str | None
    token_ids: list[int]
    salt: str
    ends: Sequence[int] | None = None
    """Tokens that end the answer before a suffix; None where there is none."""


class InputProcessor:
    """Makes requests for one engine. `facts` returns what the engine is now."""

    def __init__(self, tokenizer: Tokenizer, facts: Callable[[], EngineReady]) -> None:
        self.tokenizer = tokenizer
        self.facts = facts

    @functools.cached_property
    def _grammars(self) -> GrammarChecker:
        """What checks grammars; imported when the first request has one."""
        from pagemill.sampling.grammar import GrammarChecker

        return GrammarChecker(self.tokenizer.special_tokens, self.tokenizer.missing_characters)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None,
        request_id: str,
        *,
        priority: int = 0,
        arrival_s: float | None = None,
        tenant: str = DEFAULT_TENANT,
        in_session: bool = False,
        pooling: PoolingParams | None = None,
        adapter: int = 0,
        ends: Sequence[int] | None = None,
    ) -> RequestState:
        """Returns a checked request. `params` (default `SamplingParams()`) is never changed.

        pooling: asks for an embedding instead, whatever `params` is. arrival_s: seconds of `time.monotonic()`, None for
        now. adapter: the number of a loaded LoRA adapter. ends: of a fork, those of its origin. Raises
        `InvalidRequestError` or one of its children.
        """
        if not isinstance(priority, Integral) or abs(priority) > MAX_PRIORITY:
            raise errors.InvalidRequestError(
                f"priority is {shown(priority)}; it must be an integer from {-MAX_PRIORITY} to {MAX_PRIORITY}",
                param="priority",
            )
        answered = pooling is None and getattr(params, "max_tokens", None) != 0
        text, token_ids, salt, own_ends = self._read(prompt, answered=answered)
        ends = own_ends if ends is None else ends
        tenant, salt = Namespace(tenant, salt)
        facts = self.facts()
        if tenant not in facts.tenants:
            raise errors.UnknownTenantError.of(tenant, facts.tenants)
        if pooling is not None:
            pooling = _own_pooling(pooling)
            params = SamplingParams(temperature=0.0, max_tokens=0, detokenize=False)
        elif not facts.has_head:
            raise errors.InvalidRequestError(
                "this model makes embeddings only: its folder has no head (lm_head.weight), and its configuration ties "
                "none to the embedding; ask for embeddings, or serve a model that generates"
            )
        _check_token_ids(token_ids, facts, answered=answered)
        if ends is not None and (pooling is not None or isinstance(params, BeamSearchParams)):
            what = "a beam search, which knows no end but that of a text" if pooling is None else "an embedding"
            raise errors.InvalidRequestError(f"suffix has no meaning with {what}; leave it out", param="suffix")
        beam = None
        if isinstance(params, BeamSearchParams):
            beam = dataclasses.replace(params)
            params = _params_of_search(beam, facts)
        params = self._fit_params(SamplingParams() if params is None else params, len(token_ids), ends, facts)
        if params.structured_outputs is not None:
            self._grammars.check(params.structured_outputs, Namespace(tenant, salt))
        best_of = None
        if params.best_of is not None and params.best_of > params.n:
            best_of = BestOf(params.n, params.logprobs is not None)
            params.n, params.logprobs = params.best_of, params.logprobs or 0
        request = EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            arrival_s=time.monotonic() if arrival_s is None else arrival_s,
            priority=int(priority),
            cache_salt=salt,
            beam=beam,
            pooling=pooling,
            tenant=tenant,
            in_session=in_session,
            adapter=adapter,
        )
        state = RequestState(request, self.tokenizer, text, best_of)
        state.ends = ends
        return state

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, cache_salt: str = "", **template: Any) -> Prompt:
        """Returns a conversation as a prompt. Takes and raises what `Tokenizer.apply_chat_template` does, and raises
        what `encode` does."""
        text = self.tokenizer.apply_chat_template(messages, **template)
        token_ids = self.encode(text, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids, "cache_salt": cache_salt}

    def encode(self, text: str, add_special_tokens: bool = True, *, answered: bool = True) -> list[int]:
        """Returns the token ids of a text. Raises `PromptTooLongError` for one that is so long that it cannot fit,
        before it is tokenized, and what `Tokenizer.encode` raises.

        answered: whether a token must be left for the answer.
        """
        self._check_characters("the prompt has", text, answered=answered)
        return self.tokenizer.encode(text, add_special_tokens)

    def _check_characters(self, who_has: str, *texts: str, answered: bool = True) -> None:
        limit, count = self.facts().max_model_len, sum(map(len, texts))
        if count > limit and (fewest := sum(map(self.tokenizer.fewest_tokens, texts))) + answered > limit:
            raise errors.PromptTooLongError(
                f"{who_has} {count} characters, at least {fewest} tokens, which{' with one for the answer' * answered} "
                f"{TOO_LONG}: max_model_len is {limit}; shorten the prompt or raise max_model_len",
                param="prompt",
            )

    def _read_around(self, text: str, suffix: Any, salt: Any) -> _Read:
        """Returns the prompt for what stands between two texts, in the form that the model knows."""
        if not isinstance(suffix, str):
            raise errors.InvalidRequestError(
                f"suffix is of type {type(suffix).__name__}; it must be text", param="suffix"
            )
        facts, form = self.facts(), self.tokenizer.fill_in_the_middle
        if form is None or form.largest_id >= facts.vocab_size:
            raise errors.InvalidRequestError(
                "this model has no tokens for filling in the middle, so it cannot take a suffix; leave suffix out, or "
                "serve a model that was trained for it, such as Qwen2.5-Coder",
                param="suffix",
            )
        self._check_characters("the prompt and its suffix have", text, suffix)
        check_unicode(text, "prompt")
        check_unicode(suffix, "suffix")
        ends = [token_id for token_id in form.end_token_ids if token_id not in facts.eos_token_ids]
        return _Read(text, form.encode(text, suffix), salt, ends)

    def _read(self, prompt: Prompt, *, answered: bool) -> _Read:
        given = as_mapping(prompt)
        for key in given:
            if key not in PROMPT_KEYS:
                raise errors.UnknownArgumentError.of("a prompt", str(key), PROMPT_KEYS)
        text, token_ids, salt, suffix = (given.get(key) for key in PROMPT_KEYS)
        salt = "" if salt is None else salt
        if text is None and token_ids is None:
            raise errors.InvalidRequestError(
                'a prompt is a text, token ids, or a dict with "prompt" (text) or "prompt_token_ids"; give one of them',
                param="prompt",
            )
        if not isinstance(text, (str, type(None))):
            raise errors.InvalidRequestError(
                f"the prompt is of type {type(text).__name__}; it must be text", param="prompt"
            )
        if isinstance(token_ids, (list, array)):
            # before anybody looks at a million of them
            self.facts().check_prompt_length(len(token_ids), answered=answered)
        if suffix is not None and (suffix or not isinstance(suffix, str)):
            if text is None or token_ids is not None:
                raise errors.InvalidRequestError(
                    "suffix needs a prompt as text, and here are token ids; leave it out, or write the model's own "
                    "tokens for filling in the middle into the ids",
                    param="suffix",
                )
            return self._read_around(text, suffix, salt)
        ids = self.encode(text or "", answered=answered) if token_ids is None else token_ids_of(token_ids)
        return _Read(text, ids, salt)

    def _fit_params(
        self, params: SamplingParams, prompt_len: int, ends: Sequence[int] | None, facts: EngineReady
    ) -> SamplingParams:
        """Returns a copy that says in numbers what the engine must do: bad words as tokens, the ends of a middle.

        It is checked once more: the caller may have changed the parameters since they were made.
        """
        if not isinstance(params, SamplingParams):
            raise errors.SamplingParamsError(
                f"sampling_params is {shown(params)}; it must be SamplingParams(...)", param="sampling_params"
            )
        params = dataclasses.replace(params)
        if ends is not None and not params.ignore_eos:
            stops = dict.fromkeys([*params.stop_token_ids, *ends])
            params = dataclasses.replace(params, stop_token_ids=list(stops))
        name, count = ("n", params.n) if params.best_of is None else ("best_of", params.best_of)
        if count > facts.max_num_seqs:
            raise errors.RequestTooLargeError.of_width(name, count, facts.max_num_seqs)
        limit = facts.max_model_len
        room = limit - prompt_len
        if params.max_tokens is None:
            if params.min_tokens > room:
                raise errors.PromptTooLongError(
                    f"min_tokens is {params.min_tokens}, but after the prompt's {prompt_len} tokens only {room} fit "
                    f"into max_model_len ({limit}); lower min_tokens or raise max_model_len",
                    param="min_tokens",
                )
        elif params.max_tokens > room:
            raise errors.PromptTooLongError(
                f"the prompt's {prompt_len} tokens and max_tokens {params.max_tokens} make "
                f"{prompt_len + params.max_tokens}, over max_model_len ({limit}); ask for at most {room} tokens, or "
                f"shorten the prompt",
                param="max_tokens",
            )
        if params.bad_words:
            params.bad_words_token_ids = self.tokenizer.bad_words_token_ids(params.bad_words)
        check_vocabulary(params, facts.vocab_size)
        return params


def _own_pooling(params: PoolingParams) -> PoolingParams:
    """Returns a copy, which is checked once more: the caller may have changed the parameters since they were made."""
    if not isinstance(params, PoolingParams):
        raise errors.SamplingParamsError(
            f"pooling_params is {shown(params)}; it must be PoolingParams(...)", param="pooling_params"
        )
    return dataclasses.replace(params)


def _check_token_ids(token_ids: list[int], facts: EngineReady, *, answered: bool) -> None:
    facts.check_prompt_length(len(token_ids), answered=answered)
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < facts.vocab_size:
            raise errors.TokenOutOfVocabularyError(
                f"the prompt has the token id {shown(token_id)}; this model's are 0 to {facts.vocab_size - 1}; "
                f"take them from this model's tokenizer",
                param="prompt",
            )


def _params_of_search(beam: BeamSearchParams, facts: EngineReady) -> SamplingParams:
    """Returns how many sequences come back, how long they may be, and how they become text."""
    tokens = facts.vocab_size - len(facts.eos_token_ids)
    if tokens < min(beam.beam_width, facts.max_num_seqs):
        raise errors.RequestTooLargeError(
            f"beam_width is {beam.beam_width}, but this model has {tokens} tokens that a sequence can go on with; ask "
            "for no more than that",
            param="beam_width",
        )
    if beam.beam_width > facts.max_num_seqs:
        raise errors.RequestTooLargeError.of_width("beam_width", beam.beam_width, facts.max_num_seqs)
    return SamplingParams(
        n=beam.beam_width,
        max_tokens=beam.max_tokens,
        ignore_eos=beam.ignore_eos,
        include_stop_str_in_output=beam.include_stop_str_in_output,
    )


def as_mapping(prompt: Prompt) -> Mapping[str, Any]:
    """Returns any form of prompt as a dict of `PROMPT_KEYS`. Checks nothing."""
    if isinstance(prompt, Mapping):
        return prompt
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def size_of(content: Any) -> int:
    """Returns how much there is to tokenize or to copy in a prompt or in messages: characters, or token ids.

    Checks nothing: what is no such thing counts nothing, and is refused by whoever reads it.
    """
    if isinstance(content, Mapping):
        ids = content.get("prompt_token_ids")
        if ids is None:
            return size_of(content.get("content", content.get("prompt"))) + size_of(content.get("suffix"))
        return size_of(ids)
    if isinstance(content, (list, tuple)) and content and isinstance(content[0], Mapping):
        return sum(size_of(part.get("text", part)) if isinstance(part, Mapping) else 0 for part in content)
    return len(content) if isinstance(content, Sized) else 0


def token_ids_of(values: Any) -> list[int]:
    """Returns token ids as a list of integers: from a list, another sequence, an array or a tensor of one dimension.

    Raises `InvalidRequestError` for anything else.
    """
    listed = as_list(values)
    try:
        if isinstance(listed, list) and not any(isinstance(value, bool) for value in listed):
            return [operator.index(value) for value in listed]
    except TypeError:
        pass
    raise errors.InvalidRequestError(
        f"prompt_token_ids must be a list of integers, not {shown(values)}", param="prompt"
    )


def as_list_of_prompts(prompts: Any) -> list[Prompt]:
    """Returns one prompt or many as a list; a list of integers is one prompt of token ids.

    Raises `InvalidRequestError` for what is no prompt, and for more than `MAX_PROMPTS`.
    """
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    listed = as_list(prompts)
    if not isinstance(listed, list):
        raise errors.InvalidRequestError(
            f"prompts is {shown(prompts)}; it must be a text, token ids, a dict with one of them, or a list of these",
            param="prompts",
        )
    if listed and all(isinstance(item, Integral) for item in listed):
        return [listed]
    if len(listed) > MAX_PROMPTS:
        raise errors.InvalidRequestError(
            f"prompts has {len(listed)} entries; give at most {MAX_PROMPTS} prompts in one call", param="prompts"
        )
    return listed


def one_per_prompt(values: Any, count: int, name: str) -> list[Any]:
    """Returns a single value for all prompts, or a list of as many as there are prompts."""
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise errors.SamplingParamsError(
            f"{len(values)} {name} were given for {count} prompts; give one, or one each", param=name
        )
    return list(values)
