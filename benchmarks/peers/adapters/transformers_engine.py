"""Runs transformers' continuous batching on its paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import transformers


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model["checkpoint"], dtype=getattr(torch, settings["dtype"]), attn_implementation="paged|sdpa"
        )
        config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        batching = transformers.ContinuousBatchingConfig(**settings["batching"])
        self.manager = self.model.init_continuous_batching(
            generation_config=config, continuous_batching_config=batching
        )
        self.manager.start()
        self.description = f"transformers {transformers.__version__} continuous batching, {settings}"
        self._seen: dict[str, int] = {}
        """Tokens that each unfinished request has brought."""

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        self._seen[str(key)] = 0
        self.manager.add_request(prompt, str(key), max_new_tokens=max_tokens, streaming=True)

    def has_work(self) -> bool:
        return bool(self._seen)

    def step(self) -> Iterator[tuple[int, int]]:
        output = self.manager.get_result(timeout=300)
        if output is None or output.error is not None:
            raise RuntimeError(output.error if output else "no result within 300 s")
        tokens = len(output.generated_tokens)
        new, self._seen[output.request_id] = tokens - self._seen[output.request_id], tokens
        if output.is_finished():
            del self._seen[output.request_id]
        yield int(output.request_id), new
