"""Runs pagemill's scheduler and kernels over contiguous memory: `max_model_len` tokens for each request."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

from benchmarks.peers.adapters import pagemill_engine
from benchmarks.peers.contiguous import ContiguousMemory


class Engine(pagemill_engine.Engine):
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        memory = partial(ContiguousMemory, reservation=settings["max_model_len"])
        with patch("pagemill.engine.build.MemoryManager", memory):
            super().__init__(model, {**settings, "enable_prefix_caching": False})
        self.description += f", {settings['max_model_len']} tokens reserved for each request"
