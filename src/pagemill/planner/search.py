"""Finds how many replicas of which size, with which settings, serve a load within limits, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from pagemill.errors import ConfigError
from pagemill.planner.limits import FACTOR, Limits, find_capacity
from pagemill.planner.load import Load
from pagemill.planner.replica import ReplicaSettings, Trial, run_trial
from pagemill.simulate.roofline import DeviceModel, ModelShape, Roofline

GAIN = 1.03
"""Another value of a setting is taken if a replica holds so many times the rate with it."""
CHECK_TIMES = 2
"""A replica at its share is simulated with so many times the requests: p99 of the search's own are rough."""
LEAST_SHARE = 0.25
"""If a replica does not hold this share of the rate that the search has found, with CHECK_TIMES as many requests, then
some of these are such that no rate does."""
NEAR = 1.2
"""A trial at up to so many times a rate that holds is not cut: it is likely to be the one that says what binds."""
SCALING = 0.8
"""Share of the expected rate with which a search begins."""
MEMORY_FULL = 0.9
"""A pool of which so much is held, or any preemption, says that memory binds."""
SHORT = 0.01
"""So does this share of the time in which a request waits for blocks, free ones that running sequences will need
included: p99 is of one request in a hundred."""


@dataclass(frozen=True)
class Choices:
    """Holds the values that are tried of each setting, the first one first.

    ranks: None for all powers of two that the device and the model allow.
    """

    ranks: tuple[int, ...] | None = None
    kv_dtype: tuple[str, ...] = ("auto",)
    max_num_seqs: tuple[int, ...] = (256, 1024)
    max_num_batched_tokens: tuple[int, ...] = (2048, 512, 8192)
    kv_host_memory: tuple[int | None, ...] = (None,)

    def batches(self) -> list[tuple[int, int]]:
        """Returns the pairs of max_num_batched_tokens and max_num_seqs that an engine takes: every sequence of a step
        gets a token at least."""
        return [pair for pair in product(self.max_num_batched_tokens, self.max_num_seqs) if pair[0] >= pair[1]]


@dataclass
class Size:
    """Holds what was found for one number of ranks.

    capacity: requests per second of one replica, at most those of the whole load, beyond which nothing is tried; None
    where not even the lowest rate holds. trials: all that were made, with these and with other settings.
    """

    roofline: Roofline
    settings: ReplicaSettings
    capacity: float | None = None
    trials: list[tuple[ReplicaSettings, Trial]] = field(default_factory=list)

    @property
    def own_trials(self) -> list[Trial]:
        """Returns the trials with the settings chosen, by rate."""
        return sorted((trial for settings, trial in self.trials if settings == self.settings), key=lambda one: one.rate)


@dataclass(frozen=True)
class Option:
    """Says what one size of replica takes for the whole load.

    at_share: a replica at its share of the load. binds: what breaks first at a higher one.
    cost_output, cost_all: US dollars per million output tokens, and per million of all; None without a price.
    most_tried: requests per second of the whole load, of which one replica is asked no more.
    """

    size: Size
    replicas: int
    at_share: Trial
    binds: str
    price_per_hour: float | None
    cost_output: float | None
    cost_all: float | None
    most_tried: float

    @property
    def devices(self) -> int:
        return self.replicas * self.size.settings.ranks


@dataclass(frozen=True)
class Plan:
    """Holds the options, the cheapest first, and why sizes are not among them."""

    load: Load
    limits: Limits
    options: list[Option]
    refused: dict[int, str]


Report = Callable[[str], None]


