"""Flags that several commands share, defined once: the engine's settings and the sampling parameters.

The engine's flags are made from `EngineConfig`, so that each setting is a flag of every command that starts an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from pagemill.config import FIXED, EngineConfig
from pagemill.errors import ConfigError
from pagemill.sampling.params import SamplingParams

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A pulled name (smollm2-135m), a folder or .gguf file, or a Hugging Face id."),
]

ENGINE_HELP = {
    "tokenizer": "Folder or file of another tokenizer than the model's own.",
    "dtype": "Of weights and activations: auto, float32, bfloat16 or float16.",
    "quantization": "Linear layers on 8-bit arithmetic: gguf (a quantized file's own integers) or int8 (any weights).",
    "max_model_len": "Longest prompt and answer together, in tokens. Default: what the model declares.",
    "max_num_seqs": "Sequences that run at the same time.",
    "max_num_batched_tokens": "Tokens of one step, prompts and answers together.",
    "block_size": "Tokens of one KV block: a power of two from 8 to 256.",
    "kv_memory": 'Size of the KV cache: bytes, "512MiB", or a share of free memory ("50%").',
    "kv_cache_memory_bytes": "The same in bytes (vLLM's name).",
    "gpu_memory_utilization": "The same as the share of a device's memory that the whole engine may use (vLLM's name).",
    "kv_cache_dtype": "Of the KV cache: auto (as the weights), float32, bfloat16, float16 or int8.",
    "kv_host_memory": 'Host memory for KV blocks that the pool evicts: bytes or "4GiB".',
    "kv_host_compression": "How they lie there: off (as they are) or zstd (compressed, without loss).",
    "kv_disk_memory": 'Disk space for KV blocks, which are found again after a restart: bytes or "20GiB".',
    "kv_disk_path": "Folder for them. Default: kv in pagemill's cache folder.",
    "enable_prefix_caching": "Share the KV cache of equal prefixes.",
    "eviction_policy": "Which cached blocks make room first: lru, lfu or cost (of computing them again).",
    "kv_compaction": "Move blocks of running sequences together again: auto (on CPU, where it pays) or off.",
    "target_tpot_ms": "Milliseconds between a request's tokens to aim for. Default: no limit beside the settings.",
    "preemption_mode": "How preempted sequences get back blocks that left the pool: auto, swap or recompute.",
    "max_pinned_share": "The most of the KV cache that pinned prefixes may take, from 0 to 1.",
    "session_path": "File in which sessions are kept. Default: they end with the process.",
    "max_sessions": "Sessions that are kept; one more is refused.",
    "session_timeout_s": "Seconds without use after which a session is forgotten. Default: never.",
    "seed": "The same seed gives the same answers to the same requests.",
    "hf_overrides": "JSON object that replaces entries of the model's configuration.",
    "device": "auto, cpu or cuda.",
    "num_threads": "CPU threads. Default: one per core.",
    "tenants": "JSON file of tenants: their limits and, for a server, their API keys.",
    "ageing_s": "Seconds of waiting that make up for one step of priority.",
    "check_invariants": "Recount the whole memory system after every step (slow; for debugging).",
}

SAMPLING_HELP = {
    "max_tokens": "Longest answer in tokens. Default: what is left of max_model_len.",
    "temperature": "0 always takes the most likely token.",
    "top_p": "Sample among the most likely tokens that together have this probability.",
    "top_k": "Sample among this many most likely tokens; 0 is off.",
    "min_p": "Leave out tokens less likely than this share of the most likely one.",
    "repetition_penalty": "Above 1 discourages what was said before.",
    "stop": "Text that ends the answer; may be given several times.",
}

Command = Callable[..., Any]


def engine_options(command: Command) -> Command:
    """Gives a command a flag per engine setting; what was given arrives as the dict `settings`.

    vLLM's flags that leave no choice here are taken too, but not shown.
    """

    def collect(given: dict[str, Any]) -> dict[str, Any]:
        if "hf_overrides" in given:
            given["hf_overrides"] = _json_object(given["hf_overrides"])
        return given

    return _with_options(command, "settings", EngineConfig, ENGINE_HELP, "Engine", collect, hidden=FIXED)


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Gives a command the sampling flags; they arrive as `params`, with the command's own defaults filled in."""

    def collect(given: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{"max_tokens": None, **defaults, **given})

    def decorate(command: Command) -> Command:
        return _with_options(command, "params", SamplingParams, SAMPLING_HELP, "Sampling", collect, defaults)

    return decorate


def _with_options(
    command: Command,
    target: str,
    source: type,
    helps: dict[str, str],
    panel: str,
    collect: Callable[[dict[str, Any]], Any],
    defaults: dict[str, Any] | None = None,
    hidden: Mapping[str, tuple[tuple[Any, ...], str]] = types.MappingProxyType({}),
) -> Command:
    """Replaces the command's parameter `target` by one flag per entry of `helps`, typed as the field of `source`, and
    one per entry of `hidden`, typed as the values that it accepts."""
    hints = typing.get_type_hints(source)
    own_defaults = {field.name: field.default for field in dataclasses.fields(source)} | {"max_tokens": None}
    own_defaults |= defaults or {}
    flags = {name: _option(name, hints[name], text, own_defaults[name], panel) for name, text in helps.items()}
    flags |= {name: _option(name, type(values[0]), None, None, panel) for name, (values, _) in hidden.items()}
    options = [
        inspect.Parameter(
            f"{panel.lower()}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
        for name, annotation in flags.items()
    ]
    signature = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != target]

    @functools.wraps(command)
    def with_flags(**arguments: Any) -> Any:
        given = {name: arguments.pop(option.name) for name, option in zip(flags, options, strict=True)}
        value = collect({name: value for name, value in given.items() if value not in (None, [])})
        return command(**arguments, **{target: value})

    with_flags.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *options]}
    return with_flags


def _option(name: str, hint: Any, text: str | None, default: Any, panel: str) -> Any:
    """Every flag is optional: what is not given is left to the defaults of the config or the parameters. One without a
    text is not shown."""
    flag = f"--{name.replace('_', '-')}"
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kind: Any = next((kind for kind in (bool, list[str], str, float, int) if kind in kinds), str)
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    if text is None:
        return Annotated[kind | None, typer.Option(flag, hidden=True)]
    if default is not None and default is not dataclasses.MISSING:
        text += f" Default: {str(default).lower() if kind is bool else default}."
    return Annotated[kind | None, typer.Option(flag, help=text, show_default=False, rich_help_panel=panel)]


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"hf_overrides is {text!r}, which is not JSON ({error})", param="hf_overrides") from error
    if not isinstance(value, dict):
        raise ConfigError(f"hf_overrides is {text!r}; it must be a JSON object", param="hf_overrides")
    return value
