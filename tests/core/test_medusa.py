"""Medusa heads change no bit, and their drafts are what the heads say of the model's hidden states."""

from __future__ import annotations

import json

import pytest
import torch
from benchmarks.draft_pair import save_pair
from benchmarks.trained_heads import save_heads
from drafted import LOAD, VOCAB, assert_same, of_pools, text
from drive import drive, request
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import AutoModelForCausalLM

from eager_drafter import MOST, Eager
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import ConfigError, CorruptWeightsError, ModelNotFoundError, UnsupportedModelError
from pagemill.executor.backend import select_backend
from pagemill.executor.verification import drafts_of
from pagemill.models.loading.medusa import load_medusa
from pagemill.sampling.params import SamplingParams

HIDDEN = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("medusa"), draft_layers=0, later=0.2, **SIZES)[0]


@pytest.fixture(scope="module")
def reference(model):
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def heads(model, reference, tmp_path_factory):
    prompts = torch.tensor([text(seed, 12) for seed in range(40)])
    written = reference.generate(prompts, max_new_tokens=60, do_sample=False, pad_token_id=0, min_new_tokens=60)
    return save_heads(tmp_path_factory.mktemp("heads"), reference, written, heads=MOST, steps=150)


@pytest.fixture(scope="module")
def make(model, heads):
    def make(heads=heads, most=None, **settings) -> EngineCore:
        usual = {"dtype": "float32", "block_size": 8, "kv_memory": "8MiB", "max_num_seqs": 12, "target_tpot_ms": "off"}
        settings = usual | settings
        if heads is not None:
            settings["speculative_config"] = {"method": "medusa", "model": heads, "num_speculative_tokens": most}
        return EngineCore(EngineConfig(model=str(model), max_model_len=160, check_invariants=True, **settings))

    return make


@pytest.fixture(scope="module")
def plain(make):
    return drive(make(heads=None), LOAD)


def test_a_step_that_fails_behind_its_samples_runs_again_with_the_same(make, plain, monkeypatch):
    """As a whole, and a part of it that begins with a branch, whose sequence's own sample is in the part before it."""
    core, failed = make(max_num_seqs=24), []
    core.scheduler.drafter = Eager(branches=5)
    note_step = core.executor.draft.note_step

    def fail_at_times(plan, inputs, hidden, tokens):
        within = bool(plan.branches[:1].any())
        if (plan.step, within) not in failed and (within or plan.step % 3 == 0) and len(plan.rows) > 1:
            failed.append((plan.step, within))
            raise torch.OutOfMemoryError("no memory for hidden states")
        note_step(plan, inputs, hidden, tokens)

    monkeypatch.setattr(core.executor.draft, "note_step", fail_at_times)
    assert_same(drive(core, LOAD, every=2), plain)
    assert len(failed) > 8
    assert sum(within for _, within in failed) > 2


@pytest.mark.parametrize("branches", [0, 6], ids=["chains", "trees"])
@of_pools("320KiB")
def test_heads_change_no_bit(make, plain, settings, branches):
    core = make(**settings | {"max_num_seqs": 24})
    core.scheduler.drafter = Eager(branches=branches)
    assert_same(drive(core, LOAD, every=2), plain)
    stats = core.stats()
    assert stats.draft_tokens > 100
    assert stats.accepted_tokens > (0.03 if branches else 0.08) * stats.draft_tokens
    assert core.scheduler.drafter.branched > 0 or not branches
    assert stats.preemptions or "kv_memory" not in settings


