"""Sampling in Triton: against float64 sorted lists, in the interpreter or on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from reference_sampling import kept_probabilities

from gpu_compiler import compiled_by
from interpreter import DEVICE

pytest.importorskip("triton")

from pagemill.sampling import triton_sampling
from pagemill.sampling.kernels import ALL_FORBIDDEN, NOT_FINITE, Choices, DeviceChoices
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.sampler import Sampler
from pagemill.sampling.torch_kernels import TorchSamplingKernels

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, of -inf - -inf
kernels = triton_sampling.TritonSamplingKernels()
NONE = np.zeros(0, np.int32)
SPLIT, CHUNK = triton_sampling.SPLIT, triton_sampling.CHUNK


@pytest.fixture(autouse=True)
def narrow_splits(monkeypatch):
    """Small vocabularies in several splits, the last one partly behind the end."""
    monkeypatch.setattr(triton_sampling, "SPLIT", 64)
    monkeypatch.setattr(triton_sampling, "CHUNK", 32)


def choices_of(rows, rng, options=None) -> Choices:
    """options: of each row in turn, (temperature, top_k, top_p, min_p)."""
    made = [(options or [(1.0, 0, 1.0, 0.0)])[i % len(options or [0])] for i in range(rows)]
    temperature, top_k, top_p, min_p = zip(*made, strict=True)
    floats = [np.array(values, np.float32) for values in (temperature, top_p, min_p)]
    return Choices(floats[0], np.array(top_k, np.int64), floats[1], floats[2], rng.random(rows))


def chosen(logits: torch.Tensor, choices: Choices) -> np.ndarray:
    on_device = DeviceChoices(*(torch.from_numpy(choice).to(DEVICE) for choice in choices))
    tokens = kernels.choose_on_device(logits.to(DEVICE), on_device, truncate=choices.truncate)
    assert tokens.dtype == torch.int32
    assert tokens.shape == (len(logits),)
    return tokens.cpu().numpy()


def expected(x: np.ndarray, choices: Choices, row: int) -> tuple[np.ndarray, int, float]:
    """The distribution, the token by float64, and how far the uniform number is from the token's borders."""
    temperature, top_k, top_p, min_p, u = (choice[row] for choice in choices)
    params = SamplingParams(temperature=float(temperature), top_k=int(top_k), top_p=float(top_p), min_p=float(min_p))
    p = kept_probabilities(np.float64(x), params)
    sums = np.cumsum(p)
    token = int(np.argmax((sums > u) & (p > 0)))
    return p, token, min(abs(sums[token] - u), abs(sums[token] - p[token] - u))


