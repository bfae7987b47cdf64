"""Generates requests by a seed: lengths as of public data sets, arriving at random. Nothing is downloaded."""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from math import exp, log
from statistics import NormalDist

from pagemill.errors import ConfigError
from pagemill.simulate.trace import TracedRequest

SEED = 0
NORMAL = NormalDist()


@dataclass(frozen=True)
class Lengths:
    """Describes log-normal lengths in tokens: mean and longest, which is where they are cut; sigma of the logarithm."""

    mean: float
    sigma: float
    longest: int

    @property
    def mu(self) -> float:
        """The mean of the logarithm with which the mean of the cut lengths is right."""
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
        return max(1, min(self.longest, round(source.lognormvariate(mu, self.sigma))))


@dataclass(frozen=True)
class Workload:
    """Describes requests. context: the most tokens of one, prompt and output, that a server has to expect."""

    prompt: Lengths
    output: Lengths
    context: int

    def requests(self, rate: float, seconds: float, seed: int = SEED) -> list[TracedRequest]:
        """Returns requests that arrive in `seconds`, on average `rate` a second (Poisson); at least 1.

        The same draws serve every rate: a higher one has the same requests, closer together, and then more of them.
        """
        source = random.Random(seed)
        prompt_mu, output_mu = self.prompt.mu, self.output.mu
        requests: list[TracedRequest] = []
        at = 0.0
        while at < seconds or not requests:
            lengths = self.prompt.draw(source, prompt_mu), self.output.draw(source, output_mu)
            requests.append(TracedRequest(len(requests), at, *lengths))
            at += source.expovariate(1.0) / rate
        return requests


WORKLOADS = {
    "sharegpt": Workload(Lengths(161, 1.0, 1024), Lengths(338, 0.9, 1024), 2048),
    "alpaca": Workload(Lengths(19, 0.6, 1024), Lengths(58, 0.9, 1024), 2048),
}
"""Means as in figure 11 of Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention", 2023; how
far lengths spread is assumed. OPT's context has 2,048 tokens."""


def add_workload_argument(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--workload", default=default, help=f"lengths, of {', '.join(WORKLOADS)}")


def workload_named(name: str) -> Workload:
    """Returns a workload. Raises ConfigError for an unknown name."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; choose one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
