"""Runs llama.cpp on the GGUF as it is, through its low-level batch interface: continuous batching by a loop of our own.

Each step decodes one batch: the next token of every running sequence, then pieces of prompts. More requests than
sequences wait.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np


@dataclass
class Sequence:
    key: int
    tokens: list[int]
    """The prompt, then the answer."""
    end: int
    """How many tokens it will have."""
    computed: int = 0


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        llama_cpp.llama_backend_init()
        loaded = llama_cpp.llama_model_load_from_file(model["gguf"].encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        for name, value in settings["context"].items():
            setattr(params, name, value)
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(loaded, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp gave no context for {settings}")
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))
        self.batch_size, self.cells = params.n_batch, params.n_ctx
        self.longest = params.n_ctx if params.kv_unified else params.n_ctx // params.n_seq_max
        self.batch = llama_cpp.llama_batch_init(self.batch_size, 0, 1)
        self.description = f"llama.cpp (llama-cpp-python {llama_cpp.__version__}), {settings}"
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence | None] = [None] * params.n_seq_max

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        end = len(prompt) + max_tokens
        if end > self.longest:
            raise ValueError(f"a sequence of {end} tokens, but {self.longest} fit; use the unified cache")
        self._waiting.append(Sequence(key, list(prompt), end))

    def has_work(self) -> bool:
        return bool(self._waiting) or any(self._running)

    def step(self) -> Iterator[tuple[int, int]]:
        self._admit()
        sampled = self._fill()
        if status := llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode returned {status}")
        for place, row in sampled:
            sequence = self._running[row]
            assert sequence is not None
            logits = np.ctypeslib.as_array(
                llama_cpp.llama_get_logits_ith(self.context, place), shape=(self.vocabulary,)
            )
            sequence.tokens.append(int(logits.argmax()))
            if len(sequence.tokens) == sequence.end:
                llama_cpp.llama_memory_seq_rm(self.memory, row, -1, -1)
                self._running[row] = None
            yield sequence.key, 1

    def _admit(self) -> None:
        """Gives waiting requests free sequences in order of arrival, while the cache has room for all to their end."""
        for row, running in enumerate(self._running):
            if running is None and self._waiting:
                taken = sum(sequence.end for sequence in self._running if sequence)
                if taken + self._waiting[0].end > self.cells:
                    break
                self._running[row] = self._waiting.popleft()

    def _fill(self) -> list[tuple[int, int]]:
        """Puts the step's tokens into the batch, answers first. Returns (place in the batch, sequence) to sample."""
        batch, sampled, place = self.batch, [], 0
        running = [(row, sequence) for row, sequence in enumerate(self._running) if sequence]
        for row, sequence in sorted(running, key=lambda each: len(each[1].tokens) - each[1].computed > 1):
            begin = sequence.computed
            end = min(len(sequence.tokens), begin + self.batch_size - place)
            for at in range(begin, end):
                batch.token[place] = sequence.tokens[at]
                batch.pos[place] = at
                batch.n_seq_id[place] = 1
                batch.seq_id[place][0] = row
                batch.logits[place] = at == len(sequence.tokens) - 1
                place += 1
            sequence.computed = end
            if begin < end == len(sequence.tokens):
                sampled.append((place - 1, row))
        batch.n_tokens = place
        return sampled