OPTIONS = [
    (1.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (2.0, 0, 1.0, 0.1),
    (0.5, 1, 1.0, 0.0), (1.5, 20, 0.7, 0.05), (1.0, 0, 1e-6, 0.0), (3.0, 1000, 0.95, 0.0), (1.0, 7, 0.5, 0.3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("vocab", "rows", "dtype"),
    [
        (1, 3, torch.float32), (63, 10, torch.float32), (300, 10, torch.float32),
        (63, 10, torch.bfloat16), (63, 10, torch.float16),
        pytest.param(63, 64, torch.float32, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_tokens_are_those_of_float64(vocab, rows, dtype):
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(rows, vocab)) * 3).to(dtype)  # narrow types have many ties
    logits[1::3, ::2] = -torch.inf
    logits[1::3, 0] = 0.5
    choices = choices_of(rows, rng, OPTIONS)
    tokens, compared = chosen(logits, choices), 0
    for row, token in enumerate(tokens.tolist()):
        p, wanted, margin = expected(logits[row].float().numpy(), choices, row)
        assert p[token] > 0, (row, token)
        if margin > 1e-5:
            assert token == wanted, (row, choices.top_k[row])
            compared += 1
    assert compared > 0.8 * rows


@pytest.mark.parametrize("option", [(1.0, 4, 1.0, 0.0), (1.0, 0, 0.55, 0.0), (0.8, 0, 1.0, 0.2), (1.2, 8, 0.8, 0.02)])
def test_exactly_what_is_kept_is_drawn(option):
    """Uniform numbers at the middle of each token's share, and at both ends of all, find every kept token."""
    rng = np.random.default_rng(5)
    x = np.round(rng.normal(size=150) * 2, 1).astype(np.float32)  # with ties
    params = SamplingParams(temperature=option[0], top_k=option[1], top_p=option[2], min_p=option[3])
    p = kept_probabilities(np.float64(x), params)
    kept = np.flatnonzero(p)
    middle = (np.cumsum(p) - p / 2)[kept]
    uniforms = np.concatenate([[0.0, 1 - 2.0**-53], middle])
    choices = choices_of(len(uniforms), rng, [option])._replace(uniforms=uniforms)
    tokens = chosen(torch.from_numpy(np.tile(x, (len(uniforms), 1))), choices)
    assert tokens.tolist() == [kept[0], kept[-1], *kept]


def test_draws_follow_the_distribution():
    """Chi-squared under the 99.9 % quantile, and far over it for another temperature."""
    rng = np.random.default_rng(11)
    x = (rng.normal(size=20) * 1.5).astype(np.float32)
    draws = 250
    choices = choices_of(draws, rng)
    logits = torch.from_numpy(np.tile(x, (draws, 1))).to(DEVICE)
    counts = np.bincount(kernels.choose(logits, np.arange(draws), choices), minlength=20)

    def chi_squared(temperature):
        p = kept_probabilities(np.float64(x), SamplingParams(temperature=temperature))
        return ((counts - p * draws) ** 2 / (p * draws)).sum()

    assert chi_squared(1.0) < 43.8  # 19 degrees of freedom
    assert chi_squared(1.5) > 43.8


def test_rows_without_a_token():
    x = torch.zeros(7, 130)
    x[0, 129], x[1, 0], x[2] = torch.nan, torch.inf, -torch.inf
    x[3, 100], x[4, 64:] = -torch.inf, 1.0
    x[5], x[5, 77] = -torch.inf, -3e38
    x[6, 3] = x[6, 90] = 2.0
    wanted = [NOT_FINITE, NOT_FINITE, ALL_FORBIDDEN, 0, 64, 77, 3]
    assert kernels.choose_on_device(x.to(DEVICE), None).tolist() == wanted
    assert kernels.choose(x.to(DEVICE), np.arange(7), Choices.argmax(7)).tolist() == wanted
    drawn = choices_of(7, np.random.default_rng(0), [(1.0, 3, 0.9, 0.1)])._replace(uniforms=np.zeros(7))
    assert chosen(x, drawn).tolist() == [*wanted[:6], 0], "top_k 3 keeps all that equal the third"
    assert chosen(-torch.zeros(7, 1), drawn).tolist() == [0] * 7


def test_zeros_of_both_signs_are_equal():
    x = torch.tensor([[-0.0, 0.0, -1.0, -0.0]])
    option = choices_of(1, np.random.default_rng(0), [(1.0, 1, 1.0, 0.0)])
    assert [chosen(x, option._replace(uniforms=np.array([u])))[0] for u in (0.1, 0.5, 0.9)] == [0, 1, 3]


def test_a_row_is_the_same_alone_and_whatever_is_left_out():
    rng = np.random.default_rng(2)
    logits = torch.from_numpy((rng.normal(size=(6, 100)) * 2).astype(np.float32))
    choices = choices_of(6, rng, [(1.0, 0, 1.0, 0.0), (1.0, 9, 0.9, 0.0), (0.0, 0, 1.0, 0.0)])
    places = np.array([5, 3, 1, 0])
    part = Choices(*(choice[places] for choice in choices))
    whole = kernels.choose(logits.to(DEVICE), np.arange(6), choices)
    assert np.array_equal(whole, chosen(logits, choices))
    assert np.array_equal(kernels.choose(logits.to(DEVICE), places, part), whole[places])
    plain = Choices(*(choice[::3] for choice in choices))
    assert not plain.truncate
    assert np.array_equal(kernels.choose(logits.to(DEVICE), np.arange(0, 6, 3), plain), whole[::3])
    assert kernels.choose(logits.to(DEVICE), np.zeros(0, np.int64), Choices.argmax(0)).tolist() == []


def test_what_is_behind_a_row_is_not_read():
    memory = torch.full((3, 200), torch.nan)
    memory[:, :150] = torch.randn(3, 150, generator=torch.Generator().manual_seed(1))
    choices = choices_of(3, np.random.default_rng(1), [(1.0, 10, 0.9, 0.0), (1.0, 0, 1.0, 0.0)])
    on_device = memory.to(DEVICE)[:, :150]
    moved = DeviceChoices(*(torch.from_numpy(choice).to(DEVICE) for choice in choices))
    assert (
        kernels.choose_on_device(on_device, moved, truncate=True).tolist()
        == chosen(memory[:, :150].clone(), choices).tolist()
    )


def test_masks_forbid_what_torchs_do():
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 2**32, (3, 5), dtype=np.uint32)
    memory = torch.full((4, 140), 7.0, device=DEVICE)
    mine, by_torch = memory[:, :135], torch.full((4, 135), 7.0, device=DEVICE)
    for each, logits in ((kernels, mine), (TorchSamplingKernels(), by_torch)):
        each.mask(logits, np.array([3, 1]), bits, np.array([0, 2]))
    assert torch.equal(mine, by_torch)
    assert (memory[:, 135:] == 7).all()
    assert (mine == -torch.inf).any()


@pytest.mark.parametrize("vocab", [49152, *(pytest.param(vocab, marks=pytest.mark.slow) for vocab in (128256, 151936))])
def test_usual_vocabularies(vocab, monkeypatch):
    monkeypatch.setattr(triton_sampling, "SPLIT", SPLIT)
    monkeypatch.setattr(
        triton_sampling, "CHUNK", SPLIT if DEVICE == "cpu" else CHUNK
    )  # an operation's time is the same
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy((rng.normal(size=(1, vocab)) * 3).astype(np.float32))
    logits[0, -1] = 12.0
    choices = choices_of(1, rng, [(1.0, 50, 0.9, 0.0)])
    _, wanted, margin = expected_of_many(logits[0].numpy(), choices)
    assert margin > 1e-5
    assert chosen(logits, choices).tolist() == [wanted]


def expected_of_many(x: np.ndarray, choices: Choices) -> tuple[np.ndarray, int, float]:
    """As `expected`, of a row of which top_k leaves few."""
    few = np.flatnonzero(x >= np.sort(x)[-int(choices.top_k[0])])
    p, token, margin = expected(x[few], choices, 0)
    return p, int(few[token]), margin


@pytest.mark.parametrize("sampling", [kernels, TorchSamplingKernels()], ids=lambda kernels: type(kernels).__name__)
def test_tokens_in_flight_are_those_of_one_step_at_a_time(sampling):
    """The host learns of all tokens at the end, here."""
    truncated = sampling.truncates_on_device
    limits = {"top_k": 9, "top_p": 0.9, "min_p": 0.01} if truncated else {}
    rows = np.arange(3)
    sync, ahead = (Sampler(4, 60, sampling) for _ in range(2))
    for sampler in (sync, ahead):
        for row, params in enumerate([{}, {"temperature": 0.7, **limits}, {"temperature": 0.0}]):
            sampler.add_row(row, SamplingParams(**params), 100 + row, NONE, np.arange(row, dtype=np.int32))
        sampler.add_row(3, SamplingParams(logprobs=1), 0, NONE, NONE)
    assert ahead.samples_on_device(rows, truncated=truncated)
    assert ahead.samples_on_device(rows, truncated=False) is not truncated
    assert not ahead.samples_on_device(np.arange(4), truncated=truncated), "log probabilities are given by the host"
    random = torch.Generator().manual_seed(0)
    steps = [torch.randn(3, 60, generator=random).to(DEVICE) * 2 for _ in range(2)]
    under_way = []
    for logits in steps:
        choices = ahead.choices_ahead(rows)
        ahead.note_ahead(rows)
        moved = DeviceChoices(*(torch.from_numpy(np.ascontiguousarray(choice)).to(DEVICE) for choice in choices))
        under_way.append(sampling.choose_on_device(logits, moved, truncate=choices.truncate))
    assert [tokens.tolist() for tokens in under_way] == [sync.sample(x.clone(), rows).token_ids for x in steps]
    more = torch.randn(3, 60, generator=random).to(DEVICE)
    assert ahead.sample(more.clone(), rows).token_ids == sync.sample(more.clone(), rows).token_ids


def test_torch_refuses_limits_that_it_cannot_follow_without_waiting():
    with pytest.raises(ValueError, match="top_k, top_p or min_p"):
        TorchSamplingKernels().choose_on_device(torch.zeros(1, 3), None, truncate=True)


@pytest.mark.skipif(DEVICE != "cuda", reason="no GPU whose work a graph could capture")
def test_a_graph_captures_it():
    rng = np.random.default_rng(6)
    logits = torch.randn(4, 1000, device=DEVICE)
    choices = DeviceChoices(*(torch.from_numpy(c).to(DEVICE) for c in choices_of(4, rng, OPTIONS)))
    eager = kernels.choose_on_device(logits, choices, truncate=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = kernels.choose_on_device(logits, choices, truncate=True)
    graph.replay()
    assert torch.equal(captured, eager)


def test_the_kernels_compile_for_gpus_that_are_not_there():
    compiled = compiled_by(Path(__file__).with_name("compile_for_gpus.py"))
    assert {line[1] for line in compiled} == {"find_largest", "narrow", "weigh", "pick", "forbid"}
    assert all(stack == "0" for _, _, _, stack, _ in compiled), compiled
