"""The floor is computed from the work that the engine really does."""

import pytest
import torch
from benchmarks.peers.adapters.pagemill_engine import Engine
from benchmarks.peers.workloads import make, tokenize
from benchmarks.roofline import Arithmetic, Ceilings, Model, Recorder, Step, run_workload
from transformers import AutoModelForCausalLM, LlamaConfig

from harness import load_on
from pagemill.hub import resolve_model


@pytest.fixture(scope="module")
def engine():
    made = Engine(
        {"gguf": str(resolve_model("smollm2-135m"))},
        {"kv_memory": "64MiB", "max_model_len": 1024, "dtype": "float32", "target_tpot_ms": "off"},
    )
    yield made
    made.core.close()


def test_floor_of_one_step(engine):
    model = Model.of(engine.core.executor.decoder, torch.float32, held=False)
    # 30 layers of hidden 576: query and output 576, key and value 192 each, three products with 1536.
    assert model.layer_parameters == 30 * 576 * (2 * 576 + 2 * 192 + 3 * 1536)
    assert model.head_parameters == 576 * 49152
    assert (model.layer_bytes, model.head_bytes) == (4 * model.layer_parameters, 4 * model.head_parameters)
    ceilings = Ceilings(1e9, 4e9, {"float32": 1e12, "int8": 5e12})
    in_float32, quantized = Arithmetic("float32", "float32"), Arithmetic("int8", "float32")
    decode = Step(tokens=1, logits=1, attended=30 * 100, kv_tokens=30 * 100)
    bound_by_reading = (model.layer_bytes + model.head_bytes) / 4e9 + 30 * 100 * 2 * 192 * 4 / 1e9
    assert model.floor_s(decode, ceilings, in_float32) == pytest.approx(bound_by_reading)
    prefill = Step(tokens=10000, logits=0, attended=30 * 10000, kv_tokens=0)
    layers, attention = 2 * 10000 * model.layer_parameters, 4 * 576 * 30 * 10000
    assert model.floor_s(prefill, ceilings, in_float32) == pytest.approx((layers + attention) / 1e12)
    assert model.floor_s(prefill, ceilings, quantized) == pytest.approx(layers / 5e12 + attention / 1e12)


def test_bytes_of_weights_that_are_held_in_16_bits(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    decoder = load_on("cpu", tmp_path, dtype="float32", max_model_len=64).decoder
    counted, held = (Model.of(decoder, torch.float32, held=held) for held in (False, True))
    layers, head = 2 * 64 * (4 * 64 + 3 * 96), 64 * 64
    assert (counted.layer_bytes, counted.head_bytes) == (4 * layers, 4 * head)
    whole_pages = 2 * 4 * 4096
    assert 2 * layers <= held.layer_bytes <= 2 * layers + whole_pages
    assert 2 * head <= held.head_bytes < 2 * head + 4096


def test_recorded_steps_are_the_workloads_work(engine):
    workload = make("tiny", tokenize("smollm2-135m"))
    recorder = Recorder(engine.core)
    wall, steps = run_workload(engine, recorder, workload)
    parts = recorder.parts(wall)
    assert sum(parts.values()) == pytest.approx(wall)
    assert min(parts.values()) >= 0, parts
    assert min(parts[name] for name in ("attention", "head", "engine")) > 0, parts
    # Many rows take an MLP as one operator, few as three. Greedy tokens come from the head.
    assert parts["mlp"] > 0
    assert parts["down"] > 0
    assert parts["sampler"] == 0
    # The shared 16-token prefix is one block, computed once; the last token of each answer is never fed back.
    computed = workload.prompt_tokens - 3 * 16 + workload.output_tokens - 4
    assert sum(step.tokens for step in steps) == computed
    assert sum(step.logits for step in steps) == workload.output_tokens
    last = steps[-1]
    # The sequence that computed the prefix is a step ahead, so three of 40 + 7 tokens attend last, 16 of them the same.
    assert last == Step(tokens=3, logits=3, attended=30 * 3 * 47, kv_tokens=30 * (16 + 3 * 31))
