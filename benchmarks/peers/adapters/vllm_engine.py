"""Runs vLLM for CPU through `LLMEngine`, tokens in and out. Its threads and KV space are set in the environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import vllm
from vllm.sampling_params import RequestOutputKind


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        llm = vllm.LLM(model=model["checkpoint"], skip_tokenizer_init=True, disable_log_stats=True, **settings)
        self.engine = llm.llm_engine
        self.description = f"vLLM {vllm.__version__}, {settings}"

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self.engine.add_request(str(key), {"prompt_token_ids": prompt}, params)

    def has_work(self) -> bool:
        return bool(self.engine.has_unfinished_requests())

    def step(self) -> Iterator[tuple[int, int]]:
        for output in self.engine.step():
            yield int(output.request_id), len(output.outputs[0].token_ids)