def make_plan(
    device: DeviceModel,
    model: ModelShape,
    dtype: str,
    load: Load,
    limits: Limits,
    choices: Choices,
    report: Report = lambda line: None,
) -> Plan:
    """Returns what serves the load.

    For the smallest size that holds the model, settings are chosen; other sizes take these. Each
    rate is a simulation of one replica that gets its share of the requests, as evenly as they come.
    report: told in a line what is tried. Raises ConfigError where no size holds the model.
    """
    rooflines, refused = _sizes(device, model, dtype, choices)
    if not rooflines:
        raise ConfigError("; ".join(dict.fromkeys(refused.values())))
    sizes: list[Size] = []
    chosen: ReplicaSettings | None = None
    for ranks in rooflines:
        if why := _too_slow_alone(device, model, dtype, load, limits, chosen or _first_settings(ranks, choices), ranks):
            refused[ranks] = why
            continue
        search = _Search(device, model, dtype, load, limits, report)
        if chosen is None:
            size = search.choose(_first_settings(ranks, choices), choices)
            if size.capacity is not None:
                chosen = size.settings
        else:
            before = sizes[-1]
            likely = (before.capacity or 0.0) * ranks / before.settings.ranks
            size = search.with_settings(replace(chosen, ranks=ranks), SCALING * likely)
        sizes.append(search.complete(size))
        if size.capacity is None:
            refused[ranks] = _why_not(size, limits)
    options: list[Option] = []
    for size in sizes:
        if size.capacity:
            found = _option(size, load, limits, device.price_per_hour, report)
            if isinstance(found, Option):
                options.append(found)
            else:
                refused[size.settings.ranks] = found
    options.sort(key=lambda one: (one.devices, one.replicas))
    return Plan(load, limits, options, refused)


def _sizes(device: DeviceModel, model: ModelShape, dtype: str, choices: Choices) -> tuple[list[int], dict[int, str]]:
    """Returns the numbers of ranks that hold the model, and why others do not."""
    wanted = choices.ranks or tuple(2**power for power in range(device.peers.bit_length()) if 2**power <= device.peers)
    refused = {ranks: why for ranks in wanted if (why := _refusal(device, model, dtype, choices.kv_dtype[0], ranks))}
    return [ranks for ranks in wanted if ranks not in refused], refused


def _refusal(device: DeviceModel, model: ModelShape, dtype: str, kv_dtype: str, ranks: int) -> str | None:
    try:
        Roofline(device, model, dtype, kv_dtype, ranks).kv_bytes  # noqa: B018
    except ConfigError as error:
        return error.message
    return None


def _too_slow_alone(
    device: DeviceModel,
    model: ModelShape,
    dtype: str,
    load: Load,
    limits: Limits,
    settings: ReplicaSettings,
    ranks: int,
) -> str | None:
    """Says why no rate can hold, if the request of median length breaks a limit even alone."""
    settings = replace(settings, ranks=ranks)
    alone = run_trial(Roofline(device, model, dtype, settings.kv_dtype, ranks), settings, [load.usual], load.rate)
    for flag, limit_s, found_s in (
        ("--slo-tpot-p99", limits.tpot_p99_s, alone.tpot_p99_s),
        ("--slo-ttft-p99", limits.ttft_p99_s, alone.ttft_p99_s),
    ):
        if alone.timed_out:
            return (
                f"timeout is {load.usual.timeout:g} s, and a request of {load.usual.length} tokens alone has not ended "
                "by then; raise it, or choose a faster device or more of them"
            )
        if limit_s is not None and found_s > limit_s:
            return (
                f"{flag} is {1e3 * limit_s:g} ms, and a request alone takes {1e3 * found_s:.3g} ms; raise it above "
                "that, or choose a faster device or more of them"
            )
    return None


def _first_settings(ranks: int, choices: Choices) -> ReplicaSettings:
    tokens, seqs = choices.batches()[0]
    return ReplicaSettings(ranks, choices.kv_dtype[0], seqs, tokens, choices.kv_host_memory[0])


