"""Fixtures of the tests of models."""

import pytest

from pagemill.ops.torch_ops import TorchOps


@pytest.fixture
def packed(monkeypatch):
    """Bits of every quantized matrix, in the order of packing."""
    seen: list[int] = []
    pack = TorchOps.pack_quantized

    def note(self, weight, bias, dtype):
        seen.append(8 if weight.slopes is None else 4)
        return pack(self, weight, bias, dtype)

    monkeypatch.setattr(TorchOps, "pack_quantized", note)
    return seen
