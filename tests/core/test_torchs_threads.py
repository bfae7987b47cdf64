"""A step's large arrays are the kernels' work. Torch would share them among threads of its own, which then spin on the
cores that the kernels' threads need, unless pagemill was imported before torch."""

from __future__ import annotations

import pytest
import torch
from tests.core.drive import request
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagemill.sampling.params import SamplingParams

pytestmark = pytest.mark.shallow

GRAIN = 32768
"""With more elements than these, torch takes more than one thread (at::internal::GRAIN_SIZE)."""


class Shared(TorchDispatchMode):
    """Notes the operators that read or write more elements than one thread would."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        name = str(operator.overloadpacket)
        tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        large = [tuple(x.shape) for x in tensors if x.numel() > GRAIN]
        if large and not _is_view(name, tensors[0], result) and not _takes_few(name, args, result):
            self.noted.append(f"{name} {large}")
        return result


def _is_view(name, given, result):
    return (
        isinstance(result, torch.Tensor)
        and not name.endswith("_")
        and result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    )


def _takes_few(name, args, result):
    """Returns whether an operator touches only a few elements of what it is given, by their places."""
    if name == "aten.index":
        return result.numel() <= GRAIN
    if name == "aten.index_put_":
        whole = args[0]
        return len(args[1]) == whole.dim() and args[1][-1].numel() <= GRAIN
    return name == "aten.empty"


GREEDY = [{"temperature": 0.0}, {"temperature": 0.0}]
SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 2},
    {"repetition_penalty": 1.2, "logit_bias": {5: 1.0}, "logprobs": 3, "seed": 3},
    {"allowed_token_ids": list(range(100, 400)), "seed": 4},
]


@pytest.mark.parametrize("wanted", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_leaves_torch_nothing_to_share(make_engine, prompts, dtype, wanted):
    core = make_engine(dtype=dtype)
    assert core.ready.vocab_size > GRAIN
    for number, params in enumerate(wanted):
        params = SamplingParams(max_tokens=8, ignore_eos=True, **params)
        core.add_request(request(f"{number}", prompts[number], params))
    while core.stats().generated_tokens < 2 * len(wanted):
        core.step()
    with Shared() as shared:
        given = [len(output.new_token_ids) for _ in range(3) for output in core.step()]
    core.close()
    assert given == [1] * 3 * len(wanted)
    assert shared.noted == []
