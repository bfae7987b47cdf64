"""EngineConfig: every setting of an engine, under vLLM's name where it has one."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

from pagemill.arguments import suggest_arguments
from pagemill.errors import ConfigError, UnknownArgumentError
from pagemill.tenant_limits import TenantLimits, read_limits, read_tenants_file

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
EVICTION_POLICIES = ("lru", "lfu", "cost")
KV_COMPACTION = ("auto", "off")
KV_HOST_COMPRESSION = ("off", "zstd")
PREEMPTION_MODES = ("auto", "swap", "recompute")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "int8")
QUANTIZATIONS = ("gguf", "int8")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_INT64 = 2**63

FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tensor_parallel_size": ((1,), "runs on one device"),
    "pipeline_parallel_size": ((1,), "runs on one device"),
    "data_parallel_size": ((1,), "runs on one device"),
    "enforce_eager": ((True, False), "captures no graphs"),
    "trust_remote_code": ((False,), "runs no code of a model's"),
    "enable_chunked_prefill": ((True,), "always computes long prompts in chunks"),
    "disable_sliding_window": ((False,), "keeps a model's windows"),
    "disable_log_stats": ((True,), "logs no statistics; stats() returns them"),
    "enable_lora": ((False,), "has no adapters"),
    "skip_tokenizer_init": ((False,), "always loads the tokenizer"),
    "swap_space": ((0,), "sends evicted blocks to kv_host_memory and kv_disk_memory instead"),
    "cpu_offload_gb": ((0,), "keeps all weights on the device"),
    "tokenizer_mode": (("auto",), "has one tokenizer for each model"),
    "load_format": (("auto",), "tells a model's format from its files"),
    "runner": (("auto", "generate"), "generates text"),
}
"""vLLM's arguments that leave no choice here: the values that ask for what pagemill does anyway, and what that is."""


