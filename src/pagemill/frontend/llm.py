"""LLM: generation in this process, for scripts and notebooks. Method and argument names are vLLM's."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from tqdm.auto import tqdm  # type: ignore[import-untyped]

from pagemill.arguments import suggest_keywords
from pagemill.config import Settings, config_for, takes_settings
from pagemill.engine.messages import EngineReady, PinInfo
from pagemill.engine.stats import EngineStats
from pagemill.errors import InvalidRequestError, SamplingParamsError, shown
from pagemill.fixed_arguments import OF_CALLS, takes_fixed
from pagemill.frontend.client import InlineClient
from pagemill.frontend.frontend import Frontend
from pagemill.frontend.input_processor import Prompt, as_list_of_prompts, one_per_prompt
from pagemill.frontend.metrics import Metric, metrics_of
from pagemill.frontend.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from pagemill.frontend.pooling import EmbeddingRequestOutput, embedding_of
from pagemill.frontend.request_state import RequestState
from pagemill.frontend.session import Session
from pagemill.frontend.worker import Inline, immediately
from pagemill.hub import resolve_model
from pagemill.lora_request import LoRARequest
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.sessions.record import SessionInfo
from pagemill.sessions.store import SessionStore
from pagemill.tenant_limits import DEFAULT_TENANT, TenantLimits
from pagemill.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Bar: TypeAlias = bool | Callable[..., Any]
"""Says whether a progress bar is shown, or makes one of the arguments that `tqdm` takes."""


def not_served(name: str, reason: str) -> Callable[..., NoReturn]:
    """Returns a method of vLLM's `LLM` that is not served here: it raises `InvalidRequestError` with the reason."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InvalidRequestError(f"LLM.{name} is not served: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuses: {reason}."
    return refuse


