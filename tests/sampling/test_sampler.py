"""The sampler: right distributions, right tokens, and the same bits whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_sampling import kept_probabilities, modified_logits

from chi_squared import chi_squared
from pagemill.sampling.cpu_kernels import CpuSamplingKernels
from pagemill.sampling.kernels import ALL_FORBIDDEN, NOT_FINITE, Choices, DeviceChoices, SamplingKernels
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.random import sequence_seed, uniform
from pagemill.sampling.sampler import Sampler
from pagemill.sampling.torch_kernels import TorchSamplingKernels

KERNELS: list[SamplingKernels] = []
"""The last are those that the tests run on."""
NONE = np.zeros(0, np.int32)


@pytest.fixture(params=[CpuSamplingKernels, TorchSamplingKernels], scope="module", autouse=True)
def passes(request):
    """Every test here runs on the kernels and on torch's operators."""
    KERNELS.append(request.param())
    yield KERNELS[-1]
    KERNELS.pop()


def params_of(**kwargs) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **kwargs})


def sampler_with(rows, vocab, eos=()) -> Sampler:
    """`rows`: (params, seed, prompt, output) each."""
    sampler = Sampler(len(rows), vocab, KERNELS[-1], eos)
    for row, (params, seed, prompt, output) in enumerate(rows):
        sampler.add_row(row, params, seed, np.array(prompt, np.int32), np.array(output, np.int32))
    return sampler


def distribution(logits, params, draws, **state):
    """How often each token comes in `draws` draws of the same logits: one row, as many positions."""
    sampler = sampler_with([(params, 7, (), ())], len(logits))
    counts = np.zeros(len(logits))
    rows = np.zeros(1, np.int64)
    for _ in range(draws):
        counts[sampler.sample(torch.tensor(logits, dtype=torch.float32)[None], rows).token_ids[0]] += 1
    return counts


# --- distributions ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"top_k": 8, "top_p": 0.7, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_draws_follow_the_distribution(options):
    """Chi-squared at a fixed seed: under the 99.9 % quantile, and far over it for a wrong distribution."""
    vocab, draws = 300, 2000
    rng = np.random.default_rng(3)
    logits = rng.normal(size=vocab) * 2
    params = params_of(**options)
    expected = kept_probabilities(np.float64(np.float32(logits)), params) * draws
    counts = distribution(logits, params, draws)
    assert counts[expected == 0].sum() == 0

    assert chi_squared(counts, expected) < 1
    other = kept_probabilities(np.float64(np.float32(logits)), params_of(**{**options, "temperature": 1.25}))
    if options.get("temperature") is None:
        assert chi_squared(counts, other * draws) > 1


logit_values = st.one_of(
    st.floats(-20, 20, width=32), st.sampled_from([0.0, 1.0, 1.0000001, 5.0, -5.0])
)  # with ties, and all but ties


