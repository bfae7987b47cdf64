"""Low-rank additions: the kernels against float64, and the bits of a row whatever rows are beside it."""

import pytest
import torch

from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.low_rank import LowRankPart
from pagemill.ops.torch_ops import TorchOps

K, N = 75, 210
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def parts_of(dtype, seed):
    """Parts of different ranks, one over 16, with outputs between them that nothing is added to."""
    random = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return (torch.randn(shape, generator=random) * 0.3).to(dtype)

    shapes = ((0, 70, 16, 0.5), (80, 64, 5, 2.0), (150, 60, 33, 1.25))
    return [LowRankPart(matrix(rank, K), matrix(count, rank), begin, scale) for begin, count, rank, scale in shapes]


def expected(x, y, runs):
    y = y.double()
    for parts, tokens in runs:
        for part in parts:
            low = x[tokens].double() @ part.a.double().T
            y[tokens, part.begin : part.begin + len(part.b)] += part.scale * low @ part.b.double().T
    return y


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_additions(ops, dtype, held):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(53, K, generator=random).to(dtype)
    y = torch.randn(53, N, generator=random).to(dtype)
    order = torch.randperm(53, generator=random)
    tokens, without = (order[:40], order[40:47]), order[47:]
    parts = [parts_of(held, seed) for seed in (1, 2)]
    wanted = expected(x, y, zip(parts, tokens, strict=True))
    for each in (ops, TorchOps()):
        packed = [each.pack_low_rank(some, K, N) for some in parts]
        got = y.clone()
        each.add_low_rank(x, got, [*zip(packed, tokens, strict=True)])
        assert (got.double() - wanted).abs().max() < ROUNDING[dtype] * wanted.abs().max()
        assert torch.equal(got[without], y[without])
        if each is not ops:
            continue
        for addition, some in zip(packed, tokens, strict=True):
            for row in some[:7].tolist():
                alone = y[row : row + 1].clone()
                ops.add_low_rank(x[row : row + 1], alone, [(addition, torch.zeros(1, dtype=torch.int64))])
                assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize(
    ("a", "b", "begin"),
    [((4, K + 1), (10, 4), 0), ((4, K), (10, 5), 0), ((4, K), (10, 4), N - 9), ((4, K), (10, 4), -1)],
)
def test_parts_that_do_not_fit_are_refused(a, b, begin):
    for ops in (CpuOps(), TorchOps()):
        with pytest.raises(ValueError, match="do not fit"):
            ops.pack_low_rank([LowRankPart(torch.zeros(a), torch.zeros(b), begin, 1.0)], K, N)
