"""The C++ executor has the bits of the torch executor on the same operators: same weights, same steps."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from random_models import CASES, SIZES
from safetensors.torch import load_file, save_file

from harness import PagedSequences, load_on
from kernel_settings import kernels_of
from pagemill import _kernels
from pagemill.models.cpu_decoder import CpuDecoder
from pagemill.models.decoder import Decoder, Experts

BY_NAME = {case.name: case for case in CASES}
LATENT = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
DENSE = [case.name for case in CASES if case.name not in ("mixtral", "qwen3-moe", *LATENT)]


def load(case, folder, dtype="float32"):
    return load_on("cpu", folder, dtype=dtype, max_model_len=case.max_model_len).decoder


@pytest.fixture(params=DENSE)
def case(request, tmp_path):
    BY_NAME[request.param].save(tmp_path)
    return BY_NAME[request.param]


def hidden_states(forward, decoder, steps, prompts, kv_dtype=None):
    """Of every step in `steps`, run by `forward` on a pool of its own."""
    sequences = PagedSequences(decoder, prompts, kv_dtype=kv_dtype, seed=3)
    found = []
    for work in steps:
        token_ids, batch = sequences.batch(work)
        found.append(forward(decoder, token_ids, batch, sequences.pool))
        for row, count in work:
            sequences.done[row] += count
            sequences.release(row)
    return found


def steps_of(prompts):
    """Prefill, chunks and single tokens in one batch, in changing order, until all prompts are through."""
    done, steps, counts = [0] * len(prompts), [], (1, 30, 1, 7, 2, 16, 1)
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        rows = [row for row in range(len(prompts)) if done[row] < len(prompts[row])]
        rows = rows[::-1] if len(steps) % 2 else rows
        rows = rows if len(steps) % 3 else rows[:1]
        work = [(r, min(len(prompts[r]) - done[r], counts[(len(steps) + i) % 7])) for i, r in enumerate(rows)]
        for row, count in work:
            done[row] += count
        steps.append(work)
    return steps


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", None), ("bfloat16", None), ("float16", None), ("float32", torch.int8), ("bfloat16", torch.int8)],
)
def test_bits(case, dtype, kv_dtype, tmp_path):
    decoder = load(case, tmp_path, dtype)
    assert type(decoder) is CpuDecoder
    prompts = case.prompts()
    for steps in (steps_of(prompts), [[(row, len(prompt)) for row, prompt in enumerate(prompts)]]):
        ours = hidden_states(CpuDecoder.forward, decoder, steps, prompts, kv_dtype)
        theirs = hidden_states(Decoder.forward, decoder, steps, prompts, kv_dtype)
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype == decoder.dtype
            assert torch.equal(a, b)
            assert bool(a.isfinite().all())


@pytest.mark.parametrize(
    ("name", "hidden", "intermediate", "lengths"),
    [
        ("gemma3", 72, 90, (33, 9, 1)),
        ("gemma3", 200, 90, (33, 9, 1)),
        ("gemma3", 640, 128, (270, 20)),
        ("llama-bias", 640, 1536, (270, 20)),
    ],
)
def test_bits_at_odd_sizes(name, hidden, intermediate, lengths, tmp_path):
    """Sizes that are no multiple of a vector, heads whose halves are none; weights and rows in several pieces."""
    case = BY_NAME[name]
    odd = {"hidden_size": hidden, "intermediate_size": intermediate, "head_dim": 40}
    changed = type(case)(case.name, case.model_type, {**case.settings, **odd}, {}, lengths=lengths)
    changed.save(tmp_path)
    decoder = load(changed, tmp_path)
    prompts = changed.prompts()
    for steps in (steps_of(prompts), [list(enumerate(lengths))]):
        ours = hidden_states(CpuDecoder.forward, decoder, steps, prompts)
        for a, b in zip(ours, hidden_states(Decoder.forward, decoder, steps, prompts), strict=True):
            assert torch.equal(a, b)


def linears(decoder):
    for layer in decoder.weights.layers:
        mlps = layer.mlp.experts if isinstance(layer.mlp, Experts) else (layer.mlp,)
        yield from (layer.qkv, layer.o, *(part for mlp in mlps for part in (mlp.gate_up, mlp.down)))
    yield decoder.weights.lm_head


def save_as(folder, kinds):
    """Tensors rounded to the dtype of the first name that is in theirs, in a folder as such and in one as float32."""
    rounded = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        rounded[name] = tensor.to(next((kind for part, kind in kinds.items() if part in name), torch.float32))
    for kept in ("narrow", "wide"):
        shutil.copytree(folder, folder / kept, ignore=shutil.ignore_patterns("narrow", "wide"))
        tensors = {name: each if kept == "narrow" else each.float() for name, each in rounded.items()}
        save_file(tensors, folder / kept / "model.safetensors", {"format": "pt"})
    return folder / "narrow", folder / "wide"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_float32_keeps_narrow_weights_as_they_are_stored(name, dtype, tmp_path):
    case = BY_NAME[name]
    case.save(tmp_path)
    narrow, wide = (load(case, folder) for folder in save_as(tmp_path, {"": dtype}))
    assert narrow.dtype == torch.float32
    for held, widened in zip(linears(narrow), linears(wide), strict=True):
        assert held.dtype == dtype
        assert widened.dtype == torch.float32
    for steps in (steps_of(case.prompts()), [[(row, len(prompt)) for row, prompt in enumerate(case.prompts())]]):
        runs = [(type(wide), wide), (type(narrow), narrow), (Decoder, narrow)]
        found = [hidden_states(kind.forward, decoder, steps, case.prompts()) for kind, decoder in runs]
        for a, b, c in zip(*found, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)
            assert torch.equal(wide.logits(a), narrow.logits(b))


@pytest.mark.parametrize("isa", _kernels.available_isas())
def test_narrow_weights_of_several_pieces(isa, tmp_path):
    """Rows and weights in several pieces, on every instruction set: the MLP as one operator and as three."""
    case = BY_NAME["llama-bias"]
    sizes = {"hidden_size": 640, "intermediate_size": 1536, "head_dim": 40, "num_hidden_layers": 2}
    case = dataclasses.replace(case, settings=case.settings | sizes, lengths=(270, 20))
    case.save(tmp_path)
    kinds = {"down_proj": torch.float16, "": torch.bfloat16}
    steps = steps_of(case.prompts())
    with kernels_of(isa, 2):
        narrow, wide = (load(case, folder) for folder in save_as(tmp_path, kinds))
        ours, theirs = (hidden_states(CpuDecoder.forward, decoder, steps, case.prompts()) for decoder in (narrow, wide))
        assert narrow.operator_seconds()["mlp"] > 0
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_joined_weights_that_are_stored_differently_are_held_in_float32(tmp_path):
    case = BY_NAME["llama3"]
    case.save(tmp_path)
    kinds = {"q_proj": torch.float16, "gate_proj": torch.float32, "_proj": torch.bfloat16}
    narrow, wide = (load(case, folder) for folder in save_as(tmp_path, kinds))
    layer = narrow.weights.layers[0]
    held = [linear.dtype for linear in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
    assert held == [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16]
    steps = steps_of(case.prompts())
    ours, theirs = (hidden_states(CpuDecoder.forward, decoder, steps, case.prompts()) for decoder in (narrow, wide))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


def test_experts_run_on_torch(tmp_path):
    BY_NAME["mixtral"].save(tmp_path)
    assert type(load(BY_NAME["mixtral"], tmp_path)) is Decoder


def test_token_outside_the_vocabulary(tmp_path):
    case = BY_NAME["mistral"]
    case.save(tmp_path)
    decoder = load(case, tmp_path)
    for wrong in (-1, SIZES["vocab_size"]):
        sequences = PagedSequences(decoder, [[5, wrong, 7]])
        token_ids, batch = sequences.batch([(0, 3)])
        with pytest.raises(IndexError, match=f"token id {wrong} is not in 0 .. {SIZES['vocab_size'] - 1}"):
            decoder.forward(token_ids, batch, sequences.pool)
        assert bool(sequences.pool.storage.isnan().all())  # nothing was written
    sequences = PagedSequences(decoder, [[5, 6, 7]])
    token_ids, batch = sequences.batch([(0, 3)])
    with pytest.raises(ValueError, match="positions must be contiguous"):
        decoder.forward(token_ids[:2], batch, sequences.pool)
