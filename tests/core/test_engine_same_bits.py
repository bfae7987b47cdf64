"""Same request, same bits: on CPU, what runs beside a request and how it is cut up change no bit of its logits."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from drive import Run, drive, request

from pagemill.sampling.params import SamplingParams
from shallow import FRAME_BYTES, LAYERS

pytestmark = pytest.mark.shallow
FORMATS = {
    "float32": ({"dtype": "float32"}, FRAME_BYTES),
    "bfloat16": ({"dtype": "bfloat16"}, FRAME_BYTES // 2),
    "gguf": ({"dtype": "bfloat16", "quantization": "gguf"}, FRAME_BYTES // 2),
    "int8 cache": ({"dtype": "float32", "kv_cache_dtype": "int8"}, LAYERS * 2 * 3 * (64 + 4) * 16),
    "int4 cache": ({"dtype": "bfloat16", "kv_cache_dtype": "int4"}, LAYERS * 3 * (64 + 12) * 16),
    "mixed cache": ({"dtype": "bfloat16", "kv_cache_dtype": "int4_mixed"}, LAYERS * 3 * (64 + 12) * 16 * 3 // 2),
    "fp8 cache": ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, FRAME_BYTES // 4),
}
"""Settings, and the bytes of a block; of the mixed cache, with a share of the blocks of remainders."""
TOGETHER = {
    "together": {"max_num_batched_tokens": 512},
    "small chunks": {"max_num_batched_tokens": 37, "max_num_seqs": 5},
    "one thread": {"max_num_batched_tokens": 160, "num_threads": 1},
    "no sharing": {"enable_prefix_caching": False, "max_num_batched_tokens": 100},
}
"""Settings by which requests share steps in different ways."""


def crossed(name, ways, quick):
    """Tests every format with every way; pairs that are not `quick` are slow."""
    return pytest.mark.parametrize(
        ("alone", name),
        [
            pytest.param(kind, way, marks=() if (kind, way) in quick else pytest.mark.slow, id=f"{kind}-{way}")
            for kind in FORMATS
            for way in ways
        ],
        indirect=["alone"],
    )


def formats(*quick):
    """Tests every format; those that are not `quick` are slow."""
    every = [pytest.param(kind, marks=() if kind in quick else pytest.mark.slow) for kind in FORMATS]
    return pytest.mark.parametrize("alone", every, indirect=True)


@pytest.fixture(scope="module")
def load(prompts):
    """Requests of many kinds: greedy and seeded, forked, of 3 to 330 prompt tokens, some with a common prefix."""
    rng = random.Random(5)
    joined = [token for prompt in prompts for token in prompt]
    shared = joined[:100]
    cases = [
        ("greedy-short", prompts[0], SamplingParams(temperature=0.0, max_tokens=12)),
        ("greedy-long", joined[:330], SamplingParams(temperature=0.0, max_tokens=16)),
        ("seeded", prompts[4], SamplingParams(temperature=0.9, seed=7, max_tokens=16)),
        ("filtered", joined[50:230], SamplingParams(temperature=1.3, top_p=0.8, top_k=40, seed=8, max_tokens=14)),
        ("penalised", prompts[9], SamplingParams(temperature=0.7, repetition_penalty=1.3, seed=9, max_tokens=16)),
        ("forked", [*shared, *prompts[3]], SamplingParams(temperature=1.0, n=3, seed=10, max_tokens=14)),
        ("sharing", [*shared, *prompts[2]], SamplingParams(temperature=1.0, min_p=0.05, seed=11, max_tokens=14)),
        (
            "everything",
            joined[20:90],
            SamplingParams(
                temperature=4.0,
                n=2,
                seed=12,
                presence_penalty=0.6,
                frequency_penalty=0.4,
                logit_bias={prompts[0][0]: 2.0},
                bad_words_token_ids=[prompts[1][:1], prompts[2][:2]],
                logprobs=3,
                prompt_logprobs=2,
                max_tokens=80,
            ),
        ),
        ("prefix", [*shared, *rng.sample(joined, 60)], SamplingParams(temperature=0.0, max_tokens=12)),
    ]
    for _, _, params in cases:
        params.ignore_eos = True
    return [request(name, prompt, params) for name, prompt, params in cases]


@pytest.fixture(scope="module")
def runs_alone(load, make_engine):
    """Gives what every request brings on its own in a format, without the prefix cache; it is computed once."""

    @cache
    def run(name: str) -> Run:
        core = make_engine(**FORMATS[name][0], enable_prefix_caching=False)
        runs = [drive(core, [one], record=True) for one in load]
        tokens = {key: value for run in runs for key, value in run.tokens.items()}
        logits = {key: value for run in runs for key, value in run.logits.items()}
        assert len(set(tokens["everything", 0])) > 64, "penalties are to count many different tokens"
        logprobs = {key: value for run in runs for key, value in run.logprobs.items()}
        return Run(tokens, logits=logits, logprobs=logprobs)

    return run


@pytest.fixture
def alone(request, runs_alone):
    """Every request on its own: (name of the format, expected)."""
    return request.param, runs_alone(request.param)


def assert_same(run: Run, alone: Run) -> None:
    assert run.tokens == alone.tokens
    assert run.logprobs == alone.logprobs
    assert run.logits.keys() == alone.logits.keys()
    for key, logits in run.logits.items():
        assert torch.equal(logits, alone.logits[key]), f"other bits at {key}"


@crossed(
    "way",
    TOGETHER,
    quick={
        *(("float32", way) for way in TOGETHER),
        ("bfloat16", "small chunks"),
        ("gguf", "one thread"),
        ("int8 cache", "together"),
        ("mixed cache", "small chunks"),
        ("fp8 cache", "together"),
    },
)
def test_any_batch_gives_the_same_bits(alone, way, load, make_engine):
    name, expected = alone
    core = make_engine(**FORMATS[name][0], **TOGETHER[way])
    assert_same(drive(core, load, every=2, record=True), expected)


@formats(*FORMATS.keys() - {"int4 cache", "fp8 cache"})
def test_greedy_requests_by_themselves_get_the_same_tokens(alone, load, make_engine, monkeypatch):
    """Then no logits are written: the head's sums give the tokens."""
    name, expected = alone
    core = make_engine(**FORMATS[name][0])
    monkeypatch.setattr(core.executor.decoder, "logits", None)
    greedy = [one for one in load if one.request_id in ("greedy-short", "greedy-long", "prefix")]
    run = drive(core, greedy)
    assert run.tokens == {(one.request_id, 0): expected.tokens[one.request_id, 0] for one in greedy}


