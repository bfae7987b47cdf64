"""Generates requests by a seed: lengths, arrivals, shared prefixes, conversations. Nothing is downloaded."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import exp, inf, log
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, TypeVar

from pagemill.errors import ConfigError, shown
from pagemill.simulate.roofline import whole_where_possible
from pagemill.simulate.trace import ASKED, MOONCAKE_BLOCK, TracedRequest

SEED = 0
COUNTED = 1000
"""Conversations of which the mean number of turns is taken."""
NORMAL = NormalDist()
TOKEN_S = 0.03
"""Seconds that a token of an answer is taken to need: the next turn comes so long after it was begun, and a pause."""


@dataclass(frozen=True)
class Lengths:
    """Describes log-normal lengths in tokens: mean and longest, which is where they are cut; sigma of the logarithm."""

    mean: float
    sigma: float
    longest: int

    def __post_init__(self) -> None:
        for name, value in (("mean", self.mean), ("sigma", self.sigma), ("longest", self.longest)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ConfigError(f"a workload's {name} is {value!r}; it must be a number")
        if self.longest < 1 or self.longest != int(self.longest):
            raise ConfigError(f"a workload's longest is {self.longest!r}; it must be a whole number of tokens above 0")
        if not 1 <= self.mean <= self.longest:
            raise ConfigError(f"a workload's mean is {self.mean:g}; it must be from 1 to longest, {self.longest}")
        if not 0 <= self.sigma < inf:
            raise ConfigError(f"a workload's sigma is {self.sigma:g}; it must be 0 (all alike) or more")

    @property
    def mu(self) -> float:
        """Returns the mean of the logarithm with which the mean of the cut lengths is right."""
        if self.sigma == 0:
            return log(self.mean)
        low, high = 0.0, log(self.longest) + 4 * self.sigma
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean else (low, middle)
        return low

    def _mean(self, mu: float) -> float:
        """Returns the mean of min(X, longest) where log X is normal with this mean."""
        cut = (log(self.longest) - mu) / self.sigma
        below = exp(mu + self.sigma**2 / 2) * NORMAL.cdf(cut - self.sigma)
        return below + self.longest * (1 - NORMAL.cdf(cut))

    def draw(self, source: random.Random, mu: float) -> int:
        """Returns a length. mu: that of the property, which takes a while to find."""
        return max(1, min(int(self.longest), round(source.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True)
class Workload:
    """Describes requests, and the conversations that they are turns of.

    prompt:     tokens that each turn adds. output: tokens of each answer.
    context:    the most tokens of one request, prompt and output, that a server has to expect; a conversation that
                would become longer ends.
    burstiness: how irregular arrivals of conversations are: the coefficient of variation of the time between two.
                1 is Poisson's, 0 is a clock's, above 1 they come in bursts (gamma-distributed).
    prefixes:   number of texts of prefix_len tokens (whole blocks of 512); each conversation begins with one of them, a
                system prompt or a document.
    turns:      of a conversation, in the mean (geometric). Each turn's prompt is all that was said before.
    think_s:    seconds between an answer's end and the next turn, in the mean (exponential): a person's, or a tool's.
    n, best_of, beam_width, timeout: what each request asks for, as of `TracedRequest`.
    """

    prompt: Lengths
    output: Lengths
    context: int
    burstiness: float = 1.0
    prefixes: int = 0
    prefix_len: int = 0
    turns: float = 1.0
    think_s: float = 0.0
    n: int = 1
    best_of: int = 0
    beam_width: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, whole in (("context", self.context), ("prefixes", self.prefixes), ("prefix_len", self.prefix_len)):
            if isinstance(whole, bool) or not isinstance(whole, int):
                raise ConfigError(f"a workload's {name} is {whole!r}; it must be a whole number")
        for name, value, least in (
            ("burstiness", self.burstiness, 0),
            ("prefixes", self.prefixes, 0),
            ("turns", self.turns, 1),
            ("think_s", self.think_s, 0),
        ):
            if not least <= value < inf:
                raise ConfigError(f"a workload's {name} is {value:g}; it must be at least {least}")
        try:
            TracedRequest(0, 0.0, 1, 1, **self._asked)
        except ValueError as error:
            raise ConfigError(f"a workload's {error}") from None
        if self.prefix_len % MOONCAKE_BLOCK or (self.prefix_len > 0) != (self.prefixes > 0):
            raise ConfigError(
                f"a workload has {self.prefixes} prefixes of {self.prefix_len} tokens; give both or neither, and whole "
                f"blocks of {MOONCAKE_BLOCK} tokens"
            )
        if self.prefix_len + 2 > self.context:
            raise ConfigError(
                f"a workload's prefixes have {self.prefix_len} tokens and its context {self.context}; nothing is left "
                "for prompts: shorten the one, or lengthen the other"
            )

    def requests(self, rate: float, seconds: float, seed: int = SEED) -> list[TracedRequest]:
        """Returns requests that arrive in `seconds`, on average `rate` a second; at least 1.

        The same draws serve every rate: a higher one has the same conversations, closer together, and then more.
        """
        source = random.Random(seed)
        names = count(self.prefixes * self.prefix_len // MOONCAKE_BLOCK)
        # Conversations that began before are in their later turns when the first second begins.
        before_s = 3 * (self.turns - 1) * (self.think_s + self.output.mean * TOKEN_S)
        requests: list[TracedRequest] = []
        at = -before_s
        lengths = self.prompt.mu, self.output.mu
        while at < seconds or not requests:
            turns = self._conversation(source, at, lengths, names)
            requests += [turn for turn in turns if 0 <= turn.arrival_s < max(seconds, 1e-9)]
            at += self._gap(source) * self._mean_turns / rate
        if self.turns > 1:
            requests.sort(key=lambda request: request.arrival_s)
        return [replace(request, number=number, **self._asked) for number, request in enumerate(requests)]

    @property
    def _asked(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ASKED}

    @cached_property
    def _mean_turns(self) -> float:
        """Returns how many turns conversations have in the mean: fewer than `turns` where some end at `context`."""
        if self.turns == 1.0:
            return 1.0
        source, lengths = random.Random(SEED), (self.prompt.mu, self.output.mu)
        return fmean(len(self._conversation(source, 0.0, lengths, count())) for _ in range(COUNTED))

    def _gap(self, source: random.Random) -> float:
        """Returns the time between two conversations, 1 in the mean."""
        if self.burstiness == 1.0:
            return source.expovariate(1.0)
        shape = self.burstiness**-2 if self.burstiness else inf
        return 1.0 if shape == inf else source.gammavariate(shape, 1 / shape)

    def _conversation(
        self, source: random.Random, at: float, mu: tuple[float, float], names: Iterator[int]
    ) -> list[TracedRequest]:
        """Returns a conversation's turns."""
        shares = self.prefixes > 0 or self.turns > 1
        ids: list[int] = []
        if self.prefixes:
            blocks, chosen = self.prefix_len // MOONCAKE_BLOCK, source.randrange(self.prefixes)
            ids = [chosen * blocks + block for block in range(blocks)]
        turns: list[TracedRequest] = []
        length = self.prefix_len
        while True:
            length += self.prompt.draw(source, mu[0])
            output = self.output.draw(source, mu[1])
            if length + output > self.context:
                if turns:
                    return turns
                length = max(self.prefix_len + 1, self.context - output)
                output = self.context - length
            if shares:
                ids += [next(names) for _ in range(-(-(length + output) // MOONCAKE_BLOCK) - len(ids))]
            prompt_ids = tuple(ids[: -(-length // MOONCAKE_BLOCK)])
            # Whoever asks only once leaves an answer that nobody continues.
            continued = tuple(ids) if self.turns > 1 else ()
            turns.append(TracedRequest(0, at, length, output, prompt_ids, continued))
            if self.turns == 1.0 or source.random() < 1 / self.turns:
                return turns
            length += output
            at += output * TOKEN_S + source.expovariate(1.0) * self.think_s


WORKLOADS = {
    "sharegpt": Workload(Lengths(161, 1.0, 1024), Lengths(338, 0.9, 1024), 2048),
    "alpaca": Workload(Lengths(19, 0.6, 1024), Lengths(58, 0.9, 1024), 2048),
    "chat": Workload(
        Lengths(120, 1.0, 2048), Lengths(250, 0.8, 1024), 8192, prefixes=1, prefix_len=512, turns=4, think_s=30
    ),
    "agents": Workload(
        Lengths(400, 1.0, 4096), Lengths(90, 0.8, 1024), 16384, prefixes=4, prefix_len=2048, turns=8, think_s=2
    ),
    "documents": Workload(Lengths(40, 0.6, 512), Lengths(150, 0.8, 1024), 16384, prefixes=40, prefix_len=7168),
    "bursty": Workload(Lengths(161, 1.0, 1024), Lengths(338, 0.9, 1024), 2048, burstiness=3),
}
"""The first two have means as in figure 11 of Kwon et al., "Efficient Memory Management for LLM Serving with
PagedAttention", 2023; how far lengths spread is assumed, and so are all figures of the others: conversations, agents
that call tools and come back, questions about documents, and the first one's requests in bursts. OPT's context has
2,048 tokens."""


Asking = TypeVar("Asking", Workload, TracedRequest)


def with_timeout(asking: Asking, timeout: float | None) -> Asking:
    """Returns the same with a timeout, in seconds; None leaves its own. Raises ConfigError if it is not above 0."""
    try:
        return asking if timeout is None else replace(asking, timeout=timeout)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def workload_named(name: str) -> Workload:
    """Returns a workload, by name or from a .json file with its fields.

    Raises ConfigError for an unknown name, and for a file that is none.
    """
    if name.endswith(".json"):
        try:
            found = json.loads(Path(name).read_text(), parse_float=whole_where_possible)
            if not isinstance(found, dict):
                raise ConfigError(f"{name} cannot be read as a workload: it is {shown(found)}; it must be an object")
            found |= {what: Lengths(**found[what]) for what in ("prompt", "output")}
            return Workload(**found)
        except (OSError, ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{name} cannot be read as a workload: {type(error).__name__}: {error}") from error
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}, or give a .json file")
    return WORKLOADS[name]
