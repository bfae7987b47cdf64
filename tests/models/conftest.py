"""The models here are tiny: a second thread costs more in barriers than it brings."""

import pytest
import torch

from pagemill.ops.torch_ops import TorchOps


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def packed(monkeypatch):
    """Bits of every quantized matrix, in the order of packing."""
    seen: list[int] = []
    pack = TorchOps.pack_quantized

    def note(self, weight, bias, dtype):
        seen.append(weight.bits)
        return pack(self, weight, bias, dtype)

    monkeypatch.setattr(TorchOps, "pack_quantized", note)
    return seen
