"""EngineConfig: every setting of an engine, under vLLM's name where it has one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from msgspec import Meta

from pagemill.arguments import Count, Positive, about, check_fields, suggest_arguments
from pagemill.errors import ConfigError, InvalidRequestError, UnknownArgumentError, shown
from pagemill.fixed_arguments import OF_ENGINES, without_fixed
from pagemill.lora_request import LoRARequest
from pagemill.speculative_config import SpeculativeConfig
from pagemill.tenant_limits import TenantLimits, read_limits, read_tenants_file

P = ParamSpec("P")
S = TypeVar("S")

DTYPE_ALIASES = {"half": "float16", "float": "float32"}
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
ATTENTION_ALIASES = {
    "FLASH_ATTN": "flash_attn",
    "FLASHINFER": "flashinfer",
    "TORCH_SDPA": "sdpa",
    "TRITON_ATTN": "triton",
}
"""vLLM's names."""
ToolCallParser = Literal[
    "auto",
    "qwen3_coder",
    "hermes",
    "mistral",
    "deepseek_v3",
    "deepseek_v31",
    "phi4_mini_json",
    "granite",
    "gemma",
    "pythonic",
    "llama3_json",
]
ReasoningParser = Literal["auto", "off", "deepseek_r1", "qwen3", "mistral", "granite"]
Threads = Annotated[int, Meta(ge=1, le=1024)]
RankCount = Annotated[int, Meta(ge=1, le=256)]
Share = Annotated[float, Meta(ge=0, le=1)]
Model = Annotated[str, Meta(min_length=1, title="a path, a name such as 'smollm2-135m', or a Hugging Face id")]
Size = Annotated[int | float | str, Meta(title="bytes, a size such as '4GiB', or a share")]