@pytest.mark.parametrize("settings", [{"kv_cache_dtype": "int4"}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_heads_change_no_bit_in_narrow_formats(make, settings, caplog):
    """Blocks of any format do: the heads have no keys. Of a format that costs quality, each engine says so once."""
    expected = drive(make(heads=None, **settings), LOAD[:3])
    core = make(**settings)
    assert caplog.text.count("the KV format int4 costs quality") == (2 if "kv_cache_dtype" in settings else 0)
    core.scheduler.drafter = Eager(branches=2)
    assert_same(drive(core, LOAD[:3]), expected)
    assert core.stats().accepted_tokens > 10


def test_what_is_measured_to_pay_changes_no_bit(make, plain):
    assert_same(drive(make(most=2), LOAD), plain)


def test_greedy_drafts_are_what_the_heads_say(make, heads, reference):
    weights = {name: tensor.double() for name, tensor in load_file(heads / "model.safetensors").items()}
    core, seen = make(), []
    core.scheduler.drafter = Eager(share=1.0, branches=2)
    propose = core.executor.draft.propose

    def watching(plan):
        asked = drafts_of(plan)
        found, undrafted, work = propose(plan)
        for at, to, path, drafts in zip(found.sample_from, found.sample_to, asked, drafts_of(found), strict=True):
            if not drafts:
                continue
            tokens = core.executor.rows.tokens[to, : int(found.starts[at])].tolist()
            with torch.no_grad():
                state = reference.base_model(torch.tensor([tokens])).last_hidden_state[0, -1].double()
            for head, draft in enumerate(drafts):
                block = weights[f"blocks.{head}.layers.0.weight"]
                logits = weights["lm_heads.0.weight"] @ (state + silu(block @ state))
                ranked = logits.sort(descending=True).values
                assert abs(logits[draft] - ranked[-1 - path[head]]) <= 1e-4
                seen.append(path[head])
        return found, undrafted, work

    core.executor.draft.propose = watching
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drive(core, [request(str(seed), text(seed, 20 + seed), params) for seed in range(4)])
    assert seen.count(-1) > 100
    assert min(seen) < -2


def renamed(name: str) -> str:
    """The name of a tensor where Medusa's own training has made the heads."""
    kind, head, *more = name.split(".")
    return f"{head}.{more[1]}.linear.weight" if kind == "blocks" else f"{head}.1.weight"


@pytest.fixture
def load(model, make, heads):
    core = make(heads=None)
    decoder, ops = core.executor.decoder, select_backend("cpu", None).ops

    def load(folder, quantization=None):
        return load_medusa(folder, decoder.spec, ops, torch.float32, torch.device("cpu"), quantization)

    return load


def saved(folder, weights, **config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "medusa"} | config))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_all_forms_of_a_checkpoint_give_the_same_heads(load, heads, tmp_path):
    weights, hidden = load_file(heads / "model.safetensors"), torch.randn(5, HIDDEN)
    expected = [load(heads).logits(head, hidden) for head in range(MOST)]
    last = weights.pop("lm_heads.0.weight")
    own = {f"lm_heads.{head}.weight": last.clone() for head in range(MOST)}
    vllm = load(saved(tmp_path / "own", weights | own))
    medusa = saved(tmp_path / "medusa", {renamed(name): each for name, each in (weights | own).items()})
    (medusa / "model.safetensors").rename(medusa / "medusa_lm_head.safetensors")
    few = torch.randperm(VOCAB)[:50]
    cut = load(
        saved(
            tmp_path / "cut",
            weights | {"lm_heads.0.weight": last[few].contiguous(), "token_map": few},
            original_lm_head=True,
        )
    )
    biased = {f"blocks.{head}.layers.0.bias": torch.zeros(HIDDEN) for head in range(MOST)}
    for head in range(MOST):
        for found in (vllm, load(medusa), load(saved(tmp_path / f"biased {head}", weights | own | biased))):
            assert torch.equal(found.logits(head, hidden), expected[head])
        logits = cut.logits(head, hidden)
        torch.testing.assert_close(logits[:, few], expected[head][:, few])
        assert logits.isneginf().sum() == 5 * (VOCAB - 50)
        rounded = load(heads, "int8").logits(head, hidden)
        assert 0 < (rounded - expected[head]).abs().max() < 0.05 * expected[head].abs().max()


def test_heads_that_cannot_be_used_are_refused(load, make, heads, model, tmp_path):
    weights = load_file(heads / "model.safetensors")
    first = "blocks.0.layers.0.weight"
    with pytest.raises(CorruptWeightsError, match=r"is \[32, 64\], but this model asks for \[64, 64\]"):
        load(saved(tmp_path / "narrow", weights | {first: torch.zeros(32, HIDDEN)}))
    with pytest.raises(CorruptWeightsError, match=f"{first}.*is not finite"):
        load(saved(tmp_path / "nan", weights | {first: torch.full((HIDDEN, HIDDEN), torch.nan)}))
    with pytest.raises(CorruptWeightsError, match="no weight of the layer to tokens of head 1"):
        load(saved(tmp_path / "lost", weights))  # without original_lm_head, each has its own
    with pytest.raises(CorruptWeightsError, match=r"token_map in .* must name some of the model's 160 tokens"):
        load(saved(tmp_path / "map", weights | {"token_map": torch.tensor([160])}, original_lm_head=True))
    with pytest.raises(CorruptWeightsError, match="holds no heads"):
        load(saved(tmp_path / "none", {"token_map": torch.tensor([1])}))
    with pytest.raises(UnsupportedModelError, match=r"has the tensor '.*', which Medusa heads do not have; name a"):
        load(model)
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"there is no config\.json"):
        load(empty)
    (empty / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"holds no weights of Medusa heads: neither model\.safetensors nor"):
        load(empty)
    with pytest.raises(ConfigError, match=f"num_speculative_tokens is 5, but .* has {MOST} heads"):
        make(most=5)
    assert make().scheduler.drafter is not None
