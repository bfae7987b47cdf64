"""Runs OpenVINO GenAI's continuous batching on the GGUF's 4-bit weights, converted once to OpenVINO's own format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Engine:
    def __init__(self, model: dict[str, str], settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        for name, value in settings["scheduler"].items():
            setattr(scheduler, name, value)
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            model["openvino"], scheduler, "CPU", settings["properties"]
        )
        self.description = f"OpenVINO GenAI {openvino_genai.__version__}, {settings}"
        self._open: dict[int, tuple[Any, int]] = {}
        """By key: the request's handle, and how many tokens it has still to bring."""

    def add(self, key: int, prompt: list[int], max_tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._open[key] = self.pipeline.add_request(key, ids, config), max_tokens

    def has_work(self) -> bool:
        return bool(self.pipeline.has_non_finished_requests())

    def step(self) -> Iterator[tuple[int, int]]:
        self.pipeline.step()
        for key, (handle, missing) in list(self._open.items()):
            while handle.can_read():
                new = sum(len(output.generated_ids) for output in handle.read().values())
                missing -= new
                yield key, new
            if missing > 0:
                self._open[key] = handle, missing
            else:
                del self._open[key]


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in OpenVINO's format into the folder. The weights stay 4-bit."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / gguf.name
    beside.unlink(missing_ok=True)
    beside.symlink_to(gguf)
    openvino_genai.LLMPipeline(str(beside), "CPU", enable_save_ov_model=True)
