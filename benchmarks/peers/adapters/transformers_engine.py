"""transformers' continuous batching on its paged cache."""

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
        self._started = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Iterator[tuple[int, int]]:
        requests = {}
        for index, (prompt, tokens) in enumerate(zip(prompts, max_tokens, strict=True)):
            self._started += 1
            requests[str(self._started)] = index
            self.manager.add_request(prompt, str(self._started), max_new_tokens=tokens, streaming=True)
        seen = [0] * len(prompts)
        running = len(prompts)
        while running:
            output = self.manager.get_result(timeout=300)
            if output is None or output.error is not None:
                raise RuntimeError(output.error if output else "no result within 300 s")
            index = requests[output.request_id]
            new, seen[index] = len(output.generated_tokens) - seen[index], len(output.generated_tokens)
            running -= output.is_finished()
            yield index, new
