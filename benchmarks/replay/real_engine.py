"""Runs steps of all kinds with the real engine, to fit the step-time model to them."""

from __future__ import annotations

import random
from typing import Any

import torch

from pagemill.config import EngineConfig
from pagemill.hub import resolve_model
from pagemill.planner.real_engine import CLOCKS, RealEngine

RUNNING = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of requests that `sample_steps` runs at once, one after the other."""
LEAST_STEPS = 4
"""Steps with each of them, however slow the machine is."""
CONTEXT = 16384


class SampledEngine(RealEngine):
    """Runs steps of all kinds. clock: "wall"; or "cpu", which takes one thread."""

    def __init__(self, model: str, dtype: str, clock: str, **settings: Any) -> None:
        if clock == "cpu":
            torch.set_num_threads(1)
            settings["num_threads"] = 1
        # SmolLM2 declares 8,192 positions; the traces go further, and nobody reads the answers.
        overrides = {"max_position_embeddings": CONTEXT}
        super().__init__(
            EngineConfig(
                model=str(resolve_model(model)), dtype=dtype, max_model_len=CONTEXT, hf_overrides=overrides, **settings
            ),
            clock=CLOCKS[clock],
        )

    def sample_steps(self, seconds: float) -> None:
        """Runs steps of all kinds: phases of 1 to 128 requests at once, with lengths that are log-uniform.

        Each phase takes its share of `seconds`, and LEAST_STEPS steps at least.
        """
        draw = random.Random(1)
        for target in RUNNING:
            clock, enough = self._clock(), self.num_steps + LEAST_STEPS
            live: set[str] = set()
            while clock.now() < seconds / len(RUNNING) or self.num_steps < enough:
                while len(live) < target:
                    prompt_len = int(2 ** draw.uniform(4, 13 if target == 1 else 11))
                    output_len = int(2 ** draw.uniform(3, 7))
                    live.add(self.add(self.prompt(prompt_len), output_len))
                live -= {request_id for request_id, reason in self.step() if reason is not None}
            self.core.abort(live)