class LLM:
    """One loaded model. Settings are `EngineConfig`'s. Threads may share it: their calls take turns.

    `target_tpot_ms` is "off" unless it is given: whoever waits for a whole batch gains nothing by even gaps.

    Raises `UnknownArgumentError`, `ConfigError` and `ModelLoadError` children. Close it, or use it as a context
    manager, to give its memory back before the process ends.
    """

    @takes_settings(Settings)
    def __init__(self, model: str, **settings: Any) -> None:
        self.config = config_for("LLM", model, {"target_tpot_ms": "off"} | settings)
        self.config.model = str(resolve_model(self.config.model))
        tokenizer = Tokenizer.load(self.config)
        store = SessionStore.of(self.config)
        hidden = True if sys.stderr is None else None  # a process may have been started without it
        with tqdm(desc="Loading weights", unit="B", unit_scale=True, leave=False, disable=hidden) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self.client = InlineClient(self.config, progress)
        name, tenants = Path(self.config.model).stem, self.config.tenants
        self.frontend = Frontend(self.client, tokenizer, store, name, Inline(), tenants)
        if sys.stderr is not None:
            sys.stderr.write(f"pagemill: {self.client.facts.description}\n")

    @takes_fixed(OF_CALLS, InvalidRequestError)
    @suggest_keywords
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None = None,
        *,
        use_tqdm: Bar = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts: text, `{"prompt": …}`, `{"prompt_token_ids": …}`, token ids, or a list of any of these.

        With `{"prompt": …, "suffix": …}` the answer is what stands between the two, for models that have tokens for it.
        Parameters are one for all prompts or one each (default `SamplingParams()`); a smaller `priority` is more
        urgent, `tenant` is whose the request is (see `EngineConfig.tenants`), and `lora_request` is its LoRA adapter,
        which is loaded with its first request. Outputs are in the order of the prompts. If any prompt or parameter is
        wrong, `InvalidRequestError` (or a child) is raised before anything runs. A request that fails while it runs has
        `finish_reason` "error" and its `error`; the others go on. Ctrl-C ends all requests of this call after the step
        that is running.
        """
        listed = as_list_of_prompts(prompts)
        params = one_per_prompt(sampling_params, len(listed), "params")
        requests = [
            immediately(self.frontend.prepare(prompt, each, **asked))
            for prompt, each, asked in zip(
                listed, params, _each(len(listed), priority, tenant, lora_request), strict=True
            )
        ]
        return self._run(requests, use_tqdm)

    @takes_fixed(OF_CALLS, InvalidRequestError)
    @suggest_keywords
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: Bar = False,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Searches the continuations of each prompt for those of the best score. Prompts, `priority`, `tenant` and
        `lora_request` are what `generate` takes.

        Outputs are in the order of the prompts. Raises `InvalidRequestError` (or a child) before anything runs. A
        search that fails while it runs has an `error` and no sequences; the others go on.
        """
        if not isinstance(params, BeamSearchParams):
            raise SamplingParamsError(f"params is {shown(params)}; it must be BeamSearchParams(...)", param="params")
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request}
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, **how)
        return [self._searched(output, params) for output in outputs]

    def _searched(self, output: RequestOutput, params: BeamSearchParams) -> BeamSearchOutput:
        error = output.outputs[0].error
        if error is not None:
            return BeamSearchOutput([], error)
        sequences = []
        for found in output.outputs:
            assert found.cumulative_logprob is not None
            tokens = output.prompt_token_ids + found.token_ids
            num_shown = len(tokens) - (found.finish_reason == "stop" and not params.include_stop_str_in_output)
            text = self.frontend.inputs.tokenizer.decode(tokens[:num_shown])
            sequences.append(BeamSearchSequence(tokens, text, found.cumulative_logprob, found.finish_reason))
        return BeamSearchOutput(sequences)

    @takes_fixed(OF_CALLS, InvalidRequestError)
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None = None,
        *,
        use_tqdm: Bar = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        cache_salt: str = "",
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation (a list of `{"role", "content"}`) or a list of them, through the chat template.

        A content is a text, or a list of `{"type": "text", "text": …}`, joined by line breaks. `template` goes to
        the template: `add_generation_prompt`, `chat_template`, `tools`, `documents`, and its own variables. Raises
        `InvalidRequestError` for parts of other types, and for tools or documents that the template does not read.
        """
        listed = isinstance(messages, Sequence) and not isinstance(messages, (str, bytes))
        single = not listed or (messages and isinstance(messages[0], Mapping))
        conversations: Any = [messages] if single else messages
        prompts = [
            self.frontend.inputs.render_chat(conversation, cache_salt=cache_salt, **template)
            for conversation in conversations
        ]
        how: dict[str, Any] = {"priority": priority, "tenant": tenant, "lora_request": lora_request}
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **how)

    @takes_fixed(OF_CALLS, InvalidRequestError)
    @suggest_keywords
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: Bar = True,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = DEFAULT_TENANT,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Returns an embedding of each prompt, in their order: hidden states after the model's last norm, pooled.

        Parameters are one for all prompts or one each (default `PoolingParams()`); the others are those of `generate`,
        and so is what is raised. The mean over all tokens computes each prompt whole; with the last token, cached
        prefixes are skipped.
        """
        listed = as_list_of_prompts(prompts)
        pooling = one_per_prompt(pooling_params, len(listed), "pooling_params")
        requests = [
            immediately(self.frontend.prepare(prompt, None, pooling=PoolingParams() if each is None else each, **asked))
            for prompt, each, asked in zip(
                listed, pooling, _each(len(listed), priority, tenant, lora_request), strict=True
            )
        ]
        self._run(requests, use_tqdm)
        return [embedding_of(request) for request in requests]

    def pin(
        self,
        prompt: Prompt,
        *,
        name: str,
        expires_s: float | None = None,
        cache_salt: str = "",
        tenant: str = DEFAULT_TENANT,
    ) -> PinInfo:
        """Computes a prefix and keeps its whole blocks in the pool until it is unpinned, or for so many seconds.

        A pin of the same name in the same namespace (`tenant` and `cache_salt`) is replaced. Raises `PinLimitError`
        where it would take more than `max_pinned_share` of the pool, or leave too little for an accepted request or for
        what another tenant is guaranteed.
        """
        request = immediately(self.frontend.prepare_pin(prompt, name, expires_s, cache_salt, tenant))
        self._run([request])
        return immediately(self.frontend.pin_of(request))

    def pins(self) -> list[PinInfo]:
        """Returns all pins, in the order in which they came."""
        return immediately(self.frontend.pins())

    def unpin(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> None:
        """Ends a pin: its blocks are cached from now on, like any others. Raises `PinNotFoundError`."""
        immediately(self.frontend.unpin(name, Namespace(tenant, cache_salt)))

    def session(self, name: str, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT) -> Session:
        """Returns a conversation that goes on where its last turn ended, under a name of its own in this namespace."""
        return Session(self.frontend, self._run, name, Namespace(tenant, cache_salt))

    def sessions(
        self, *, cache_salt: str = "", tenant: str = DEFAULT_TENANT, all_namespaces: bool = False
    ) -> list[SessionInfo]:
        """Returns the sessions of a namespace, or of all, the last used first."""
        return self.frontend.turns.store.list(None if all_namespaces else Namespace(tenant, cache_salt))

    @property
    def tokenizer(self) -> Tokenizer:
        """The one that this engine uses."""
        return self.frontend.inputs.tokenizer

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer for the same files, as vLLM gives it."""
        return self.frontend.inputs.tokenizer.hf

    def stats(self) -> EngineStats:
        """Returns counters since the start, and the pool's state now."""
        return immediately(self.frontend.stats())

    def resize_kv_memory(self, kv_memory: int | float | str | None) -> EngineReady:
        """Gives the KV pool another size: bytes, "512MiB", a share of what is free; "used" keeps only what running
        requests need, None goes back to the size at the start. Memory that goes is the system's at once.

        What is cached beyond the new size is evicted, to lower tiers where there are any. Raises `ConfigError` or
        `KVMemoryError`, and changes nothing, for what cannot be; `ResizeFailedError`, which says what has ended, if
        the device fails on the way.
        """
        return immediately(self.frontend.resize_kv_memory(kv_memory))

    def sleep(self, level: int = 1) -> None:
        """Gives the KV pool's memory back until `wake_up`: all but what pins keep. Sessions stay, and what was cached
        goes to lower tiers, where there are any. The weights stay too, so only level 1 is known. Requests are refused
        meanwhile."""
        immediately(self.frontend.sleep.begin(level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Ends `sleep`. Raises `KVMemoryError`, and sleeps on, where the memory is gone."""
        immediately(self.frontend.sleep.end(tags))

    def is_sleeping(self) -> bool:
        return self.frontend.sleep.asleep

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks of the pool, and the answers that drafts come from; blocks in lower tiers stay.
        Returns False while pins or requests hold blocks: then all blocks stay."""
        return immediately(self.frontend.reset_prefix_cache())

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns what `generate` takes where none are given."""
        return SamplingParams()

    def get_metrics(self) -> list[Metric]:
        """Returns the figures of `stats` under the names that they have in `/metrics`."""
        return metrics_of(self.stats())

    score = not_served("score", "models here give no scores of pairs; compare embeddings, see embed")
    classify = not_served("classify", "models here have no classes; ask in words, with allowed_token_ids")
    reward = not_served("reward", "models here have no head for rewards; score a prompt by prompt_logprobs")
    encode = not_served("encode", "its raw outputs are not given; use embed")

    def set_tenant(self, name: str, limits: TenantLimits) -> None:
        """Makes a tenant known, or changes its limits. Raises `ConfigError`, and changes nothing, for what the pool can
        not keep; its message says what it could."""
        immediately(self.frontend.set_tenant(name, limits))

    def close(self) -> None:
        """Gives the model and the KV pool back. May be called twice; `generate` then raises `EngineDeadError`."""
        immediately(self.client.close())
        self.frontend.turns.store.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: list[RequestState], use_tqdm: Bar = False) -> list[RequestOutput]:
        """Runs requests that have been prepared to their end. Another thread's run is waited for."""
        with self.client.lock:
            return self._run_alone(requests, use_tqdm)

    def _run_alone(self, requests: list[RequestState], use_tqdm: Bar) -> list[RequestOutput]:
        core, generated = self.client.core, 0
        try:
            with _raised_by_signals() as raised, _bar(use_tqdm, len(requests)) as bar:
                for request in requests:
                    self.frontend.start(request)
                while core.has_work():
                    outputs = core.step()
                    changed = self.frontend.receive(outputs)
                    generated += sum(len(output.new_token_ids) for output in outputs)
                    finished = sum(request.finished for request in changed)
                    if finished:
                        elapsed = bar.format_dict["elapsed"] or 1e-9
                        bar.set_postfix_str(f"{generated / elapsed:.1f} tokens/s", refresh=False)
                        bar.update(finished)
                    if raised:
                        raise raised[0]
            for request in requests:
                if request.error is not None:
                    logger.warning("%s failed: %s", request.request_id, request.error)
            return [request.whole() for request in requests]
        finally:
            for request in requests:
                self.frontend.release(request)


def _bar(use_tqdm: Bar, count: int) -> Any:
    """Returns a bar for so many prompts. Raises `InvalidRequestError` where `use_tqdm` makes none."""
    make, hidden = use_tqdm if callable(use_tqdm) else tqdm, not use_tqdm or sys.stderr is None
    try:
        return make(total=count, desc="Processed prompts", unit="prompt", disable=hidden)
    except Exception as error:
        raise InvalidRequestError(
            f"use_tqdm is {shown(use_tqdm)}, which makes no bar: {error}; give True, False, or what tqdm's arguments "
            f"make a bar of",
            param="use_tqdm",
        ) from error


@contextlib.contextmanager
def _raised_by_signals() -> Iterator[list[BaseException]]:
    """Gives what handlers of signals have raised, to be raised again between two steps: within one it may be taken for
    a fault of the step. Ctrl-C, with Python's own handler, waits for the step's end.

    Only in the main thread, where handlers run.
    """
    raised: list[BaseException] = []

    def keep(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        try:
            handler(number, frame)
        except BaseException as error:
            raised.append(error)
            if handler is not signal.default_int_handler:
                raise

    known = signal.valid_signals() if threading.current_thread() is threading.main_thread() else ()
    handlers: dict[int, Callable[..., Any]] = {
        number: handler for number in known if callable(handler := signal.getsignal(number))
    }
    for number in handlers:
        signal.signal(number, keep)
    try:
        yield raised
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _each(count: int, priority: Any, tenant: Any, lora_request: Any) -> list[dict[str, Any]]:
    """Returns what `prepare` takes beside prompt and parameters, for each of `count` prompts."""
    priorities = one_per_prompt(priority, count, "priorities")
    tenants = one_per_prompt(tenant, count, "tenants")
    adapters = one_per_prompt(lora_request, count, "lora_request")
    return [
        {"priority": rank, "tenant": owner, "lora_request": adapter}
        for rank, owner, adapter in zip(priorities, tenants, adapters, strict=True)
    ]