@given(
    logits=st.lists(logit_values, min_size=2, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)
@settings(max_examples=150, deadline=None)
def test_truncation_equals_the_reference(logits, temperature, top_k, top_p, min_p, seed):
    """64 draws give only tokens that the reference keeps, and nothing but the likeliest one if it keeps no other."""
    params = params_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    x = np.array(logits, np.float32)
    kept = kept_probabilities(np.float64(x), params)
    # Tokens at the very edge may fall on either side, by rounding.
    near = [
        kept_probabilities(np.float64(x), params_of(temperature=temperature, top_k=top_k, top_p=p, min_p=m))
        for p, m in (
            (min(1.0, top_p + 1e-5), max(0.0, min_p - 1e-5)),
            (max(1e-9, top_p - 1e-5), min(1.0, min_p + 1e-5)),
        )
    ]
    rows = [(params, seed, (), [0] * position) for position in range(64)]
    sampler = sampler_with(rows, len(x))
    tokens = sampler.sample(torch.from_numpy(np.tile(x, (64, 1))), np.arange(64)).token_ids
    assert all(near[0][token] > 0 for token in tokens)
    if (near[0] > 0).sum() == (near[1] > 0).sum() == 1:
        assert set(tokens) == {int(kept.argmax())}


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_inverse_cdf_is_exact(data):
    """The token is the first whose cumulative probability exceeds the uniform number, over pieces and their borders."""
    vocab = data.draw(st.sampled_from([1, 2, 255, 256, 257, 1000]))
    seed = data.draw(st.integers(0, 2**31))
    scale = data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    x = (np.random.default_rng(seed).normal(size=(8, vocab)) * scale).astype(np.float32)
    sampler = sampler_with([(params_of(), seed + i, (), ()) for i in range(8)], vocab)
    tokens = sampler.sample(torch.from_numpy(x.copy()), np.arange(8)).token_ids
    u = uniform(np.arange(seed, seed + 8, dtype=np.uint64), np.zeros(8, np.int64))
    p = np.exp(np.float64(x) - x.max(1, keepdims=True))
    sums = np.cumsum(p / p.sum(1, keepdims=True), 1)
    for row, token in enumerate(tokens):
        low = sums[row, token - 1] if token else 0.0
        assert low - 1e-5 <= u[row] <= sums[row, token] + 1e-5


@pytest.mark.parametrize("vocab", [256, 600])
def test_rows_that_are_not_finite_are_told_when_others_are_drawn(vocab: int) -> None:
    logits = torch.zeros(4, vocab)
    logits[0, 3], logits[1, vocab - 1], logits[2] = torch.nan, torch.inf, -torch.inf
    choices = DeviceChoices(*map(torch.from_numpy, Choices.argmax(4)._replace(temperature=np.ones(4, np.float32))))
    tokens = TorchSamplingKernels().choose_on_device(logits, choices).tolist()
    assert tokens[:3] == [NOT_FINITE, NOT_FINITE, ALL_FORBIDDEN]
    assert 0 <= tokens[3] < vocab


# --- what changes logits ---

token = st.integers(0, 11)
some_params = st.fixed_dictionaries(
    {
        "temperature": st.just(0.0),
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.5, -1.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.25, -0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.5, 0.6]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "stop_token_ids": st.lists(token, max_size=2),
        "logit_bias": st.one_of(st.none(), st.dictionaries(token, st.floats(-5, 5, width=32), min_size=1, max_size=3)),
        "allowed_token_ids": st.one_of(st.none(), st.lists(token, min_size=3, max_size=8, unique=True)),
        "bad_words_token_ids": st.one_of(st.none(), st.lists(st.lists(token, min_size=1, max_size=3), max_size=4)),
    }
)


