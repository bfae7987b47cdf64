"""The number of frames of the device pool: from the three ways to say it, the machine's memory, and what can be
filled."""

from __future__ import annotations

from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, KVMemoryError
from pagemill.machine import usable_memory

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "pb": 10**15,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pib": 2**50,
}  # fmt: skip
_DEFAULT_SHARE = 0.4
_DEFAULT_UTILIZATION = 0.9


def parse_memory(name: str, value: int | float | str, free: int) -> int:
    """Returns the bytes that setting `name` asks for: an integer (bytes), "512MiB", "2GB", or a share of `free` ("50%",
    0.5).

    Raises ConfigError for what it cannot read, and for shares outside 0 .. 1.
    """
    text = str(value).strip().lower()
    number = text.rstrip("%abcdefghijklmnopqrstuvwxyz ")
    unit = text[len(number) :].strip()
    try:
        amount = float(number)
    except ValueError:
        amount = -1.0
    is_share = unit == "%" or (unit == "" and isinstance(value, float)) or (unit == "" and "." in number)
    if is_share:
        share = amount / 100 if unit == "%" else amount
        if not 0 < share <= 1:
            raise ConfigError(
                f"{name} is {value!r}; as a share of what is free it must be above 0 and at most 1 (or 100%)",
                param=name,
            )
        return int(share * free)
    if unit not in _UNITS or not amount > 0 or isinstance(value, bool) or amount == float("inf"):
        raise ConfigError(
            f'{name} is {value!r}; it must be bytes (an integer), a size such as "512MiB" or "2GB", or a share of what '
            f'is free such as "50%" or 0.5{", or 0 for none" if name == "kv_host_memory" else ""}',
            param=name,
        )
    return int(amount * _UNITS[unit])


def check_sizes(config: EngineConfig) -> None:
    """Raises ConfigError for a size that nothing could be, whatever memory there is."""
    for name in ("kv_memory", "kv_host_memory", "kv_disk_memory", "weights_disk_memory"):
        value = getattr(config, name)
        if value is not None and (name != "kv_host_memory" or config.asks_for_host_memory):
            parse_memory(name, value, 0)


def num_frames(
    frame_bytes: int,
    most_frames: int,
    *,
    free: int,
    total: int,
    kv_memory: int | float | str | None = None,
    kv_cache_memory_bytes: int | None = None,
    gpu_memory_utilization: float | None = None,
    counts_steps: bool = False,
) -> int:
    """Returns how many frames of `frame_bytes` bytes the pool gets; at most one of the three settings is given.

    most_frames: what `max_num_seqs` sequences of `max_model_len` fill; bounds the default, not what was asked for.
    free, total: bytes of the device's memory, see `host_memory`; weights are loaded by now.
    gpu_memory_utilization (vLLM's meaning): share of `total` for everything, so the pool gets what is left of it.
    counts_steps: whether what is not `free` has what steps need in it. Then 0.9 of `total` is the default, else 40 % of
        `free`.
    Raises ConfigError for a setting out of range, KVMemoryError if the pool would exceed `free` or hold no frame.
    """
    if kv_memory is not None:
        name, value, wanted = "kv_memory", kv_memory, parse_memory("kv_memory", kv_memory, free)
    elif kv_cache_memory_bytes is not None:
        name, value, wanted = "kv_cache_memory_bytes", kv_cache_memory_bytes, kv_cache_memory_bytes
        if wanted <= 0:
            raise ConfigError(f"kv_cache_memory_bytes is {wanted}; it must be above 0", param=name)
    elif gpu_memory_utilization is not None or counts_steps:
        share = _DEFAULT_UTILIZATION if gpu_memory_utilization is None else gpu_memory_utilization
        name, value = "gpu_memory_utilization", share
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {value}; it must be above 0 and at most 1", param=name)
        used = total - free
        wanted = int(share * total) - used
        if wanted < frame_bytes:
            least = (used + frame_bytes) / total
            ways_out = [f"raise it above {least:.2f}"] if least < 1 else []
            ways_out += ["lower max_num_batched_tokens"] if counts_steps else []
            raise KVMemoryError(
                f"gpu_memory_utilization is {value} of {total} bytes, and {used} are in use already"
                f"{' or needed by steps' if counts_steps else ''}: nothing is left for the KV pool; "
                f"{' or '.join([*ways_out, 'free memory'])}",
                param=name,
            )
        if gpu_memory_utilization is None:
            wanted = min(wanted, most_frames * frame_bytes)
    else:
        name, value = "kv_memory", f"{_DEFAULT_SHARE:.0%}"
        wanted = int(min(_DEFAULT_SHARE * free, most_frames * frame_bytes))
    if wanted > free:
        raise KVMemoryError(
            f"{name} is {value}: {wanted} bytes, but only {free} are free; ask for less, or free memory", param=name
        )
    if wanted < frame_bytes:
        raise KVMemoryError(
            f"{name} is {value}: {wanted} bytes, less than the {frame_bytes} of a single block; give more memory or "
            "choose a smaller block_size",
            param=name,
        )
    return wanted // frame_bytes


def host_memory() -> tuple[int, int]:
    """Returns (free, total) bytes of the machine's memory, within what the process's control groups allow."""
    memory = usable_memory()
    total = memory.total if memory.limit is None else memory.limit
    return total if memory.available is None else memory.available, total
