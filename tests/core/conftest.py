"""Engines on the real model. Weights are loaded once per precision and shared: an engine never changes them."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
from tests.late_executor import LateExecutor

from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.executor import load_drafting, share
from pagemill.executor.load import open_executor
from pagemill.hub import resolve_model
from pagemill.models.loading import LoadedModel
from pagemill.text.tokenizer import Tokenizer
from shallow import FRAME_BYTES

MODEL = "smollm2-135m"
PROMPTS = Path(__file__).parents[1] / "data" / "prompts.txt"


@pytest.fixture(scope="session")
def model_path() -> Path:
    return resolve_model(MODEL)


@pytest.fixture(scope="session")
def tokenizer(model_path):
    return Tokenizer.from_path(model_path)


@pytest.fixture(scope="session")
def prompts(tokenizer) -> list[list[int]]:
    texts = [line.replace("\\n", "\n") for line in PROMPTS.read_text().splitlines()]
    return [tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="session")
def make_engine_of():
    """make_engine_of(model, peering, publishes, late, own_memory, **settings) -> EngineCore; invariants are checked
    after every step. late: steps overlap. own_memory: the device says that its memory is not the host's."""
    load_model = share.load_model
    kept: dict[str, LoadedModel] = {}

    def load_shared(path, *, dtype, quantization, max_model_len, **settings):
        key = f"{path} {dtype} {quantization} {settings['ops'].name}"
        if key not in kept:
            kept[key] = load_model(path, dtype=dtype, quantization=quantization, **settings)
        return replace(kept[key], max_model_len=max_model_len or kept[key].max_model_len)

    def make(model, peering=None, publishes=False, late=False, own_memory=False, **settings) -> EngineCore:
        settings = {"max_model_len": 1024, "max_num_seqs": 16, "dtype": "float32", "kv_memory": "256MiB"} | settings
        settings.setdefault("speculative_config", "off")  # so that steps have the tokens that a test expects
        with ExitStack() as patches:  # tests in other folders load for themselves
            for module in (share, load_drafting):
                patches.enter_context(mock.patch.object(module, "load_model", load_shared))
            config = EngineConfig(model=model, check_invariants=True, **settings)
            executor = LateExecutor(open_executor(config)) if late else open_executor(config)
            executor.facts = replace(executor.facts, has_own_memory=own_memory)
            return EngineCore(config, executor=executor, publishes=publishes, peering=peering)

    return make


@pytest.fixture(scope="module")
def make_engine(request, make_engine_of):
    """The same on the real model; in a file that is marked `shallow`, on its first layers."""
    if request.node.get_closest_marker("shallow"):
        return partial(make_engine_of, str(request.getfixturevalue("shallow_path")), kv_memory=360 * FRAME_BYTES)
    return partial(make_engine_of, MODEL)


@pytest.fixture(scope="module", autouse=True)
def no_engines_left():
    """Frees the engines of a file in its end: several gigabytes would gather before Python does it by itself."""
    yield
    gc.collect()
