"""Holds what the tests of drafts from the device share: a load, and a drafter that asks for drafts wherever it can."""

from __future__ import annotations

import random

import pytest
from drive import Run, request

from pagemill.sampling.params import SamplingParams

VOCAB = 160


def of_pools(tiny: str) -> pytest.MarkDecorator:
    """Runs a test with pools and steps of several sizes. tiny: the memory of a pool in which sequences are
    preempted."""
    settings = {
        "all at once": {},
        "small steps": {"max_num_batched_tokens": 24, "num_threads": 1},
        "a tiny pool": {"kv_memory": tiny, "enable_prefix_caching": False},
        "a tiny pool over host memory": {"kv_memory": tiny, "kv_host_memory": "1MiB", "preemption_mode": "swap"},
    }
    return pytest.mark.parametrize("settings", [*settings.values()], ids=[*settings])


def text(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(3, VOCAB) for at in range(length)]


LOAD = [
    request(name, prompt, SamplingParams(ignore_eos=True, **params))
    for name, prompt, params in [
        ("greedy", text(1, 45), {"temperature": 0.0, "max_tokens": 60}),
        ("seeded", text(1, 40) + text(2, 9), {"temperature": 1.0, "seed": 7, "max_tokens": 30}),
        ("filtered", text(3, 30), {"temperature": 1.1, "top_p": 0.8, "top_k": 40, "seed": 8, "max_tokens": 25}),
        ("forked", text(4, 35), {"temperature": 0.9, "n": 3, "seed": 10, "max_tokens": 20}),
        ("greedy logprobs", text(5, 17), {"temperature": 0.0, "logprobs": 2, "max_tokens": 24}),
        (
            "everything",
            text(6, 50),
            {
                "temperature": 1.2,
                "n": 2,
                "seed": 12,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.6,
                "frequency_penalty": 0.4,
                "logit_bias": {17: 2.0},
                "bad_words_token_ids": [[20], [30, 31]],
                "min_tokens": 8,
                "stop_token_ids": [40, 41],
                "logprobs": 3,
                "prompt_logprobs": 2,
                "max_tokens": 40,
            },
        ),
    ]
]


def assert_same(run: Run, expected: Run) -> None:
    assert run.tokens == expected.tokens
    assert run.logprobs == expected.logprobs
    assert {key: last.finish_reason for key, last in run.last.items()} == {
        key: last.finish_reason for key, last in expected.last.items()
    }
