"""Reads traces of real services: when requests came, how long they were, which prefixes they shared. They have no text.

Two formats are read. Azure's CSV (`TIMESTAMP,ContextTokens,GeneratedTokens`, Azure Public Dataset) has lengths only.
Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`) name the prefix blocks too. These
may say further what a request asks for, in fields that are named as in the API (`ASKED`).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from pagemill.errors import TraceError

ASKED = ("n", "best_of", "beam_width", "timeout")
"""Names what a request may ask for, in a trace and in a generated workload."""
MOONCAKE_BLOCK = 512
"""Number of tokens that one of Mooncake's hash ids stands for; the last of a prompt may stand for fewer."""
SOURCES = (
    "public traces: github.com/Azure/AzurePublicDataset (AzureLLMInferenceTrace_conv.csv) and "
    "github.com/kvcache-ai/Mooncake (FAST25-release/traces/conversation_trace.jsonl)"
)


@dataclass(frozen=True)
class TracedRequest:
    """Describes one request.

    number:   its place in the whole trace.
    hash_ids: names of the prompt's blocks of 512 tokens. Equal ids mean equal prompts up to that block's end. Empty for
              a prompt that shares nothing.
    continued_ids: the same for prompt and answer together, where a later prompt may begin with both.
    n:          answers that it gets, each of `output_len` tokens.
    best_of:    samples that are drawn, the best `n` of which it gets, at their end; 0: no more than `n`.
    beam_width: beams of the search that it asks for; 0: it samples.
    timeout:    seconds from its arrival after which it fails, if it has not ended; None: never.

    Raises ValueError for what no request can ask for.
    """

    number: int
    arrival_s: float
    prompt_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()
    continued_ids: tuple[int, ...] = ()
    n: int = 1
    best_of: int = 0
    beam_width: int = 0
    timeout: float | None = None

    def __post_init__(self) -> None:
        for name, count, least in (("n", self.n, 1), ("best_of", self.best_of, 0), ("beam_width", self.beam_width, 0)):
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"{name} is {count!r}; it must be a whole number from {least} on")
        if self.best_of and self.beam_width:
            raise ValueError(f"best_of is {self.best_of} beside beam_width {self.beam_width}; give one of the two")
        if self.n > self.num_sequences:
            raise ValueError(f"n is {self.n}; of {self.num_sequences} sequences no more can be returned")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout is {self.timeout:g}; it must be a number of seconds above 0")

    @property
    def num_sequences(self) -> int:
        """Returns how many samples or beams are computed."""
        return self.beam_width or self.best_of or self.n

    @property
    def streams(self) -> bool:
        """Returns whether its tokens come as they are computed: else all come at the end."""
        return not self.beam_width and self.num_sequences == self.n

    @property
    def answer_tokens(self) -> int:
        """Returns the tokens of the answers that it gets."""
        return self.n * self.output_len

    @property
    def deadline_s(self) -> float:
        """Returns when it fails, if it has not ended by then."""
        return math.inf if self.timeout is None else self.arrival_s + self.timeout

    @property
    def length(self) -> int:
        return self.prompt_len + self.output_len

    def prompt(self) -> list[int]:
        """Returns synthetic token ids, equal where the trace says that prompts are equal, and nowhere else.

        Each block repeats one token, its own number. The blocks before it tell it from others with that number.
        """
        if not self.hash_ids:
            return [2 * self.number] * self.prompt_len
        tokens: list[int] = []
        for hash_id in self.hash_ids:
            tokens += [2 * hash_id + 1] * min(MOONCAKE_BLOCK, self.prompt_len - len(tokens))
        return tokens

    def answer_token(self, index: int) -> int | None:
        """Returns the answer's token of this index, where a later prompt may continue it."""
        if not self.continued_ids:
            return None
        return 2 * self.continued_ids[(self.prompt_len + index) // MOONCAKE_BLOCK] + 1


def read_trace(path: Path) -> list[TracedRequest]:
    """Returns the requests in order of arrival, the first at 0 s.

    Raises TraceError for a file that is missing or is in neither format.
    """
    readers: dict[str, Callable[[Path], list[TracedRequest]]] = {".csv": _read_azure, ".jsonl": _read_mooncake}
    if path.suffix not in readers:
        raise TraceError(f"{path} is neither .csv (Azure) nor .jsonl (Mooncake); {SOURCES}")
    if not path.is_file():
        raise TraceError(f"there is no trace {path}; give the path of one; {SOURCES}")
    try:
        requests = readers[path.suffix](path)
    except (KeyError, ValueError, TypeError) as error:
        raise TraceError(f"{path} cannot be read as a trace: {type(error).__name__}: {error}; {SOURCES}") from error
    if not requests:
        raise TraceError(f"{path} has no requests; {SOURCES}")
    requests.sort(key=lambda request: request.arrival_s)
    return shift(requests)


def shift(requests: list[TracedRequest]) -> list[TracedRequest]:
    """Returns the same requests, with the first arriving at 0 s."""
    start = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - start) for request in requests]


def slice_of(requests: list[TracedRequest], start_s: float, seconds: float, rate: float = 1.0) -> list[TracedRequest]:
    """Returns the requests that arrive in the `seconds` from `start_s` on, arriving `rate` times as fast.

    Raises TraceError if there are none.
    """
    if rate <= 0:
        raise TraceError(f"rate is {rate:g}; it must be above 0: 1 keeps the trace's own arrivals, 0.1 slows them down")
    chosen = [request for request in requests if start_s <= request.arrival_s < start_s + seconds]
    if not chosen:
        raise TraceError(
            f"no request arrives from {start_s:g} s to {start_s + seconds:g} s; the trace ends at "
            f"{requests[-1].arrival_s:.0f} s"
        )
    return [replace(request, arrival_s=request.arrival_s / rate) for request in shift(chosen)]


def _read_azure(path: Path) -> list[TracedRequest]:
    with path.open(newline="") as lines:
        return [
            TracedRequest(
                number=number,
                # Python reads microseconds; the trace has a seventh digit.
                arrival_s=datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                prompt_len=_at_least_one(row["ContextTokens"]),
                output_len=_at_least_one(row["GeneratedTokens"]),
            )
            for number, row in enumerate(csv.DictReader(lines))
        ]


def _read_mooncake(path: Path) -> list[TracedRequest]:
    requests = []
    with path.open() as lines:
        for number, line in enumerate(lines):
            row: dict[str, Any] = json.loads(line)
            prompt_len, hash_ids = _at_least_one(row["input_length"]), tuple(map(int, row["hash_ids"]))
            if len(hash_ids) != -(-prompt_len // MOONCAKE_BLOCK):
                raise ValueError(f"request {number} has {prompt_len} prompt tokens and {len(hash_ids)} hash ids")
            requests.append(
                TracedRequest(
                    number,
                    row["timestamp"] / 1000,
                    prompt_len,
                    _at_least_one(row["output_length"]),
                    hash_ids,
                    **{name: row[name] for name in ASKED if name in row},
                )
            )
    return requests


def _at_least_one(text: str | int) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"a length is {value}")
    return value