class _Search:
    """Searches for one size of replica."""

    def __init__(
        self, device: DeviceModel, model: ModelShape, dtype: str, load: Load, limits: Limits, report: Report
    ) -> None:
        self._device, self._model, self._dtype = device, model, dtype
        self._load = load
        self._limits = limits
        self._report = report
        self._trials: list[tuple[ReplicaSettings, Trial]] = []

    def _make(self, settings: ReplicaSettings) -> Roofline:
        return Roofline(self._device, self._model, self._dtype, settings.kv_dtype, settings.ranks)

    def with_settings(self, settings: ReplicaSettings, first: float = 0.0) -> Size:
        """Returns the capacity with these settings. first: requests per second to begin with; 0 for a guess."""
        capacity = self._capacity(settings, first or self._first_rate(settings))
        return Size(self._make(settings), settings, capacity, self._trials)

    def choose(self, settings: ReplicaSettings, choices: Choices) -> Size:
        """Returns the settings with the largest capacity: of all pairs of max_num_batched_tokens and max_num_seqs, and
        then with each other setting changed after the other."""
        size = self.with_settings(settings)
        for tokens, seqs in choices.batches()[1:]:
            size = self._better(size, max_num_batched_tokens=tokens, max_num_seqs=seqs)
        for name in ("kv_dtype", "kv_host_memory"):
            for value in getattr(choices, name)[1:]:
                size = self._better(size, **{name: value})
        return size

    def _better(self, size: Size, **other: int | str) -> Size:
        """Returns what other values of settings bring, if that is GAIN times as much, or the whole load; else `size`.

        One simulation at that rate says so, before the capacity is searched for.
        """
        tried = replace(size.settings, **other)  # type: ignore[arg-type]
        enough = min(self._load.rate, GAIN * (size.capacity or 0.0))
        if size.capacity == self._load.rate or (size.capacity is not None and not self._holds(tried, enough)):
            return size
        capacity = self._capacity(tried, enough or self._first_rate(tried))
        if capacity is not None and capacity >= enough:
            return Size(self._make(tried), tried, capacity, self._trials)
        return size

    def _first_rate(self, settings: ReplicaSettings) -> float:
        """Returns a rate to begin with: a part of what steps of full batches would serve."""
        return SCALING * self._load.guess(self._make(settings), settings)

    def _capacity(self, settings: ReplicaSettings, first: float) -> float | None:
        """Returns the highest rate that holds, up to that of the whole load."""
        most = self._load.rate
        if first >= most / FACTOR and self._holds(settings, most):
            return most
        first = min(first, most / FACTOR)
        return find_capacity(lambda rate: self._holds(settings, rate), first, first / 2**6, most)

    def _holds(self, settings: ReplicaSettings, rate: float) -> bool:
        trial = self._known(settings, rate)
        if trial is None:
            self._report(f"{settings}: {rate:.3g} requests/s")
            trial = self._run(settings, rate, None if self._is_near(settings, rate) else self._limits)
        if (settings, trial) not in self._trials:
            self._trials.append((settings, trial))
        return _holds(trial, self._limits)

    def _is_near(self, settings: ReplicaSettings, rate: float) -> bool:
        held = (trial.rate for one, trial in self._trials if one == settings and _holds(trial, self._limits))
        return any(rate <= NEAR * other for other in held)

    def _run(self, settings: ReplicaSettings, rate: float, limits: Limits | None) -> Trial:
        return run_trial(self._make(settings), settings, self._load.requests(rate, self._limits), rate, limits)

    def _known(self, settings: ReplicaSettings, rate: float) -> Trial | None:
        """Returns the trial of these settings at this rate, or that of others that came out alike; None without any.

        Where all that ran and waited would have had rows, a larger `max_num_seqs` makes no difference.
        """
        for one, trial in self._trials:
            if trial.rate == rate and replace(one, max_num_seqs=settings.max_num_seqs) == settings:
                if one == settings:
                    return trial
                if not trial.refused and trial.most_rows <= min(one.max_num_seqs, settings.max_num_seqs):
                    return trial
        return None

    def complete(self, size: Size) -> Size:
        """Returns a size with its lowest trial that did not hold as a whole, where that was cut: it says what binds."""
        trial = next((one for one in size.own_trials if not _holds(one, self._limits)), None)
        if trial is not None and trial.cut:
            self._report(f"{size.settings}: {trial.rate:.3g} requests/s")
            self._trials[self._trials.index((size.settings, trial))] = (
                size.settings,
                self._run(size.settings, trial.rate, None),
            )
        return size


