"""vLLM's arguments that leave no choice here, as data: what is accepted, and why anything else is refused."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pagemill.errors import PagemillError, shown

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


class Fixed(NamedTuple):
    """One argument without a choice.

    accepted: values that ask for what pagemill does anyway. what: what that is, behind "pagemill". misleading: values
    that are accepted too, with a warning, for who gives one may expect something else.
    """

    accepted: tuple[Any, ...]
    what: str
    misleading: tuple[Any, ...] = ()


ONE_DEVICE = "divides a model over devices by tensor_parallel_size alone"
OWN_GRAPHS = "captures CUDA graphs of decode steps by itself, the usual ones at the start, or none with enforce_eager"
NO_DOWNLOAD_CHOICE = "takes the version that its own names or the Hugging Face cache stand for"

OF_ENGINES: dict[str, Fixed] = {
    "pipeline_parallel_size": Fixed((1,), ONE_DEVICE),
    "data_parallel_size": Fixed((1,), ONE_DEVICE),
    "distributed_executor_backend": Fixed((None, "uni", "mp"), "runs a model's parts in processes of this machine"),
    "enable_expert_parallel": Fixed((False,), ONE_DEVICE),
    "disable_custom_all_reduce": Fixed((True, False), "has no all-reduce of its own"),
    "max_seq_len_to_capture": Fixed((8192,), OWN_GRAPHS),
    "compilation_config": Fixed((None,), OWN_GRAPHS),
    "trust_remote_code": Fixed((False,), "runs no code of a model's", (True,)),
    "enable_chunked_prefill": Fixed((True, None), "always computes long prompts in chunks"),
    "disable_sliding_window": Fixed((False,), "keeps a model's windows"),
    "disable_log_stats": Fixed((True,), "logs no statistics; stats() returns them", (False,)),
    "max_cpu_loras": Fixed((None,), "keeps every adapter that it has loaded, up to max_loras"),
    "lora_dtype": Fixed(("auto",), "holds adapters as they are stored, or in the model's dtype"),
    "fully_sharded_loras": Fixed((False,), "takes adapters on one device alone"),
    "skip_tokenizer_init": Fixed((False,), "always loads the tokenizer"),
    "swap_space": Fixed((0, 0.0), "sends evicted blocks to kv_host_memory and kv_disk_memory instead", (4, 4.0)),
    "cpu_offload_gb": Fixed((0, 0.0), "keeps all weights on the device"),
    "enable_sleep_mode": Fixed((True, False), "can always sleep"),
    "tokenizer_mode": Fixed(("auto",), "has one tokenizer for each model"),
    "enable_auto_tool_choice": Fixed(
        (True,), "lets a model choose among the tools wherever its chat template has them"
    ),
    "load_format": Fixed(("auto",), "tells a model's format from its files"),
    "config_format": Fixed(("auto",), "tells a model's format from its files"),
    "model_impl": Fixed(("auto",), "has one implementation of each model"),
    "runner": Fixed(("auto", "generate", "pooling"), "generates text and embeds with any model"),
    "task": Fixed(("auto", "generate", "embed"), "generates text and embeds with any model"),
    "convert": Fixed(("auto", "none", "embed"), "generates text and embeds with any model"),
    "revision": Fixed((None,), NO_DOWNLOAD_CHOICE),
    "code_revision": Fixed((None,), "runs no code of a model's"),
    "tokenizer_revision": Fixed((None,), NO_DOWNLOAD_CHOICE),
    "download_dir": Fixed((None,), "keeps models in its own cache folder, or Hugging Face's (HF_HOME)"),
    "generation_config": Fixed(
        ("vllm",), "samples by SamplingParams() where nothing is given, not by the model's file", ("auto",)
    ),
    "override_generation_config": Fixed((None,), "samples by SamplingParams() where nothing is given"),
    "num_scheduler_steps": Fixed((1,), "plans every step by itself"),
    "prefix_caching_hash_algo": Fixed(
        ("sha256", "builtin", "sha256_cbor", "xxhash", "xxhash_cbor"), "names blocks by a digest of its own"
    ),
    "num_gpu_blocks_override": Fixed((None,), "sizes the KV cache by kv_memory"),
    "calculate_kv_scales": Fixed((False,), "scales a KV cache in int8 by the token, and one in fp8 not at all"),
    "kv_transfer_config": Fixed((None,), "moves blocks by kv_host_memory and kv_disk_memory"),
    "scheduling_policy": Fixed(("priority", "fcfs"), "serves by priority, and first come first served within one"),
    "async_scheduling": Fixed((None, True, False), "plans a step while the one before it runs, on GPUs alone"),
    "limit_mm_per_prompt": Fixed((None,), "reads text only"),
    "mm_processor_kwargs": Fixed((None,), "reads text only"),
    "logits_processors": Fixed((None,), "runs no functions of callers in its engine"),
}
"""Arguments of `LLM(...)`, `AsyncLLM(...)` and of commands that start an engine."""

OF_SERVERS: dict[str, Fixed] = {
    "api_server_count": Fixed((1,), "serves HTTP by one process"),
    "chat_template_content_format": Fixed(("auto", "string"), "gives templates each content as one text"),
    "disable_frontend_multiprocessing": Fixed((False,), "runs the engine in a process of its own", (True,)),
    "disable_log_requests": Fixed((True,), "logs a line for each request, without any text of it", (False,)),
    "enable_log_requests": Fixed((False,), "logs a line for each request, without any text of it", (True,)),
    "disable_uvicorn_access_log": Fixed((True,), "has one log for all, see --log-level", (False,)),
    "enable_prompt_tokens_details": Fixed((True, False), "always says how many prompt tokens were cached"),
    "enable_request_id_headers": Fixed((True, False), "always answers with X-Request-Id"),
    "enable_server_load_tracking": Fixed((False,), "counts requests in /metrics", (True,)),
    "enable_reasoning": Fixed((True,), "splits reasoning off where a model marks it, see --reasoning-parser"),
    "response_role": Fixed(("assistant",), "answers as the assistant"),
    "uvicorn_log_level": Fixed(("info",), "has one log for all, see --log-level", ("debug", "trace", "warning")),
}
"""Flags of commands that serve."""

OF_SAMPLING: dict[str, Fixed] = {
    "spaces_between_special_tokens": Fixed((True,), "writes tokens as the tokenizer does"),
    "truncate_prompt_tokens": Fixed((None,), "shortens no prompt"),
    "logits_processors": Fixed((None,), "runs no functions of callers in its engine"),
    "guided_decoding": Fixed((None,), "has it as structured_outputs=StructuredOutputsParams(...)"),
    "skip_reading_prefix_cache": Fixed((None, False), "looks every prompt up, except those with prompt_logprobs"),
    "flat_logprobs": Fixed((False,), "gives log probabilities as dicts"),
    "extra_args": Fixed((None,), "has no arguments of plug-ins"),
    "use_beam_search": Fixed((False,), "searches by BeamSearchParams"),
    "length_penalty": Fixed((1.0, 1), "has it in BeamSearchParams"),
    "early_stopping": Fixed((False,), "has it in BeamSearchParams"),
}
"""Arguments of `SamplingParams(...)`."""

OF_STRUCTURED: dict[str, Fixed] = {
    "disable_fallback": Fixed((True, False), "has one compiler of grammars"),
    "disable_additional_properties": Fixed((False,), 'lets the schema say that, by "additionalProperties": false'),
}
"""Arguments of `StructuredOutputsParams(...)`."""

OF_CALLS: dict[str, Fixed] = {
    "prompt_adapter_request": Fixed((None,), "has no prompt adapters"),
    "tokenization_kwargs": Fixed((None,), "tokenizes every prompt as the model's files say"),
    "mm_processor_kwargs": Fixed((None,), "reads text only"),
    "trace_headers": Fixed((None,), "sends traces from its server only, which takes the header traceparent"),
    "data_parallel_rank": Fixed((None,), ONE_DEVICE),
    "chat_template_content_format": Fixed(("auto", "string"), "gives templates each content as one text"),
}
"""Arguments of `generate` and its like."""


def without_fixed(given: Mapping[str, Any], fixed: Mapping[str, Fixed], error: type[PagemillError]) -> dict[str, Any]:
    """Returns the arguments that are not `fixed`. Raises `error` for a value that asks for something else."""
    for name in given.keys() & fixed.keys():
        value, (accepted, what, misleading) = given[name], fixed[name]
        if _is_one_of(value, misleading):
            warn_once(name, repr(value), what)
        elif not _is_one_of(value, accepted):
            allowed = " or ".join(repr(one) for one in (*accepted, *misleading) if one is not None)
            only = f", so it can only be {allowed}" if allowed else ""
            raise error(f"{name} is {shown(value)}; pagemill {what}{only}; leave it out", param=name)
    return {name: value for name, value in given.items() if name not in fixed}


def takes_fixed(fixed: Mapping[str, Fixed], error: type[PagemillError]) -> Callable[[F], F]:
    """Makes a function, or a class, take `fixed` arguments by name, which its signature does not show."""

    def decorate(target: F) -> F:
        if isinstance(target, type):
            target.__init__ = decorate(target.__init__)  # type: ignore[misc]
            return target

        @functools.wraps(target)
        def call(*args: Any, **kwargs: Any) -> Any:
            return target(*args, **(without_fixed(kwargs, fixed, error) if kwargs.keys() & fixed.keys() else kwargs))

        return call  # type: ignore[return-value]

    return decorate


def _is_one_of(value: Any, others: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in others)


@functools.cache
def warn_once(name: str, value: str, what: str) -> None:
    """Says once that a value has no effect."""
    logger.warning("%s=%s changes nothing: pagemill %s", name, value, what)
