"""The argmax of a head's outputs, from its sums, is the token that the sampler finds in the logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.ops.cpu_ops import CpuLinear, CpuOps
from pagemill.ops.interface import AllowedOutputs
from pagemill.ops.quantized import quantize_int8
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.kernels import Choices

ROWS = (1, 2, 6, 7, 14, 15, 17, 33, 64, 300)


def in_logits(linear: CpuLinear, x: torch.Tensor) -> list[int]:
    logits = linear(x).float()
    return CpuSamplingKernels().choose(logits, np.arange(len(x)), Choices.argmax(len(x))).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
@pytest.mark.parametrize(("n", "k"), [(1, 5), (13, 40), (200, 72), (1999, 70), (4160, 640)])
def test_tokens(ops: CpuOps, n, k, weight_dtype, dtype):
    weight = torch.randn(n, k).round()
    weight[n // 3 :: 5] = weight[n // 3].clone()  # equal logits, far apart
    weight[n // 2 :: 7] = 0
    bias = torch.randn(n).round() if n % 2 else None
    if weight_dtype == torch.int8:
        linear = ops.pack_quantized(quantize_int8(weight), bias, torch.float32)
    else:
        linear = ops.pack_linear(weight.to(weight_dtype), bias)
    for m in ROWS:
        x = torch.randn(m, k + 3).round().to(dtype)[:, 1 : k + 1]  # strided rows
        x[::4] = weight[n // 3].to(dtype)
        found = linear.argmax(x)
        assert found.dtype == np.int64
        assert found.tolist() == in_logits(linear, x), m


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negative_outputs_lose_to_no_padding(ops: CpuOps, dtype):
    for n in (1, 3, 17, 31, 33, 100):
        linear = ops.pack_linear(-1 - torch.rand(n, 8).to(dtype))
        x = 1 + torch.rand(20, 8).to(dtype)
        found = linear.argmax(x).tolist()
        assert found == in_logits(linear, x)
        assert all(0 <= token < n for token in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_token_say_why_and_the_others_have_theirs(ops: CpuOps, dtype):
    weight, bias = torch.randn(100, 32).to(dtype), torch.zeros(100)
    x = torch.randn(40, 32).to(dtype)
    linear = ops.pack_linear(weight, bias)
    expected = in_logits(linear, x)
    x[3, 5], x[17, 0] = float("nan"), float("inf")
    found = linear.argmax(x).tolist()
    assert found == in_logits(linear, x)
    assert found[3] < 0
    assert found[17] < 0
    others = [row for row in range(40) if row not in (3, 17)]
    assert [found[row] for row in others] == [expected[row] for row in others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_whose_outputs_are_all_minus_infinity(ops: CpuOps, dtype):
    linear = ops.pack_linear(torch.randn(100, 32).to(dtype), torch.full((100,), float("-inf")))
    x = torch.randn(20, 32).to(dtype)
    found = linear.argmax(x).tolist()
    assert found == in_logits(linear, x)
    assert set(found) == {-2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 31, 33, 500, 4160])
def test_only_allowed_outputs_count(ops: CpuOps, n, dtype):
    generator = np.random.default_rng(n)
    weight = torch.randn(n, 40).round().to(dtype)
    weight[n // 2 :: 7] = weight[n // 3].clone()  # equal logits
    weights = [ops.pack_linear(weight), ops.pack_quantized(quantize_int8(weight.float()), None, torch.float32)]
    for share, m in zip((0, 0.001, 0.3, 0.97), (3, 20, 64, 300), strict=True):
        allows = generator.random((m, n)) < share
        padded = np.concatenate((allows, np.ones((m, -n % 32), np.bool_)), axis=1)  # beyond the last output: ignored
        bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
        rows = generator.integers(-1, m, m)
        x = torch.randn(m, 40).round().to(dtype)
        for linear in weights:
            logits = linear(x).float()
            logits[torch.from_numpy((rows >= 0)[:, None] & ~allows[rows])] = float("-inf")
            expected = CpuSamplingKernels().choose(logits, np.arange(m), Choices.argmax(m)).tolist()
            assert linear.argmax(x, AllowedOutputs(bits, rows)).tolist() == expected


def test_a_number_that_is_none_counts_where_it_is_allowed(ops: CpuOps):
    linear = ops.pack_linear(torch.ones(3, 1), torch.tensor([0.0, float("nan"), float("inf")]))
    bits, x = np.array([[1], [2], [4], [0]], np.uint32), torch.ones(5, 1)
    assert linear.argmax(x, AllowedOutputs(bits, np.array([0, 1, 2, 3, -1]))).tolist() == [0, -1, -1, -2, -1]


def test_wrong_bits(ops: CpuOps):
    linear = ops.pack_linear(torch.randn(33, 8))
    with pytest.raises(ValueError, match="bits must be contiguous uint32"):
        linear.argmax(torch.empty(1, 8), AllowedOutputs(np.zeros((1, 1), np.uint32), np.zeros(1, np.int64)))
    with pytest.raises(IndexError, match="no bits 1"):
        linear.argmax(torch.empty(1, 8), AllowedOutputs(np.zeros((1, 2), np.uint32), np.ones(1, np.int64)))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(ops: CpuOps, threads):
    linear = ops.pack_linear(torch.randn(3000, 64).round())
    x = torch.randn(50, 64).round()
    expected = linear.argmax(x).tolist()
    with kernels_of(_kernels.isa(), threads):
        assert linear.argmax(x).tolist() == expected


def test_no_rows_and_wrong_rows(ops: CpuOps):
    linear = ops.pack_linear(torch.randn(10, 8))
    assert linear.argmax(torch.empty(0, 8)).tolist() == []
    with pytest.raises(ValueError, match="contiguous rows"):
        linear.argmax(torch.empty(2, 9))
