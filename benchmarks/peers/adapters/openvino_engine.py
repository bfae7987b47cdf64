"""OpenVINO GenAI's continuous batching on the GGUF's 4-bit weights, converted once to OpenVINO's own format."""

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
        self._started = 0

    def run(self, prompts: list[list[int]], max_tokens: list[int]) -> Iterator[tuple[int, int]]:
        handles = []
        for prompt, tokens in zip(prompts, max_tokens, strict=True):
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = tokens
            config.ignore_eos = True
            config.do_sample = False
            self._started += 1
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self.pipeline.add_request(self._started, ids, config))
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    yield index, sum(len(output.generated_ids) for output in handle.read().values())


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in OpenVINO's format into the folder. The weights stay 4-bit."""
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / gguf.name
    beside.unlink(missing_ok=True)
    beside.symlink_to(gguf)
    openvino_genai.LLMPipeline(str(beside), "CPU", enable_save_ov_model=True)
