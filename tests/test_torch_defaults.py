"""Torch's defaults, of dtype and device, are the caller's: no tensor of the engine may follow them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import pagemill
from pagemill import LLM, SamplingParams

MAKERS = {
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
    "zeros",
}  # fmt: skip
"""Functions of torch that take a dtype and a device, and otherwise the defaults."""
PROMPTS = ["Once upon a time", "The capital of France is"]
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=40, frequency_penalty=0.2, seed=3, max_tokens=8),
)


@pytest.fixture
def others_defaults():
    """Sets defaults as scripts do that make models of their own; on "meta", a tensor has no memory at all."""
    yield lambda: (torch.set_default_dtype(torch.bfloat16), torch.set_default_device("meta"))
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("settings", [{}, {"attention_backend": "torch"}], ids=["kernels", "torch"])
def test_tokens_do_not_depend_on_torchs_defaults(shallow_path, others_defaults, settings) -> None:
    def tokens() -> list[list[int]]:
        with LLM(str(shallow_path), kv_memory="8MiB", max_model_len=128, dtype="float32", **settings) as llm:
            outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in PARAMS]
        return [list(each.outputs[0].token_ids) for some in outputs for each in some]

    expected = tokens()
    others_defaults()
    assert tokens() == expected


def test_every_new_tensor_has_a_dtype_and_a_device_of_its_own() -> None:
    for file in Path(pagemill.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(file.read_text())):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{maker}" for maker in MAKERS}:
                given = {keyword.arg for keyword in call.keywords}
                assert {"dtype", "device"} <= given, f"{file}:{call.lineno}: {ast.unparse(call)}"