def _holds(trial: Trial, limits: Limits) -> bool:
    steady = trial.refused == 0 and not trial.waiting_grows and not trial.cut
    return steady and limits.hold({"tpot_p99_s": trial.tpot_p99_s, "ttft_p99_s": trial.ttft_p99_s})


def _option(size: Size, load: Load, limits: Limits, price: float | None, report: Report) -> Option | str:
    """Returns what a size takes for the whole load; or, if no number of replicas serves it, why."""
    assert size.capacity is not None
    settings, least = size.settings, LEAST_SHARE * size.capacity
    replicas = max(1, math.ceil(load.rate / size.capacity - 1e-9))
    while True:
        share = load.rate / replicas
        report(f"{settings}: {replicas} replicas at {share:.3g} requests/s each")
        at_share = run_trial(size.roofline, settings, load.requests(share, limits, times=CHECK_TIMES), share)
        if _holds(at_share, limits):
            break
        if at_share.refused or share < least:
            return (
                f"with {CHECK_TIMES} times as many requests as the search had, even at {share:.3g} requests/s "
                f"{_broken_limit(at_share, limits)}; raise --requests, so that the search has them too"
            )
        # With more requests, waiting has more time to grow: the search's own capacity was too high.
        size.capacity = min(size.capacity, share)
        size.trials.append((settings, at_share))
        replicas += max(1, replicas // 20)
    hourly = None if price is None else price * settings.ranks * replicas
    per_million = None if hourly is None else hourly / 3600 / load.rate * 1e6
    return Option(
        size,
        replicas,
        at_share,
        binding(size, limits),
        hourly,
        None if per_million is None else per_million / at_share.output_len,
        None if per_million is None else per_million / at_share.length,
        load.rate,
    )


def binding(size: Size, limits: Limits) -> str:
    """Says what breaks at the lowest rate tried that does not hold, and why."""
    broken = [trial for trial in size.own_trials if not _holds(trial, limits)]
    if not broken:
        return "nothing up to the highest rate tried"
    trial = broken[0]
    limit = _broken_limit(trial, limits)
    if trial.preemptions or trial.pool >= MEMORY_FULL or trial.short >= SHORT:
        return (
            f"memory: the KV pool is {trial.pool:.0%} full, requests wait for blocks {trial.short:.0%} of the time and "
            f"{trial.preemptions} were preempted, so {limit}"
        )
    if trial.most_running >= size.settings.max_num_seqs:
        return f"max_num_seqs: {trial.most_running} run at once, so {limit}"
    if trial.waiting_grows or trial.ttft_p99_s > (limits.ttft_p99_s or math.inf):
        return f"compute: steps do not keep up with {trial.running:.0f} rows and the prompts beside them, so {limit}"
    return f"the limit: steps with {trial.running:.0f} rows take so long that {limit}; requests need not wait"


def _broken_limit(trial: Trial, limits: Limits) -> str:
    if trial.refused:
        return f"{trial.refused} requests are too long for the pool"
    if math.inf in (trial.tpot_p99_s, trial.ttft_p99_s):
        return f"{trial.timed_out} of {trial.counted} requests are ended by their timeout"
    if not trial.tpot_p99_s <= limits.tpot_p99_s:
        return f"p99 of the time per token is {1e3 * trial.tpot_p99_s:.0f} ms"
    grows = "ever more requests wait, and " if trial.waiting_grows else ""
    return f"{grows}p99 of the time to first token is {1e3 * trial.ttft_p99_s:,.0f} ms"


def _why_not(size: Size, limits: Limits) -> str:
    trials: Sequence[Trial] = size.own_trials
    return f"even at {trials[0].rate:.3g} requests/s {_broken_limit(trials[0], limits)}"