@given(
    options=st.lists(some_params, min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    prompt=st.lists(token, max_size=6),
    output=st.lists(token, max_size=5),
)
@settings(max_examples=200, deadline=None)
def test_greedy_sequences_equal_the_reference(options, seed, prompt, output):
    """Five steps of several rows; the sampler learns of its own tokens only from itself."""
    rng = np.random.default_rng(seed)
    eos = (4,)
    rows = []
    for choice in options:
        if choice["allowed_token_ids"] and set(choice["allowed_token_ids"]) <= {*choice["stop_token_ids"], *eos}:
            choice["min_tokens"] = 0
        rows.append((params_of(**choice), 0, prompt, output))
    sampler = sampler_with(rows, 12, eos)
    outputs = [list(output) for _ in rows]
    for _ in range(5):
        logits = (rng.normal(size=(len(rows), 12)) * 3).astype(np.float32)
        sampled = sampler.sample(torch.from_numpy(logits.copy()), np.arange(len(rows)))
        for row, (params, _, _, _) in enumerate(rows):
            x = modified_logits(logits[row], params, prompt, outputs[row], eos)
            assert (row in sampled.exhausted) == (x.max() == -np.inf)
            if row not in sampled.exhausted:
                chosen = int(sampled.token_ids[row])
                assert x[chosen] >= x.max() - 1e-4
                outputs[row].append(chosen)


def test_a_row_is_forgotten_when_it_leaves():
    sampler = sampler_with([(params_of(temperature=0, allowed_token_ids=[3], logprobs=2), 0, (), ())], 8)
    logits = torch.arange(8.0)[None]
    assert sampler.sample(logits.clone(), np.array([0])).token_ids == [3]
    sampler.remove_row(0)
    with pytest.raises(KeyError):
        sampler.params(0)
    sampler.add_row(0, params_of(temperature=0), 0, NONE, NONE)
    assert sampler.sample(logits.clone(), np.array([0])).token_ids == [7]


def test_constraints_that_leave_no_token_fail_alone():
    params = params_of(allowed_token_ids=[2], bad_words_token_ids=[[2]], logprobs=1)
    sampler = sampler_with([(params_of(), 1, (), ()), (params, 1, (), ())], 8)
    alone = sampler_with([(params_of(), 1, (), ())], 8)
    logits = torch.randn(2, 8)
    sampled = sampler.sample(logits.clone(), np.arange(2))
    assert sampled.exhausted == [1]
    assert sampled.logprobs[1] is None
    assert sampled.token_ids[0] == alone.sample(logits[:1].clone(), np.arange(1)).token_ids[0]


# --- log probabilities ---


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprobs_are_the_models_own(k):
    """Of the logits before bias, penalties and temperature; ties in order of token ids."""
    logits = torch.randn(4, 50)
    logits[:, 10:14] = 3.0
    options = {"logit_bias": {11: 100.0}, "temperature": 0.01, "presence_penalty": 1.0}
    sampler = sampler_with([(params_of(logprobs=k, **options), 0, (), [3])] * 4, 50)
    sampled = sampler.sample(logits.clone(), np.arange(4))
    expected = torch.log_softmax(logits.double(), -1)
    for row, entry in enumerate(sampled.logprobs):
        assert entry.token_ids[0] == 11
        order = sorted(range(50), key=lambda t: (-logits[row, t].item(), t))
        assert entry.token_ids[1:] == order[:k]
        assert entry.rank == 1 + int((logits[row] > 3.0).sum())
        np.testing.assert_allclose(entry.logprobs, expected[row, entry.token_ids].numpy(), atol=1e-5)


def test_prompt_logprobs():
    logits = torch.randn(7, 30)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    sampler = sampler_with([(params_of(prompt_logprobs=k), 7, (), ()) for k in (3, 0)], 30)
    entries = sampler.prompt_logprobs(0, logits.clone(), tokens)
    expected = torch.log_softmax(logits.double(), -1)
    for row, entry in enumerate(entries):
        assert entry.token_ids == [tokens[row], *expected[row].topk(3).indices.tolist()]
        np.testing.assert_allclose(entry.logprobs, expected[row, entry.token_ids].numpy(), atol=1e-5)
    assert sampler.prompt_logprobs(1, logits, tokens)[0].token_ids == [3]


# --- one row's bits do not depend on the others ---

MIXES = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"temperature": 0.3, "logprobs": 20},
    {"top_k": 40},
    {"top_k": 3, "logprobs": 1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.1},
    {"top_k": 700, "top_p": 0.95, "min_p": 0.001, "temperature": 0.8},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"presence_penalty": 0.5, "temperature": 0.0, "logprobs": 0},
    {"logit_bias": {5: 3.0, 900: -100.0}},
    {"allowed_token_ids": list(range(0, 1000, 7)), "top_p": 0.5},
    {"bad_words_token_ids": [[3], [4, 5]], "min_tokens": 4},
]


def run(rows, logits, steps=3, batches=None):
    """Token ids and log probabilities of each row over some steps; `batches` groups the rows into calls."""
    sampler = sampler_with(rows, logits.shape[-1], (2,))
    results = [[] for _ in rows]
    for step in range(steps):
        for batch in batches or [list(range(len(rows)))]:
            sampled = sampler.sample(logits[step][batch].clone(), np.array(batch))
            for i, row in enumerate(batch):
                entry = sampled.logprobs[i]
                values = entry and (entry.token_ids, entry.logprobs, entry.rank)
                results[row].append((int(sampled.token_ids[i]), values, i not in sampled.not_finite))
    return results


