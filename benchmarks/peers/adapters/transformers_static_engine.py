"""Runs transformers without continuous batching: padded batches of a fixed size in order of arrival, each to its end.

A batch's tokens count when it is done, which is when `generate` returns them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model["checkpoint"], dtype=getattr(torch, settings["dtype"])
        )
        self.batch_size = settings["batch_size"]
        self.description = f"transformers {transformers.__version__} generate, {settings}"
        self._waiting: list[tuple[int, list[int], int]] = []

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        self._waiting.append((key, prompt, max_tokens))

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> Iterator[tuple[int, int]]:
        batch, self._waiting = self._waiting[: self.batch_size], self._waiting[self.batch_size :]
        longest = max(len(prompt) for _, prompt, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (_, prompt, _) in enumerate(batch):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        config = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(tokens for _, _, tokens in batch)
        )
        generated = self.model.generate(ids, attention_mask=mask, generation_config=config).shape[1] - longest
        for key, _, max_tokens in batch:
            yield key, min(generated, max_tokens)