@suggest_arguments
@dataclass(kw_only=True)
class EngineConfig:
    """Settings of one engine; `LLM(...)`, `AsyncLLM(...)` and `pagemill serve` take the same names.

    kv_memory: bytes of the KV pool: an int, "512MiB", or a share of what is free ("50%" or 0.5). None takes 40 % of
    free memory, at most what `max_num_seqs` sequences of `max_model_len` can fill.
    kv_cache_memory_bytes, gpu_memory_utilization: vLLM's two ways to say it; at most one of the three may be given.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    """How linear layers are held and computed: None in dtype; "gguf" on the integers of a quantized GGUF file; "int8"
    on any weights rounded to 8 bits."""
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 512
    block_size: int = 16
    kv_memory: int | float | str | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float | None = None
    kv_cache_dtype: str = "auto"
    kv_host_memory: int | str | None = None
    """Host memory for blocks that the pool evicts: bytes, or "4GiB"."""
    kv_host_compression: str = "off"
    """How they lie there: "off" as they are; "zstd" compressed, without loss."""
    kv_disk_memory: int | str | None = None
    """Disk space for blocks that neither keeps, and that outlive the process: bytes, or "20GiB"."""
    kv_disk_path: str | None = None
    """Folder for them; by default `kv` in pagemill's cache folder."""
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    """Which cached blocks make room first: "lru" the least recently used; "lfu" the least often used; "cost" those that
    are the least work to compute again, times their uses. The last two age."""
    kv_compaction: str = "auto"
    """Whether blocks of running sequences are moved together again: "auto" on CPU, where that saves attention more time
    than it costs; "off" never."""
    target_tpot_ms: float | None = None
    """Milliseconds between two tokens of a request that the controller holds; None: it changes nothing."""
    preemption_mode: str = "auto"
    """How a sequence that lost its blocks gets back those that have left the pool: "swap" loads them from the lower
    tiers, "recompute" computes them again, "auto" does what takes less time by the speeds measured."""
    max_pinned_share: float = 0.5
    """The most of the KV pool that pinned prefixes may take."""
    session_path: str | None = None
    """File in which sessions are kept; without one they end with the process."""
    max_sessions: int = 1024
    session_timeout_s: float | None = None
    """A session that nobody used for so long is forgotten."""
    seed: int = 0
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    num_threads: int | None = None
    ageing_s: float = 10.0
    """A request waits at most this long, in rank, for each step of priority another one is ahead."""
    tenants: dict[str, TenantLimits] = field(default_factory=dict)
    """Limits by tenant, as `TenantLimits` or dicts of them, or the path of a tenants file. Requests of others than
    these and "default" are refused."""
    check_invariants: bool = False
    """Recount the whole memory system after every step (slow; for debugging, also in production)."""

    def __post_init__(self) -> None:
        self.tokenizer = None if self.tokenizer is None else os.fspath(self.tokenizer)
        self.hf_overrides = {} if self.hf_overrides is None else self.hf_overrides
        if not isinstance(self.model, (str, os.PathLike)) or not os.fspath(self.model):
            raise ConfigError(
                f"model is {self.model!r}; it must be a path, a name such as 'smollm2-135m', or a Hugging Face id",
                param="model",
            )
        self._check_types()
        if isinstance(self.tenants, (str, os.PathLike)):
            self.tenants = read_tenants_file(self.tenants).limits
        self.tenants = read_limits(self.tenants)
        self.dtype = DTYPE_ALIASES.get(self.dtype, self.dtype)
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"block_size is {self.block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}",
                param="block_size",
            )
        for name, known in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}", param=name
                )
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ConfigError(
                f"eviction_policy is {self.eviction_policy!r}; it must be one of {', '.join(EVICTION_POLICIES)}",
                param="eviction_policy",
            )
        if self.target_tpot_ms is not None and not 0 < self.target_tpot_ms < math.inf:
            raise ConfigError(
                f"target_tpot_ms is {self.target_tpot_ms}; it must be above 0 milliseconds, or None for no target",
                param="target_tpot_ms",
            )
        if self.kv_compaction not in KV_COMPACTION:
            raise ConfigError(
                f"kv_compaction is {self.kv_compaction!r}; it must be one of {', '.join(KV_COMPACTION)}",
                param="kv_compaction",
            )
        if self.kv_host_compression not in KV_HOST_COMPRESSION:
            raise ConfigError(
                f"kv_host_compression is {self.kv_host_compression!r}; it must be one of "
                f"{', '.join(KV_HOST_COMPRESSION)}",
                param="kv_host_compression",
            )
        if self.kv_host_compression != "off" and self.kv_host_memory is None:
            raise ConfigError(
                "kv_host_compression is for blocks in host memory, of which there is none; set kv_host_memory",
                param="kv_host_compression",
            )
        if self.kv_disk_path is not None and self.kv_disk_memory is None:
            raise ConfigError(
                f"kv_disk_path is {self.kv_disk_path!r}, but no blocks go to disk; set kv_disk_memory too, or leave "
                f"kv_disk_path out",
                param="kv_disk_path",
            )
        if self.preemption_mode not in PREEMPTION_MODES:
            raise ConfigError(
                f"preemption_mode is {self.preemption_mode!r}; it must be one of {', '.join(PREEMPTION_MODES)}",
                param="preemption_mode",
            )
        tiers = self.kv_host_memory is not None or self.kv_disk_memory is not None
        if self.preemption_mode == "swap" and not (tiers and self.enable_prefix_caching):
            raise ConfigError(
                "preemption_mode 'swap' has nowhere to swap to, or no names for what it swaps: set kv_host_memory or "
                "kv_disk_memory, and leave enable_prefix_caching on",
                param="preemption_mode",
            )
        if self.quantization not in (None, *QUANTIZATIONS):
            raise ConfigError(
                f"quantization is {self.quantization!r}; it must be None or one of {', '.join(QUANTIZATIONS)}",
                param="quantization",
            )
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_threads", "max_sessions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} is {value}; it must be at least 1", param=name)
        if not 0 <= self.ageing_s < math.inf:
            raise ConfigError(f"ageing_s is {self.ageing_s}; it must be 0 or more seconds", param="ageing_s")
        if not 0 <= self.max_pinned_share <= 1:
            raise ConfigError(
                f"max_pinned_share is {self.max_pinned_share}; it must lie between 0 and 1", param="max_pinned_share"
            )
        if self.session_timeout_s is not None and not 0 < self.session_timeout_s < math.inf:
            raise ConfigError(
                f"session_timeout_s is {self.session_timeout_s}; it must be above 0 seconds, or None to keep sessions",
                param="session_timeout_s",
            )
        if not -_INT64 <= self.seed < _INT64:
            raise ConfigError(f"seed is {self.seed}; it must fit into 64 bits: -2**63 to 2**63 - 1", param="seed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs ({self.max_num_seqs}): a "
                f"step could not give every running sequence its token; raise the first or lower the second",
                param="max_num_batched_tokens",
            )
        ways = ("kv_memory", "kv_cache_memory_bytes", "gpu_memory_utilization")
        given = [name for name in ways if getattr(self, name) is not None]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both size the KV pool; give one of them", param=given[1])

    def _check_types(self) -> None:
        """Before any value is compared, and before one goes to the engine process, which would not take it."""
        kinds: dict[type | tuple[type, ...], tuple[str, tuple[str, ...]]] = {
            int: ("an integer", ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_threads",
                                 "kv_cache_memory_bytes", "seed", "max_sessions")),
            (int, float): ("a number", ("gpu_memory_utilization", "ageing_s", "session_timeout_s", "target_tpot_ms",
                                    "max_pinned_share")),
            (int, float, str): ("bytes, a size or a share", ("kv_memory", "kv_host_memory", "kv_disk_memory")),
            str: ("a text", ("dtype", "quantization", "kv_cache_dtype", "kv_disk_path", "eviction_policy", "device",
                             "session_path", "preemption_mode", "kv_compaction",
                             "kv_host_compression")),
            dict: ("a dict", ("hf_overrides",)),
        }  # fmt: skip
        optional = {setting.name for setting in fields(self) if setting.default is None}
        for kind, (wanted, names) in kinds.items():
            for name in names:
                value = getattr(self, name)
                if value is None and name in optional:
                    continue
                if not isinstance(value, kind) or isinstance(value, bool):
                    raise ConfigError(f"{name} is {value!r}; it must be {wanted}", param=name)
        for name in ("enable_prefix_caching", "check_invariants"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be True or False", param=name)


def config_for(owner: str, model: str, settings: dict[str, Any]) -> EngineConfig:
    """The config from an entry point's keyword arguments; an unknown one is reported under the entry point's name.

    Arguments in `FIXED` are accepted with the values that change nothing.
    """
    known = [setting.name for setting in fields(EngineConfig)]
    for name, value in settings.items():
        if name in FIXED:
            _check_fixed(name, value)
        elif name not in known:
            raise UnknownArgumentError.of(owner, name, known)
    return EngineConfig(model=model, **{name: value for name, value in settings.items() if name not in FIXED})


def _check_fixed(name: str, value: Any) -> None:
    accepted, what = FIXED[name]
    if not any(value == other and isinstance(value, bool) is isinstance(other, bool) for other in accepted):
        raise ConfigError(
            f"{name} is {value!r}; pagemill {what}, so it can only be {' or '.join(map(repr, accepted))}; leave it out",
            param=name,
        )