@formats("float32", "int8 cache", "mixed cache")
def test_prefix_hits_give_the_same_bits(alone, load, make_engine):
    name, expected = alone
    core = make_engine(**FORMATS[name][0])
    drive(core, load)
    again = drive(core, load, record=True)
    assert all(count > 0 for name, count in again.cached.items() if name not in ("greedy-short", "everything"))
    assert again.cached["greedy-long"] == 329  # all but the last prompt token
    assert_same(again, expected)


@formats("bfloat16", "gguf", "mixed cache")
def test_preemption_gives_the_same_bits(alone, load, make_engine):
    name, expected = alone
    settings, frame_bytes = FORMATS[name]
    core = make_engine(
        **settings,
        kv_memory=26 * frame_bytes,
        max_model_len=352,
        max_num_batched_tokens=64,
        target_tpot_ms="off",
    )
    run = drive(core, load, record=True)
    assert core.stats().preemptions > 0
    assert_same(run, expected)


@crossed("seed", range(3), quick={("float32", 0), ("gguf", 1), ("int8 cache", 2)})
def test_random_mixes_give_the_same_bits(alone, load, make_engine, seed):
    name, expected = alone
    rng = random.Random(seed)
    core = make_engine(
        **FORMATS[name][0],
        max_num_batched_tokens=rng.randint(16, 200),
        max_num_seqs=rng.randint(3, 12),
        num_threads=rng.choice([1, 2]),
        kv_memory=rng.randint(30, 80) * FRAME_BYTES,
        max_model_len=352,
        eviction_policy=("lru", "lfu", "cost")[seed],
    )
    order = rng.sample(load, len(load))
    assert_same(drive(core, order, every=rng.randint(0, 4), record=True), expected)
