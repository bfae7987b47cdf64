"""Reads what a plan is asked for, and says what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pagemill.errors import ConfigError
from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.sizing import parse_memory
from pagemill.planner.limits import Limits
from pagemill.planner.load import Generated, Load, Traced
from pagemill.planner.model_shape import find_shape
from pagemill.planner.search import Choices
from pagemill.planner.workload import with_timeout, workload_named
from pagemill.simulate.roofline import DeviceModel, read_device
from pagemill.simulate.trace import read_trace

USUAL_RATE = 10.0
USUAL_WORKLOAD = "sharegpt"
USUAL_HOST_MEMORY = "64GiB"
KV_DTYPES = (
    "auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int4_mixed", "int8/int4", "int4"
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """Holds what was typed. Limits are milliseconds; rate None: the usual one, or the trace's. timeout: seconds, as of
    every request; None: the workload's or trace's own. workload, seed, kv_host_memory None: nobody has said, so the
    usual ones where they have an effect.
    """

    model: str
    device: str
    dtype: str
    workload: str | None
    trace: Path | None
    rate: float | None
    slo_ttft_p99: float
    slo_tpot_p99: float
    ranks: tuple[int, ...] | None
    kv_dtype: tuple[str, ...]
    max_num_seqs: tuple[int, ...]
    max_num_batched_tokens: tuple[int, ...]
    kv_host_memory: str | None
    timeout: float | None
    price: float | None
    requests: int
    seed: int | None

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `make_plan`. Raises `ConfigError` children, TraceError and ModelLoadError."""
        for name in self.kv_dtype:
            if name not in KV_DTYPES:
                raise ConfigError(f"kv_cache_dtype is {name!r}; choose of {', '.join(KV_DTYPES)}")
        limits = Limits(self.slo_tpot_p99 / 1000, self.slo_ttft_p99 / 1000)
        device, model = self._device(), find_shape(self.model)
        for name in self.kv_dtype:
            if name != "auto" and (why := kv_format(name).refusal(model.head_dim)):
                raise ConfigError(f"kv_cache_dtype is {name!r}: {why}; choose another")
        load = self._load()
        widest, budget = min(self.max_num_seqs), max(self.max_num_batched_tokens)
        if budget < widest:
            raise ConfigError(
                f"max_num_batched_tokens is at most {budget}, below max_num_seqs ({widest}): a step could not give "
                "every running sequence its token; raise the first or lower the second"
            )
        return {
            "device": device,
            "model": model,
            "dtype": self.dtype,
            "load": load,
            "limits": limits,
            "choices": Choices(
                self.ranks, self.kv_dtype, self.max_num_seqs, self.max_num_batched_tokens, self._host(device, load)
            ),
        }

    def _device(self) -> DeviceModel:
        device = read_device(self.device)
        if self.price is None:
            return device
        if not 0 <= self.price < float("inf"):
            raise ConfigError(f"price is {self.price:g}; it must be US dollars per device and hour, 0 or more")
        return replace(device, price_per_hour=self.price, sources={**device.sources, "price_per_hour": "given"})

    def _load(self) -> Load:
        if self.trace is None:
            rate = USUAL_RATE if self.rate is None else self.rate
            workload = workload_named(USUAL_WORKLOAD if self.workload is None else self.workload)
            return Load(Generated(with_timeout(workload, self.timeout), self.seed or 0), rate, self.requests)
        for flag, value in (("--workload", self.workload), ("--seed", self.seed)):
            if value is not None:
                raise ConfigError(
                    f"{flag} is {value!r} beside --trace, which says what comes and when; give one of the two"
                )
        traced = Traced([with_timeout(one, self.timeout) for one in read_trace(self.trace)])
        return Load(traced, traced.rate if self.rate is None else self.rate, self.requests)

    def _host(self, device: DeviceModel, load: Load) -> tuple[int | None, ...]:
        """Returns the sizes of host memory to try: the default, and what was asked for, or is usual where prompts
        share; or none alone."""
        asked = self.kv_host_memory
        if device.link_bytes_per_s is None and asked not in (None, "0"):
            raise ConfigError(
                f"kv_host_memory is {asked!r}, which would have no effect: {device.about} has no link to a host's "
                "memory that is another; leave it out, or give 0"
            )
        if asked is None and device.link_bytes_per_s is not None and load.shares:
            asked = USUAL_HOST_MEMORY
        if asked == "0":
            return (0,)
        return (None,) if asked is None else (None, parse_memory("kv_host_memory", asked, device.memory_bytes))


def read_counts(name: str, text: str) -> tuple[int, ...]:
    """Returns the numbers of a list by commas. Raises ConfigError for one that is not a whole number above 0."""
    counts = tuple(int(part) if part.strip().isdecimal() else 0 for part in text.split(","))
    if min(counts) < 1:
        raise ConfigError(f"{name} is {text!r}; give whole numbers above 0, by commas")
    return counts


def read_names(text: str) -> tuple[str, ...]:
    """Returns the names of a list by commas."""
    return tuple(part.strip() for part in text.split(","))
