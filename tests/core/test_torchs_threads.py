"""A step's large arrays are the kernels' work. Torch would share them among threads of its own, which then spin on the
cores that the kernels' threads need, unless pagemill was imported before torch."""

from __future__ import annotations

import pytest
import torch
from tests.core.drive import request
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.sampling.params import SamplingParams

pytestmark = pytest.mark.shallow

GRAIN = 32768
"""Elements from which on torch takes more threads than one (at::internal::GRAIN_SIZE)."""


class Shared(TorchDispatchMode):
    """Notes the operators that write as many elements as torch shares."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() >= GRAIN:
            name, given = str(operator.overloadpacket), [arg for arg in args if isinstance(arg, torch.Tensor)]
            is_view = not name.endswith("_") and any(
                result.untyped_storage().data_ptr() == each.untyped_storage().data_ptr() for each in given
            )
            if not is_view and name not in ("aten.empty", "aten.index_put_"):  # the latter writes where it indexes
                self.noted.append(f"{name} {tuple(result.shape)}")
        return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_leaves_torch_nothing_to_share(make_engine, prompts, dtype):
    core = make_engine(dtype=dtype)
    for number, params in enumerate([
        SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=40, min_p=0.01, seed=2, max_tokens=8, ignore_eos=True),
        SamplingParams(repetition_penalty=1.2, logit_bias={5: 1.0}, logprobs=3, seed=3, max_tokens=8, ignore_eos=True),
    ]):  # fmt: skip
        core.add_request(request(f"{number}", prompts[number], params))
    for _ in range(3):
        core.step()
    with Shared() as shared:
        for _ in range(3):
            core.step()
    assert shared.noted == []
    core.close()
