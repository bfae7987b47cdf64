"""States how much faster than which peer pagemill wants to be, as data."""

from __future__ import annotations

from dataclasses import dataclass

VLLM = ("vllm", "vllm-one-process")
VLLM_BF16 = ("vllm-bf16", "vllm-bf16-compiled")
OPENVINO = ("openvino", "openvino-f32")


@dataclass(frozen=True)
class Goal:
    """Demands of `engine` `at_least` times the output tokens per second of the fastest engine of `against`."""

    workload: str
    engine: str
    against: tuple[str, ...]
    at_least: float


GOALS = (
    Goal("two", "pagemill", VLLM, 1.6),
    Goal("mixed", "pagemill", VLLM, 1.5),
    Goal("prefix", "pagemill", VLLM, 1.7),
    Goal("two", "pagemill-bf16", VLLM_BF16, 1.7),
    Goal("mixed", "pagemill-bf16", VLLM_BF16, 1.7),
    Goal("prefix", "pagemill-bf16", VLLM_BF16, 2.0),
    Goal("two", "pagemill-gguf", OPENVINO, 2.0),
    Goal("mixed", "pagemill-gguf", OPENVINO, 2.0),
    Goal("prefix", "pagemill-gguf", OPENVINO, 8.0),
    Goal("prefix", "pagemill-gguf", ("pagemill", "pagemill-bf16"), 1.0),
    Goal("mixed", "pagemill", ("transformers-static",), 24.0),
    Goal("mixed", "pagemill-bf16", ("transformers-static-bf16",), 24.0),
)

CAPACITY_RATIO = 1.5
"""The goal for the ratio of the requests per second at which pagemill and vLLM reach the same p99 time per token."""
START_S = 3.0
"""From the start of a new process to the first token, with a cached model."""
