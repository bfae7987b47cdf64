"""transformers without continuous batching: padded batches of a fixed size in order of arrival, each run to its end.

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

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Iterator[tuple[int, int]]:
        for begin in range(0, len(prompts), self.batch_size):
            end = min(begin + self.batch_size, len(prompts))
            longest = max(map(len, prompts[begin:end]))
            ids = torch.zeros(end - begin, longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts[begin:end]):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            config = transformers.GenerationConfig(
                do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=max(max_tokens[begin:end])
            )
            generated = self.model.generate(ids, attention_mask=mask, generation_config=config).shape[1] - longest
            for index in range(begin, end):
                yield index, min(generated, max_tokens[index])
