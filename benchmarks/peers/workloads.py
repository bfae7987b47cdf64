"""Makes the workloads that pagemill and its peers are measured on: seeded, on real text, as token ids.

Every engine gets the same ids and must return exactly as many tokens as asked. Lengths are part of the workload and
never change; `round` (0, 1, …) chooses other pieces of the text, so that no round finds another's prefixes in a cache.

    python -m benchmarks.peers.workloads        prints what there is
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TEXT = Path(__file__).parent / "alice.txt"
"""Lewis Carroll's "Alice's Adventures in Wonderland" (1865), in the public domain."""


@dataclass(frozen=True)
class Workload:
    """Requests: prompts as token ids, how many tokens each must get, and when each arrives, seconds from the start."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    arrivals_s: list[float]

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def output_tokens(self) -> int:
        return sum(self.max_tokens)


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens, request by request; `prefix` tokens in front of every prompt are the same for all."""

    about: str
    prompts: list[int]
    outputs: list[int]
    prefix: int = 0


def fit(draws: Sequence[float], total: int, low: int, high: int) -> list[int]:
    """Draws (positive) scaled and rounded to lengths in low..high that sum to `total`; the largest becomes `high`."""
    if not low * len(draws) + high - low <= total <= high * len(draws):
        raise ValueError(f"{len(draws)} lengths of {low} to {high} cannot sum to {total}")
    longest = max(range(len(draws)), key=draws.__getitem__)

    def scaled(factor: float) -> list[int]:
        lengths = [min(high, max(low, round(draw * factor))) for draw in draws]
        lengths[longest] = high
        return lengths

    below, above = 0.0, total / min(draws)
    for _ in range(100):
        middle = (below + above) / 2
        below, above = (middle, above) if sum(scaled(middle)) <= total else (below, middle)
    lengths = scaled(below)
    for index in range(len(lengths)):
        # What rounding left over, at most half a token each, goes to the first that have room.
        if sum(lengths) < total and index != longest and lengths[index] < high:
            lengths[index] += 1
    assert sum(lengths) == total
    return lengths


def _mixed() -> Shape:
    draw = random.Random(64)
    prompts = fit([draw.lognormvariate(0, 1.0) for _ in range(64)], 13739, 8, 1500)
    outputs = fit([draw.lognormvariate(0, 0.8) for _ in range(64)], 7032, 8, 400)
    return Shape("64 requests of log-normal lengths", prompts, outputs)


def _prefix() -> Shape:
    draw = random.Random(1024)
    outputs = fit([draw.uniform(16, 128) for _ in range(64)], 3958, 16, 128)
    return Shape("64 requests over one 1,024-token prefix", [32] * 64, outputs, prefix=1024)


SHAPES: dict[str, Callable[[], Shape]] = {
    "one": lambda: Shape("one user: 128 in, 128 out", [128], [128]),
    "two": lambda: Shape("two users: 2 x 128 in, 128 out", [128] * 2, [128] * 2),
    "mixed": _mixed,
    "prefix": _prefix,
    "decode": lambda: Shape("64 x 512 in, 128 out", [512] * 64, [128] * 64),
    "long": lambda: Shape("four prompts of 6,000 tokens, 32 out", [6000] * 4, [32] * 4),
    "crowd": lambda: Shape("256 requests at once, 64 in, 64 out", [64] * 256, [64] * 256),
    "tiny": lambda: Shape("to try things out: 4 x 24 in, 8 out over a 16-token prefix", [24] * 4, [8] * 4, prefix=16),
}

STANDARD = ("one", "two", "mixed", "prefix", "decode", "long", "crowd")


def make(name: str, text: Sequence[int], round: int = 0) -> Workload:
    """Returns the workload of that name, its prompts cut out of `text` (token ids). Equal arguments, equal workload."""
    shape = SHAPES[name]()
    pieces = cut(text, name, [*shape.prompts, shape.prefix], round * (len(shape.prompts) + 1))
    *prompts, prefix = pieces
    return Workload(name, [prefix + prompt for prompt in prompts], shape.outputs, [0.0] * len(prompts))


def make_poisson(text: Sequence[int], rate: float, seconds: float, first_piece: int) -> Workload:
    """Returns requests of mixed's lengths that arrive at random for `seconds`, on average `rate` a second; at least 1.

    The same draws serve every rate, so that a higher one has the same requests, closer together, and then more of them.
    `first_piece` counts the pieces of text that earlier workloads of the same engine have taken.
    """
    draw = random.Random("poisson")
    lengths = _mixed()
    prompts: list[int] = []
    outputs: list[int] = []
    arrivals: list[float] = []
    at = draw.expovariate(1.0) / rate
    while at < seconds or not arrivals:
        if len(arrivals) == len(prompts):
            # Each 64 requests have exactly mixed's lengths, in an order of their own.
            prompts += draw.sample(lengths.prompts, 64)
            outputs += draw.sample(lengths.outputs, 64)
        arrivals.append(at)
        at += draw.expovariate(1.0) / rate
    pieces = cut(text, "poisson", prompts[: len(arrivals)], first_piece)
    return Workload(f"poisson {rate:.2f}/s", pieces, outputs[: len(arrivals)], arrivals)


def cut(text: Sequence[int], seed: str, lengths: Sequence[int], first_piece: int) -> list[list[int]]:
    """Pieces of the text of these lengths. No two of a seed, whatever their numbers, begin at the same token."""
    starts = list(range(len(text) - max(lengths) + 1))
    random.Random(seed).shuffle(starts)
    starts = starts[first_piece : first_piece + len(lengths)]
    if len(starts) < len(lengths):
        raise ValueError(f"the text has {len(text)} tokens: too few for pieces {first_piece} and on of {seed}")
    return [list(text[at : at + length]) for at, length in zip(starts, lengths, strict=True)]


def tokenize(model: str) -> list[int]:
    """Returns the text in tokens of the model (a path, or a name that pagemill knows)."""
    from pagemill.config import EngineConfig
    from pagemill.hub import resolve_model
    from pagemill.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(EngineConfig(model=str(resolve_model(model))))
    return tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)


def main() -> None:
    for name, shape in SHAPES.items():
        lengths = shape()
        prompt_tokens = sum(lengths.prompts) + lengths.prefix * len(lengths.prompts)
        print(f"{name:8} {prompt_tokens:7,} in {sum(lengths.outputs):7,} out   {lengths.about}")


if __name__ == "__main__":
    main()