@pytest.mark.parametrize("vocab", [1000, 1537, 49152])
def test_same_request_same_bits(vocab):
    """Alone, in any batch and order, with any thread count: the same tokens, and log probabilities that are ==."""
    rng = np.random.default_rng(vocab)
    count = 40 if vocab < 2000 else 24
    rows = [
        (params_of(**MIXES[rng.integers(len(MIXES))]), int(rng.integers(2**40)), rng.integers(0, 1000, 20), ())
        for _ in range(count)
    ]
    scales = torch.from_numpy(rng.choice([0.5, 2.0, 5.0], size=(3, count, 1)).astype(np.float32))
    logits = torch.from_numpy(rng.normal(size=(3, count, vocab)).astype(np.float32)) * scales
    together = run(rows, logits)
    assert run(rows, logits, batches=[[row] for row in range(count)]) == together
    order = rng.permutation(count).tolist()
    assert run(rows, logits, batches=[order[:5], order[5:]]) == together
    threads = torch.get_num_threads()
    try:
        for other in (1, 3):
            torch.set_num_threads(other)
            assert run(rows, logits) == together
    finally:
        torch.set_num_threads(threads)


def test_a_preempted_row_goes_on_as_if_nothing_had_happened():
    rows = [(params_of(**mix), 5, [1, 2, 3], ()) for mix in MIXES]
    logits = torch.randn(6, len(rows), 1000) * 2
    whole = run(rows, logits, steps=6)
    first = run(rows, logits, steps=3)
    resumed = [
        (params, seed, prompt, [token for token, _, _ in first[i]]) for i, (params, seed, prompt, _) in enumerate(rows)
    ]
    assert run(resumed, logits[3:], steps=3) == [row[3:] for row in whole]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("mix", MIXES)
def test_non_finite_logits_fail_alone(bad, mix):
    rows = [(params_of(**mix), 1, (), ()), (params_of(**mix), 2, (), ()), (params_of(**mix), 3, (), ())]
    logits = torch.randn(1, 3, 1000)
    expected = run(rows, logits, steps=1)
    logits[0, 1, 17] = bad
    found = run(rows, logits, steps=1)
    assert [row[0][2] for row in found] == [True, False, True]
    assert (found[0], found[2]) == (expected[0], expected[2])


def test_minus_infinity_is_never_drawn_and_no_fault():
    logits = torch.full((1, 1, 600), -torch.inf)
    logits[0, 0, [5, 300]] = torch.tensor([1.0, 2.0])
    for mix in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 0.01}, {"temperature": 0.0}):
        ((token, _, finite),) = run([(params_of(**mix), 3, (), ())], logits, steps=1)[0]
        assert finite
        assert token in (5, 300)


def test_children_of_one_request_draw_apart():
    seeds = [sequence_seed(11, i) for i in range(64)]
    assert len(set(seeds)) == 64
    assert seeds[0] == 11
    logits = torch.zeros(1, 1, 1000).expand(1, 64, 1000)
    tokens = {row[0][0] for row in run([(params_of(), seed, (), ()) for seed in seeds], logits, steps=1)}
    assert len(tokens) > 40


def test_uniform_numbers_are_uniform_and_fixed():
    """Fixed: a seed draws the same in every version. Uniform: over a seed's positions, and over neighbouring seeds."""
    assert uniform(np.array([0, 1, 2**64 - 1], np.uint64), np.array([0, 0, 5])).tolist() == FIXED
    for seeds, positions in ((np.zeros(10_000), np.arange(10_000)), (np.arange(10_000), np.zeros(10_000))):
        u = uniform(seeds.astype(np.uint64), positions.astype(np.int64))
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, 100, (0, 1))[0]
        assert ((counts - 100) ** 2 / 100).sum() < 149  # 99.9 % quantile of chi-squared with 99 degrees of freedom
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.04


FIXED = [0.6524484863740322, 0.36818951565166946, 0.15403342580516755]