@suggest_arguments
@dataclass(kw_only=True)
class EngineConfig:
    """Settings of one engine; `LLM(...)`, `AsyncLLM(...)` and `pagemill serve` take the same names.

    Raises `ConfigError` for a wrong value, and for two that contradict each other.
    """

    model: Annotated[Model, about("A path, a name such as 'smollm2-135m', or a Hugging Face id.")] = field(
        kw_only=False
    )
    tokenizer: Annotated[str | None, about("Folder or file of another tokenizer than the model's own.")] = None
    chat_template: Annotated[
        str | None, about("File of a Jinja template, or its source. Default: the model's own chat template.")
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any],
        about("JSON object of the chat template's variables, for requests that do not set them: enable_thinking, say."),
    ] = field(default_factory=dict)
    tool_call_parser: Annotated[
        ToolCallParser, about("How the model writes tool calls. Default: told by the chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningParser, about("How the model marks its reasoning; off splits none off. Default: told by the template.")
    ] = "auto"
    dtype: Annotated[Dtype, about("Number format of weights and activations: auto, float32, bfloat16 or float16.")] = (
        "auto"
    )
    quantization: Annotated[
        Literal["awq", "fp8", "gguf", "gptq", "int8"] | None,
        about(
            "Linear layers on 8-bit arithmetic: awq, gguf or gptq (the integers of such a checkpoint) or int8 (any "
            "weights); fp8 is for GPUs. Default: a quantized checkpoint's own integers where dtype is auto and the "
            "processor multiplies integers faster, and on GPUs."
        ),
    ] = None
    weights_disk_memory: Annotated[
        Size | None,
        about(
            'Disk space for weights packed for this CPU, which later starts map: bytes or "20GiB". Default: none are '
            "kept."
        ),
    ] = None
    weights_disk_path: Annotated[
        str | None, about("Folder for packed weights. Default: weights in pagemill's cache folder.")
    ] = None
    max_model_len: Annotated[
        Count | None, about("Longest prompt and answer together, in tokens. Default: what the model declares.")
    ] = None
    max_num_seqs: Annotated[Count, about("Sequences that run at the same time.")] = 256
    max_num_batched_tokens: Annotated[Count, about("Tokens of one step, prompts and answers together.")] = 512
    block_size: Annotated[
        Literal[8, 16, 32, 64, 128, 256], about("Tokens of one KV block: a power of two from 8 to 256.")
    ] = 16
    kv_memory: Annotated[
        Size | None,
        about(
            'Size of the KV cache: bytes, "512MiB", or a share of free memory ("50%" or 0.5). Default: 40 % of free '
            "memory (on GPUs, see gpu_memory_utilization), at most what max_num_seqs sequences of max_model_len can "
            "fill."
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        int | None, about("Size of the KV cache in bytes, of each of tensor_parallel_size processes (vLLM's name).")
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        about(
            "Share of a device's memory that the whole engine may use, weights and steps too; the KV cache gets what "
            "is left (vLLM's name). Default on GPUs: 0.9."
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Dtype | Literal["fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4_mixed", "int8/int4", "int4"],
        about(
            "Number format of the KV cache: auto (as the weights), float32, bfloat16, float16, int8, "
            "int4_mixed (4 bits, the latest tokens more); or fp8 (fp8_e4m3), fp8_e5m2, int8/int4 (8-bit keys, 4-bit "
            "values) and int4, which cost quality: try them on your model first."
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "triton", "flash_attn", "flashinfer", "sdpa", "torch"],
        about(
            "Attention's kernels: auto (the CPU's own; on a GPU the fastest of those installed that take the model), "
            "triton, flash_attn, flashinfer (GPU only), sdpa (on a GPU torch's own for prompts, and triton; on a CPU "
            "torch) or torch (slow)."
        ),
    ] = "auto"
    kv_host_memory: Annotated[
        Size | None,
        about(
            'Host memory for KV blocks that the pool evicts: bytes or "4GiB"; 0 for none. Default: on GPUs as much as '
            "the pool, where half of the free memory has room for it; else none."
        ),
    ] = None
    kv_host_compression: Annotated[
        Literal["off", "zstd"],
        about("How blocks lie in host memory: off (as they are) or zstd (compressed, without loss)."),
    ] = "off"
    kv_disk_memory: Annotated[
        Size | None,
        about('Disk space for KV blocks, which are found again after a restart: bytes or "20GiB".'),
    ] = None
    kv_disk_path: Annotated[str | None, about("Folder for blocks on disk. Default: kv in pagemill's cache folder.")] = (
        None
    )
    kv_disk_shared: Annotated[
        bool,
        about("Keep each block on disk in a file of its own, in a folder that several machines mount (NFS and such)."),
    ] = False
    enable_prefix_caching: Annotated[bool, about("Share the KV cache of equal prefixes.")] = True
    eviction_policy: Annotated[
        Literal["lru", "lfu", "cost"],
        about("Which cached blocks make room first: lru, lfu or cost (of computing them again, times their uses)."),
    ] = "lru"
    kv_compaction: Annotated[
        Literal["auto", "off"],
        about("Move blocks of running sequences together again: auto (on CPU, where it pays) or off."),
    ] = "auto"
    target_tpot_ms: Annotated[
        Positive | Literal["auto", "off"],
        about(
            "Milliseconds between a request's tokens to aim for; auto: prompts make a step at most 1.75 times as long "
            "as it is without them, and admission keeps room for what running answers will need, unless host memory "
            "takes as much as the pool; off, as in LLM: prompts and admission take what is free."
        ),
    ] = "auto"
    speculative_config: Annotated[
        SpeculativeConfig | Literal["auto", "off"],
        about(
            'How tokens are drafted, of which several are verified in one step. JSON object: {"method": "ngram"} looks '
            'the last ones up in prompt and answer, {"method": "suffix"} in other answers of the same tenant and cache '
            'salt too, {"method": "draft_model", "model": NAME} asks a smaller model, {"method": "medusa", "model": '
            "FOLDER} heads trained for the model. auto: ngram on CPU, off on GPUs; off: one token at a time."
        ),
    ] = "auto"
    """A dict of `SpeculativeConfig`'s fields is taken too, and None for "off". The answers are the same, to the bit on
    CPU."""
    preemption_mode: Annotated[
        Literal["auto", "swap", "recompute"],
        about(
            "How preempted sequences get back blocks that left the pool: auto (what takes less time), swap or "
            "recompute."
        ),
    ] = "auto"
    max_pinned_share: Annotated[
        Share, about("The most of the KV cache that pinned prefixes may take, from 0 to 1.")
    ] = 0.5
    session_path: Annotated[
        str | None, about("File in which sessions are kept. Default: they end with the process.")
    ] = None
    max_sessions: Annotated[
        Count,
        about(
            "Sessions that are kept, responses included. For one more, a tenant's oldest response gives way; where it "
            "has none, it is refused."
        ),
    ] = 1024
    session_timeout_s: Annotated[
        Positive | None, about("Seconds without use after which a session is forgotten. Default: never.")
    ] = None
    enable_lora: Annotated[bool, about("Serve LoRA adapters beside the model.")] = False
    max_loras: Annotated[Count, about("LoRA adapters that are loaded at most; all may be in one step.")] = 8
    max_lora_rank: Annotated[Count, about("Largest rank of a LoRA adapter.")] = 64
    lora_modules: Annotated[
        dict[str, str],
        about(
            "LoRA adapters that are loaded with the model: NAME=PATH, a folder that PEFT has written. Wants "
            "--enable-lora."
        ),
    ] = field(default_factory=dict)
    """A dict of paths by name. The first has number 1, see `LoRARequest`."""
    seed: Annotated[int, about("The same seed gives the same answers to the same requests.")] = 0
    hf_overrides: Annotated[
        dict[str, Any], about("JSON object that replaces entries of the model's configuration.")
    ] = field(default_factory=dict)
    device: Annotated[str, about("auto, cpu or cuda.")] = "auto"
    enforce_eager: Annotated[bool, about("Capture no CUDA graphs of decode steps (GPUs only).")] = False
    num_threads: Annotated[
        Threads | None,
        about("CPU threads; of each of tensor_parallel_size processes. Default: one per core, divided among them."),
    ] = None
    tensor_parallel_size: Annotated[
        RankCount,
        about("Processes that share the model: each has an equal part of every layer, and the KV cache of its heads."),
    ] = 1
    ageing_s: Annotated[
        Annotated[float, Meta(ge=0)], about("Seconds of waiting that make up for one step of priority.")
    ] = 10.0
    tenants: Annotated[
        dict[str, TenantLimits], about("JSON file of tenants: their limits and, for a server, their API keys.")
    ] = field(default_factory=dict)
    """A dict of `TenantLimits` or of dicts is taken too. Requests of other tenants are refused, "default" apart."""
    check_invariants: Annotated[
        bool, about("Recount the whole memory system after every step (slow; for debugging).")
    ] = False

    def __post_init__(self) -> None:
        for name in ("hf_overrides", "default_chat_template_kwargs"):
            if (value := getattr(self, name)) is None:
                setattr(self, name, {})
            elif not isinstance(value, dict):  # msgspec takes a tensor for a mapping
                raise ConfigError(f"{name} is {shown(value)}; it must be a dict", param=name)
        for name in ("model", "tokenizer", "chat_template", "kv_disk_path", "session_path", "weights_disk_path"):
            if isinstance(value := getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(value))
        if isinstance(self.tenants, (str, os.PathLike)):
            self.tenants = read_tenants_file(self.tenants).limits
        self.tenants = read_limits(self.tenants)
        if self.speculative_config is None:
            self.speculative_config = "off"
        if self.speculative_config not in ("auto", "off"):
            self.speculative_config = SpeculativeConfig.read(self.speculative_config)
        if self.seed is None:
            self.seed = type(self).seed
        if type(self.dtype).__module__ == "torch":
            self.dtype = str(self.dtype).removeprefix("torch.")  # type: ignore[assignment]
        if isinstance(self.dtype, str):
            self.dtype = DTYPE_ALIASES.get(self.dtype, self.dtype)  # type: ignore[assignment]
        if isinstance(self.attention_backend, str):
            named = ATTENTION_ALIASES.get(self.attention_backend, self.attention_backend)
            self.attention_backend = named  # type: ignore[assignment]
        check_fields(self, ConfigError)
        self._check_contradictions()
        self._check_adapters()

    @property
    def asked_drafts(self) -> SpeculativeConfig | None:
        """Returns how tokens are drafted if that was asked for; None for "auto" and "off"."""
        return self.speculative_config if isinstance(self.speculative_config, SpeculativeConfig) else None

    @property
    def asks_for_host_memory(self) -> bool:
        """Returns whether host memory for evicted blocks was asked for; not for the default, nor for 0."""
        return self.kv_host_memory not in (None, 0, "0")

    def lora_requests(self) -> list[LoRARequest]:
        """Returns the adapters that are loaded with the model."""
        modules = self.lora_modules.items()
        return [LoRARequest(name, number, path) for number, (name, path) in enumerate(modules, start=1)]

    def _check_contradictions(self) -> None:
        if self.kv_host_compression != "off" and not self.asks_for_host_memory:
            raise ConfigError(
                "kv_host_compression is for blocks in host memory, which nothing gives a size; set kv_host_memory",
                param="kv_host_compression",
            )
        for path, room, what in (
            ("kv_disk_path", "kv_disk_memory", "no blocks go to disk"),
            ("weights_disk_path", "weights_disk_memory", "no weights are kept"),
        ):
            if (folder := getattr(self, path)) is not None and getattr(self, room) is None:
                raise ConfigError(f"{path} is {folder!r}, but {what}; set {room} too, or leave {path} out", param=path)
        if self.kv_disk_shared and (self.kv_disk_memory is None or self.kv_disk_path is None):
            raise ConfigError(
                "kv_disk_shared is for blocks in a folder that several machines mount; set kv_disk_path to it, and "
                "kv_disk_memory to the room for blocks there",
                param="kv_disk_shared",
            )
        if self.kv_disk_shared and str(self.kv_disk_memory).endswith("%"):
            raise ConfigError(
                f"kv_disk_memory is {self.kv_disk_memory!r}, a share of the free space, of which blocks in a shared "
                'folder leave less and less; give bytes, such as "200GiB"',
                param="kv_disk_memory",
            )
        tiers = self.asks_for_host_memory or self.kv_disk_memory is not None
        if self.preemption_mode == "swap" and not (tiers and self.enable_prefix_caching):
            raise ConfigError(
                "preemption_mode 'swap' needs room below the pool, and names for what it swaps: set kv_host_memory or "
                "kv_disk_memory, and leave enable_prefix_caching on",
                param="preemption_mode",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs ({self.max_num_seqs}): a "
                f"step could not give every running sequence its token; raise the first or lower the second",
                param="max_num_batched_tokens",
            )
        self._check_ranks()
        ways = ("kv_memory", "kv_cache_memory_bytes", "gpu_memory_utilization")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both size the KV pool; give one of them", param=given[1])

    def _check_ranks(self) -> None:
        """Raises ConfigError for what a model in parts cannot do."""
        if self.tensor_parallel_size == 1:
            return
        drafting = None if self.asked_drafts is None else self.asked_drafts.model
        for name, value, way_out in (
            ("enable_lora", self.enable_lora or None, "merge the adapter into the model"),
            ("speculative_config: model", drafting, "draft by 'ngram' or 'suffix', which need no model"),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name} is {shown(value)}, which a model in parts cannot have so far (tensor_parallel_size is "
                    f"{self.tensor_parallel_size}); {way_out}, or leave tensor_parallel_size out",
                    param=name.partition(":")[0],
                )

    def _check_adapters(self) -> None:
        if self.lora_modules and not self.enable_lora:
            raise ConfigError(
                "lora_modules names adapters, but enable_lora is off; add enable_lora=True (--enable-lora)",
                param="lora_modules",
            )
        for name in ("max_loras", "max_lora_rank") if not self.enable_lora else ():
            if (value := getattr(self, name)) != getattr(type(self), name):
                raise ConfigError(
                    f"{name} is {value}, but enable_lora is off, so no adapters are loaded; add enable_lora=True "
                    f"(--enable-lora), or leave {name} out",
                    param=name,
                )
        if len(self.lora_modules) > self.max_loras:
            raise ConfigError(
                f"lora_modules has {len(self.lora_modules)} adapters; max_loras is {self.max_loras}; name fewer or "
                f"raise it",
                param="lora_modules",
            )
        try:
            self.lora_requests()
        except InvalidRequestError as error:
            raise ConfigError(f"lora_modules: {error.message}", param="lora_modules") from None


if TYPE_CHECKING:
    TenantsDict = dict[str, TenantLimits] | dict[str, dict[str, Any]]

    class TorchDtype(Protocol):
        """Stands for `torch.dtype`, for which nothing here imports torch."""

        @property
        def is_floating_point(self) -> bool: ...

    @dataclass(kw_only=True)
    class Settings(EngineConfig):
        """Declares what may be given for a config's fields, where that is more than what they hold then."""

        tokenizer: str | os.PathLike[str] | None = None  # type: ignore[assignment]
        chat_template: str | os.PathLike[str] | None = None  # type: ignore[assignment]
        dtype: Dtype | Literal["half", "float"] | TorchDtype = "auto"  # type: ignore[assignment]
        seed: int | None = 0  # type: ignore[assignment]
        kv_disk_path: str | os.PathLike[str] | None = None  # type: ignore[assignment]
        session_path: str | os.PathLike[str] | None = None  # type: ignore[assignment]
        weights_disk_path: str | os.PathLike[str] | None = None  # type: ignore[assignment]
        hf_overrides: dict[str, Any] | None = None  # type: ignore[assignment]
        default_chat_template_kwargs: dict[str, Any] | None = None  # type: ignore[assignment]
        speculative_config: SpeculativeConfig | dict[str, Any] | Literal["auto", "off"] | None = "auto"  # type: ignore[assignment]
        tenants: str | os.PathLike[str] | TenantsDict = field(default_factory=dict)  # type: ignore[assignment]
else:
    Settings = EngineConfig


def takes_settings(
    config: Callable[P, EngineConfig],
) -> Callable[[Callable[Concatenate[S, ...], None]], Callable[Concatenate[S, P], None]]:
    """Gives an `__init__(self, model, **settings)` the signature of a config class: type checkers, editors and `help`
    know every setting by its name and type. Arguments in `OF_ENGINES` are accepted, but not part of it."""

    def decorate(init: Callable[Concatenate[S, ...], None]) -> Callable[Concatenate[S, P], None]:
        itself, *_ = inspect.signature(init).parameters.values()
        settings = inspect.signature(config).parameters.values()
        init.__signature__ = inspect.Signature([itself, *settings])  # type: ignore[attr-defined]
        return init

    return decorate


class EngineArgs(EngineConfig):
    """vLLM's name for the settings of an engine, with those that leave no choice here (`OF_ENGINES`)."""

    @takes_settings(Settings)
    def __init__(self, model: str, **settings: Any) -> None:
        vars(self).update(vars(config_for(type(self).__name__, model, settings)))


class AsyncEngineArgs(EngineArgs):
    """The same for `AsyncLLM.from_engine_args`."""


def config_for(owner: str, model: str, settings: dict[str, Any]) -> EngineConfig:
    """Returns the config from an entry point's keyword arguments; an unknown one is reported under that name.

    Arguments in `OF_ENGINES` are accepted with the values that change nothing.
    """
    settings = without_fixed(settings, OF_ENGINES, ConfigError)
    known = [setting.name for setting in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            raise UnknownArgumentError.of(owner, name, known)
    return EngineConfig(model=model, **settings)
