"""Runs pagemill through its engine core, in the default configuration but for the precision, and without drafts, which
no peer makes by default."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pagemill import __version__
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.sampling.params import SamplingParams


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        self.core = EngineCore(EngineConfig(model=model["gguf"], speculative_config="off", **settings))
        self.description = f"pagemill {__version__}, {self.core.ready.description}"

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add_request(
            EngineRequest(request_id=str(key), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
        )

    def has_work(self) -> bool:
        return self.core.has_work()

    def step(self) -> Iterator[tuple[int, int]]:
        for output in self.core.step():
            if output.error is not None:
                raise output.error.to_error()
            yield int(output.request_id), len(output.new_token_ids)
