"""The executor on a GPU, where there is one: the real model's greedy tokens, with graphs and without."""

from __future__ import annotations

import pytest
import torch
from test_real_model import GREEDY, SETTINGS, TEXTS

from core.drive import drive, request
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.sampling.params import SamplingParams
from pagemill.text.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def run_on(device: str, params: SamplingParams, **settings):
    config = EngineConfig(**SETTINGS | {"kv_memory": "32MiB"}, device=device, **settings)
    tokenizer = Tokenizer.load(config)
    core = EngineCore(config)
    run = drive(core, [request(f"r{i}", tokenizer.encode(text), params) for i, text in enumerate(TEXTS)])
    core.close()
    return run.tokens


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_greedy_tokens_are_those_of_the_cpu(enforce_eager):
    assert run_on("cuda", GREEDY, enforce_eager=enforce_eager) == run_on("cpu", GREEDY)


def test_tokens_drawn_by_seed_come_again():
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=16, ignore_eos=True)
    assert run_on("cuda", params) == run_on("cuda", params)
