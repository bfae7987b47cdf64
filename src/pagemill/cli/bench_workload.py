"""The workload of `pagemill bench`: seeded pieces of a text."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pagemill.errors import ConfigError

S = TypeVar("S", str, list[int])

CHARACTERS_PER_TOKEN = 4
"""How long a token is taken to be where nobody tokenizes the text."""


@dataclass(frozen=True)
class BenchWorkload:
    """Describes the requests: lengths in tokens, request_rate in requests per second (0 sends all at once)."""

    num_prompts: int
    input_len: int
    output_len: int
    prefix_len: int
    request_rate: float
    max_concurrency: int
    seed: int

    def pauses(self) -> list[float]:
        """Returns how many seconds to wait before each request."""
        arrivals = random.Random(self.seed)
        others = range(self.num_prompts - 1)
        return [0.0, *(arrivals.expovariate(self.request_rate) if self.request_rate else 0.0 for _ in others)]


def make_prompts(tokens: list[int], workload: BenchWorkload) -> list[list[int]]:
    """Returns equally long pieces of a tokenized text, the same ones for the same seed. Raises ConfigError for a text
    that is too short."""
    return _pieces(tokens, workload, 1)


def make_texts(text: str, workload: BenchWorkload) -> list[str]:
    """Returns pieces of a text that nobody can tokenize, of about as many tokens. Raises what `make_prompts` does."""
    return _pieces(text, workload, CHARACTERS_PER_TOKEN)


def read_text(path: Path | None) -> str:
    """Returns the text that prompts are cut from. Raises ConfigError where it cannot be read."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --text {path}: {error}", param="text") from error


def _pieces(whole: S, workload: BenchWorkload, unit: int) -> list[S]:
    longest = unit * max(workload.prefix_len, workload.input_len)
    if len(whole) < longest:
        raise ConfigError(
            f"the text has {len(whole) // unit} tokens; a prompt needs {longest // unit}: give a longer --text",
            param="text",
        )
    choose = random.Random(workload.seed)

    def piece(length: int) -> S:
        start = choose.randrange(len(whole) - length + 1)
        return whole[start : start + length]

    prefix = piece(unit * workload.prefix_len)
    return [prefix + piece(unit * workload.input_len) for _ in range(workload.num_prompts)]