def test_an_end_of_sequence_token_outside_the_vocabulary_touches_no_other_row():
    """Configurations name such ids; where min_tokens forbids them, row 0's would lie in row 1."""
    vocab = 8
    held_back = params_of(temperature=0.0, min_tokens=2)
    sampler = sampler_with([(held_back, 1, (), ()), (params_of(temperature=0.0), 1, (), ())], vocab, eos=(2, vocab + 5))
    logits = torch.zeros(2, vocab)
    logits[0, 2], logits[:, 5] = 9.0, 3.0
    assert sampler.sample(logits, np.arange(2)).token_ids == [5, 5]


def test_penalties_count_every_token_of_a_long_answer():
    """More distinct tokens than the counts have room for at first; told at once, as after preemption, or one by one."""
    params = params_of(temperature=0.0, frequency_penalty=1.0)
    tokens = [i * i % 499 for i in range(400)]
    sampler = sampler_with([(params, 1, (), tokens[:10]), (params, 1, (), tokens)], 500)
    for token in tokens[10:]:
        logits = torch.zeros(1, 500)
        logits[0, token] = 1000.0
        assert sampler.sample(logits, np.zeros(1, np.int64)).token_ids == [token]
    expected = -np.bincount(tokens, minlength=500).astype(np.float32)
    logits = torch.zeros(2, 500)
    sampler.sample(logits, np.arange(2))
    np.testing.assert_array_equal(logits.numpy(), [expected, expected])


def test_rows_that_need_only_their_likeliest_token():
    greedy = SamplingParams(temperature=0.0)
    needs_more = [
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=0.0, logprobs=0),
        SamplingParams(temperature=0.0, repetition_penalty=1.1),
        SamplingParams(temperature=0.0, min_tokens=3),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
        SamplingParams(temperature=0.0, allowed_token_ids=[1]),
    ]
    sampler = sampler_with([(params, 7, (), ()) for params in [greedy, *needs_more, greedy]], 40, eos=[2])
    last = len(needs_more) + 1
    assert sampler.only_argmax(np.array([0, last]))
    for row in range(1, last):
        assert not sampler.only_argmax(np.array([0, row, last])), needs_more[row - 1]


def test_likeliest_tokens_are_taken_as_if_sampled(passes):
    rows = [(SamplingParams(temperature=0.0), 7, (), ())] * 5
    logits = np.random.default_rng(3).normal(size=(5, 40)).astype(np.float32)
    logits[1, 4], logits[3] = np.nan, -np.inf
    logits = torch.from_numpy(logits)
    whole, short = sampler_with(rows, 40), sampler_with(rows, 40)
    places = np.array([4, 0, 3, 1, 2])
    sampled = whole.sample(logits.clone(), places)
    taken = short.take_argmax(passes.choose(logits, np.arange(5), Choices.argmax(5)), places)
    assert [taken.token_ids[i] for i in (0, 2, 4)] == [sampled.token_ids[i] for i in (0, 2, 4)]
    assert taken.not_finite == sampled.not_finite == [1, 3]
    assert taken.exhausted == sampled.exhausted == []
    assert taken.logprobs == sampled.logprobs


@pytest.mark.parametrize("vocab", [5, 64, 1000])
def test_masks_forbid_what_their_bits_do_not_have(passes, vocab):
    generator = np.random.default_rng(vocab)
    allows = generator.random((6, vocab)) < [[0], [0.01], [0.5], [0.9], [1], [0.5]]
    padded = np.concatenate((allows, generator.random((6, -vocab % 32)) < 0.5), axis=1)
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.uint32)
    logits = torch.from_numpy(generator.normal(size=(9, vocab)).astype(np.float32))
    logits[3, 0] = torch.nan
    places, rows = np.array([8, 3, 0, 5]), np.array([2, 3, 0, 2])
    expected = logits.numpy().copy()
    expected[places] = np.where(allows[rows], expected[places], -np.inf)
    passes.mask(logits, places, bits, rows)
    np.testing.assert_array_equal(logits.numpy(), expected)
