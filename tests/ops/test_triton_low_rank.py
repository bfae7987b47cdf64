"""Low-rank additions in Triton, against float64, and a token's bits whatever tokens are beside it."""

from __future__ import annotations

import pytest
import torch

from interpreter import CAPABILITY, DEVICE, multiply_rows_alike

pytest.importorskip("triton")

from test_low_rank import ROUNDING, K, N, expected, parts_of

from pagemill.ops.low_rank import LowRankPart
from pagemill.ops.torch_ops import TorchOps
from pagemill.ops.triton_ops import TritonOps

pytestmark = pytest.mark.gpu

ops = TritonOps(CAPABILITY)


def parts_there(dtype: torch.dtype, seed: int) -> list[LowRankPart]:
    return [LowRankPart(at.a.to(DEVICE), at.b.to(DEVICE), at.begin, at.scale) for at in parts_of(dtype, seed)]


@pytest.mark.parametrize(
    ("dtype", "held"),
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_additions(dtype: torch.dtype, held: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    multiply_rows_alike(monkeypatch)
    random = torch.Generator().manual_seed(0)
    x = torch.randn(53, K, generator=random).to(dtype).to(DEVICE)
    whole = torch.full((53, N + 30), float("nan"), dtype=dtype, device=DEVICE)
    y = whole[:, :N]
    y.copy_(torch.randn(53, N, generator=random))
    before, order = y.clone(), torch.randperm(53, generator=random).to(DEVICE)
    tokens, without = (order[:40], order[40:47]), order[47:]
    parts = [parts_there(held, seed) for seed in (1, 2)]
    wanted = expected(x, before, zip(parts, tokens, strict=True))
    packed = [ops.pack_low_rank(some, K, N) for some in parts]
    ops.add_low_rank(x, y, [*zip(packed, tokens, strict=True)])
    assert (y.double() - wanted).abs().max() < ROUNDING[dtype] * wanted.abs().max()
    assert torch.equal(y[without], before[without])
    assert torch.isnan(whole[:, N:]).all()
    for addition, token in ((packed[0], order[3]), (packed[1], order[41])):
        alone = before[token : token + 1].clone()
        ops.add_low_rank(x[token : token + 1], alone, [(addition, torch.zeros(1, dtype=torch.int64, device=DEVICE))])
        assert torch.equal(alone[0], y[token])


def test_what_does_not_fit_is_refused() -> None:
    x, y, tokens = torch.zeros(4, K), torch.zeros(4, N), torch.arange(2)
    packed = ops.pack_low_rank(parts_of(torch.float32, 1), K, N)
    for wrong in ((x[:, 1:], y, tokens), (x, y[:2], tokens), (x.half(), y, tokens), (x, y, tokens.int())):
        with pytest.raises(ValueError, match="must be"):
            ops.add_low_rank(*wrong[:2], [(packed, wrong[2])])
    with pytest.raises(TypeError, match="packed by TritonOps"):
        ops.add_low_rank(x, y, [(TorchOps().pack_low_rank(parts_of(torch.float32, 1), K, N), tokens)])
    with pytest.raises(ValueError, match="do not fit"):
        ops.pack_low_rank([LowRankPart(torch.zeros(4, K), torch.zeros(10, 5), 0, 1.0)], K, N)
    ops.add_low_rank(x, y, [(packed, tokens[:0])])
    assert not y.any()


def test_bytes_are_those_that_are_held() -> None:
    packed = ops.pack_low_rank(parts_of(torch.bfloat16, 1), K, N)
    ranks = 16 + 16 + 48
    elements = ranks * K + 70 * 16 + 64 * 16 + 60 * 48
    assert packed.nbytes == 2 * elements + 4 * ranks // 16 + 8 * 5 * (2 + 1 + 1)
