"""vLLM for CPU through `LLMEngine`, tokens in and tokens out. Its threads and KV space are set in the environment."""

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
        self._started = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Iterator[tuple[int, int]]:
        requests = {}
        for index, (prompt, tokens) in enumerate(zip(prompts, max_tokens, strict=True)):
            self._started += 1
            request_id = str(self._started)
            requests[request_id] = index
            params = vllm.SamplingParams(
                temperature=0.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self.engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                yield requests[output.request_id], len(output.outputs[0].token_ids)
