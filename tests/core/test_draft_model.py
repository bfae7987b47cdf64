"""A draft model changes no bit, and drafts what it would alone, whatever has happened to the blocks of its K/V."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "models"))

import float8_folders
import quantized_folders
from benchmarks.draft_pair import save_pair
from drafted import LOAD, VOCAB, assert_same, of_pools, text
from drive import drive, request
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config

from eager_drafter import MOST, Eager
from harness import PagedSequences
from lora_adapters import save_adapter, shapes_of
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.errors import ConfigError, ModelNotFoundError
from pagemill.executor.verification import drafts_of
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.structured import StructuredOutputsParams

BLOCK = 8
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MISTRAL = SIZES | {"family": "mistral", "sliding_window": 20}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("pair"), draft_layers=1, later=0.05, **SIZES)


@pytest.fixture(scope="module")
def unsure(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("unsure"), draft_layers=1, later=0.4, **SIZES)


@pytest.fixture(scope="module")
def make(pair):
    def make(draft=pair[1], model=pair[0], **settings) -> EngineCore:
        settings = {"dtype": "float32", "block_size": BLOCK, "kv_memory": "8MiB", "max_num_seqs": 12,
                    "target_tpot_ms": "off"} | settings  # fmt: skip
        if draft is not None:
            settings["speculative_config"] = {"method": "draft_model", "model": draft, "num_speculative_tokens": MOST}
        return EngineCore(EngineConfig(model=str(model), max_model_len=160, check_invariants=True, **settings))

    return make


@pytest.mark.parametrize("max_model_len", [128, 512])
def test_a_draft_model_turns_keys_as_the_model_does(max_model_len, tmp_path):
    """Phi's two lists of RoPE factors are for contexts up to the trained length, and for longer ones."""
    torch.manual_seed(0)
    factors = {"short_factor": [1.0] * 16, "long_factor": [1.0 + 2.0 * i for i in range(16)]}
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"} | {"hidden_size": 128}
    config = Phi3Config(**sizes, original_max_position_embeddings=128, initializer_range=0.25, pad_token_id=0,
                        rope_scaling={"rope_type": "longrope", **factors})  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": MOST}
    core = EngineCore(
        EngineConfig(model=str(tmp_path), dtype="float32", block_size=BLOCK, kv_memory="8MiB", target_tpot_ms="off",
                     max_model_len=max_model_len, speculative_config=speculation)
    )  # fmt: skip
    core.scheduler.drafter = Eager()
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drive(core, [request(str(i), [(7 * i + j * j) % 150 + 3 for j in range(30)], params) for i in range(4)])
    stats = core.stats()
    core.close()
    assert stats.accepted_tokens == stats.draft_tokens > 40


def watch_drafts(core: EngineCore) -> list[int]:
    """Compares each path of drafts with that of the draft model alone, over all of its tokens at once. The number of
    drafts compared, step by step."""
    draft, sampler, compared = core.executor.draft, core.executor.sampler, []
    propose = draft.propose

    def watching(plan):
        asked = drafts_of(plan)
        found, undrafted, work = propose(plan)
        for at, to, path, drafts in zip(found.sample_from, found.sample_to, asked, drafts_of(found), strict=True):
            if drafts:
                start = int(found.starts[at])
                tokens = core.executor.rows.tokens[to, : start + 1].tolist() + drafts
                (logits,) = PagedSequences(draft.decoder, [tokens[:-1]], block_size=BLOCK, kv_dtype=kv_dtype).run()
                rows = np.array([to])
                for i, (wanted, draft_token) in enumerate(zip(path, drafts, strict=True)):
                    row = logits[start + i : start + i + 1]
                    for _ in range(-1 - wanted):
                        row[0, int(sampler.guess(row, rows, i)[0])] = -np.inf
                    assert draft_token == int(sampler.guess(row, rows, i)[0])
        compared.append(len(found.draft_tokens))
        return found, undrafted, work

    kv_dtype = core.executor.facts.kv.name.removesuffix("_mixed")
    draft.propose = watching
    return compared


@pytest.fixture(scope="module")
def plain(make):
    return drive(make(draft=None), LOAD)


@of_pools("480KiB")
def test_a_draft_model_changes_no_bit_and_drafts_as_alone(make, plain, settings):
    core = make(**settings)
    core.scheduler.drafter = Eager()
    compared = watch_drafts(core)
    assert_same(drive(core, LOAD, every=2), plain)
    stats = core.stats()
    assert stats.draft_tokens == sum(compared) > 100
    assert stats.accepted_tokens > 0.4 * stats.draft_tokens
    assert stats.preemptions or "kv_memory" not in settings
    assert sum(stats.accepted_per_position) == stats.accepted_tokens
    if "max_num_batched_tokens" in settings:
        assert sum(work.withdrawn for work in core.scheduler.drafter.works), (
            "more to take in than one step has room for"
        )


@of_pools("480KiB")
def test_branches_change_no_bit_and_draft_as_alone(make, unsure, settings):
    """A draft model that is often wrong, so that the second choice is often right."""
    model, draft = unsure
    core = make(model=model, draft=draft, **settings | {"max_num_seqs": 24})
    core.scheduler.drafter = Eager(branches=6)
    compared = watch_drafts(core)
    assert_same(drive(core, LOAD, every=2), drive(make(model=model, draft=None), LOAD))
    stats = core.stats()
    assert stats.draft_branches > stats.accepted_branches == core.scheduler.drafter.branched > 5
    assert 100 < stats.draft_tokens < sum(compared), "what paths have in common counts once"
    assert stats.preemptions or "kv_memory" not in settings
    assert sum(stats.accepted_per_position) == stats.accepted_tokens


def test_branches_have_their_sequences_adapter(make, unsure, tmp_path):
    model, draft = unsure
    adapter = save_adapter(tmp_path, shapes_of(AutoConfig.from_pretrained(model)))
    settings = {"enable_lora": True, "max_lora_rank": 8, "lora_modules": {"adapter": str(adapter)}, "max_num_seqs": 24}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    asked = [
        request(f"{seed} {number}", text(seed, 20), params, adapter=number) for seed in range(3) for number in (0, 1)
    ]
    expected = drive(make(model=model, draft=None, **settings), asked)
    assert expected.tokens["0 0", 0] != expected.tokens["0 1", 0]
    core = make(model=model, draft=draft, **settings)
    core.scheduler.drafter = Eager(branches=4)
    assert_same(drive(core, asked), expected)
    assert core.stats().accepted_branches > 5


@pytest.mark.parametrize(
    "settings",
    [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int4_mixed"}, {"dtype": "bfloat16"}],
    ids=["int8 cache", "int4 cache", "int4_mixed cache", "bf16"],
)
def test_a_draft_model_changes_no_bit_of_narrow_formats(make, settings):
    expected = drive(make(draft=None, **settings), LOAD[:3])
    core = make(**settings)
    core.scheduler.drafter = Eager(branches=2)
    compared = watch_drafts(core)
    assert_same(drive(core, LOAD[:3]), expected)
    assert sum(compared) > 50


def test_what_is_measured_to_pay_changes_no_bit(make, plain):
    assert_same(drive(make(), LOAD), plain)


def test_cached_blocks_hold_what_the_draft_model_made_of_them(make, plain):
    """A prompt that is found again, in the pool or in host memory, is not taken in again: only what is behind it."""
    core = make(kv_memory="480KiB", kv_host_memory="4MiB")
    drafter = core.scheduler.drafter = Eager(share=1.0)
    compared = watch_drafts(core)
    first = [request("a", text(1, 100), SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))]
    expected = drive(core, first).tokens
    assert sum(work.caught_up for work in drafter.works) == 100
    again = drive(core, first)
    assert again.cached["a"] >= 96
    others = [request(str(i), text(i, 100), LOAD[0].params) for i in range(20, 25)]
    drive(core, others)
    core.tiers.transfers.flush()
    before = core.stats().blocks_loaded
    drafter.works.clear()
    assert drive(core, first).tokens == again.tokens == expected
    assert core.stats().blocks_loaded > before
    assert sum(work.caught_up for work in drafter.works) <= 4
    turn = [request("b", text(1, 100) + expected["a", 0] + [5, 6], first[0].params)]
    drafter.works.clear()
    drive(core, turn)
    assert sum(work.caught_up for work in drafter.works) <= BLOCK + 2, "of the answer, all whole blocks are found"
    assert sum(compared) > 50


@pytest.mark.parametrize("budget", [32, 512])
def test_what_was_computed_without_drafts_is_taken_in_when_some_are_wanted(make, budget):
    core = make(max_num_batched_tokens=budget)
    drafter, core.scheduler.drafter = Eager(share=1.0), None
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    core.add_request(request("a", text(1, 90), params))
    core.add_request(request("b", text(1, 70) + text(2, 9), params))  # they share blocks that neither has taken in
    for _ in range(12):
        core.step()
    compared = watch_drafts(core)
    core.scheduler.drafter = drafter
    while core.has_work():
        core.step()
    caught_up = [work.caught_up for work in drafter.works if work.caught_up]
    if budget == 32:
        assert max(caught_up) <= 32
        assert 100 < sum(caught_up) < 140, "each of the shared blocks once"
    else:
        assert 160 < caught_up[0] < 200, "both at once"
    assert sum(compared) > 20


def test_a_fault_in_the_middle_changes_no_bit(make, plain):
    core = make()
    core.scheduler.drafter = Eager(branches=2)
    forward, draw, failed = core.executor.decoder.forward, random.Random(1), []

    def failing(token_ids, batch, *more):
        if len(batch.context_lens) > 1 and draw.random() < 0.2:
            failed.append(batch)
            raise RuntimeError("the device hiccups")
        return forward(token_ids, batch, *more)

    core.executor.decoder.forward = failing
    compared = watch_drafts(core)
    assert_same(drive(core, LOAD), plain)
    assert len(failed) > 3
    assert sum(compared) > 100


def test_narrow_layers_share_a_place_and_wide_ones_are_refused(make, pair, tmp_path, plain):
    """Of a draft model with three layers of one KV head: two lie in a place of the model's, which has two heads."""
    _, narrow = save_pair(
        tmp_path, draft_layers=3, later=1.0, **SIZES | {"num_key_value_heads": 1, "num_attention_heads": 4}
    )
    core = make(draft=narrow)
    assert core.executor.facts.frame_bytes == (4 + 2) * 2 * 2 * 32 * BLOCK * 4
    core.scheduler.drafter = Eager()
    compared = watch_drafts(core)
    run = drive(core, LOAD)
    assert_same(run, plain)
    assert sum(compared) > 50
    _, wide = save_pair(tmp_path / "wide", draft_layers=1, later=1.0, **SIZES | {"num_key_value_heads": 4})
    with pytest.raises(ConfigError, match="take 8192 bytes per block, more than the model's \\(4096\\)"):
        make(draft=wide)


@pytest.mark.parametrize(("kv", "windows"), [("auto", (20, None)), ("int4_mixed", (20, None, 20))])
def test_a_model_with_windows_has_the_drafts_layers_in_a_group_of_their_own(make, tmp_path, kv, windows):
    model, windowed = save_pair(tmp_path, draft_layers=1, later=0.05, **MISTRAL)
    expected = drive(make(draft=None, model=model, kv_cache_dtype=kv), LOAD[:3])
    core = make(model=model, kv_cache_dtype=kv)
    assert core.executor.facts.windows == windows
    core.scheduler.drafter = Eager(branches=2)
    compared = watch_drafts(core)
    assert_same(drive(core, LOAD[:3]), expected)
    assert sum(compared) > 50
    with pytest.raises(ConfigError, match="layers with a sliding window"):
        make(draft=windowed)


def test_contexts_longer_than_the_pool_rest(make, plain):
    """Draft models do not write outside the pool; of the others, nothing changes."""
    settings = {"kv_memory": 14 * 5 * 4096, "kv_host_memory": "2MiB", "max_num_batched_tokens": 16}
    core = make(**settings)
    core.scheduler.drafter = Eager(share=1.0, branches=2)
    compared, streamed, step = watch_drafts(core), [], core.step
    core.step = lambda: [step(), streamed.append(core.stats().blocks_streamed)][0]
    assert_same(drive(core, LOAD), plain)
    assert max(streamed) > 0
    assert sum(compared) > 20


def test_the_draft_models_weights_are_part_of_the_digests(make, pair):
    prints = [make(draft=draft).executor.facts.fingerprint for draft in (None, pair[1], pair[0], pair[1])]
    assert len(set(prints)) == 3
    assert prints[1] == prints[3]


def test_draft_models_that_cannot_draft_are_refused(make, pair, tmp_path):
    _, few = save_pair(tmp_path, draft_layers=1, later=1.0, **SIZES | {"vocab_size": 150})
    with pytest.raises(ModelNotFoundError, match="speculative_config: model: there is no file or folder"):
        make(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="its vocabulary has 150 tokens, the model's 160; both must") as caught:
        make(draft=few)
    assert caught.value.param == "speculative_config"
    model, draft = (shutil.copytree(folder, tmp_path / f"with {folder.name}") for folder in pair)
    for folder, words in ((model, "ab"), (draft, "ba")):
        backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="a"))
        backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="the numbers of token 'a' are 0 and 1; both"):
        make(model=model, draft=draft)
    shutil.copy(model / "tokenizer.json", draft)
    make(model=model, draft=draft)
    _, small = save_pair(tmp_path / "small", draft_layers=1, later=1.0, **SIZES | {"head_dim": 16})
    with pytest.raises(ConfigError, match="'int4_mixed', and it holds heads of multiples of 32"):
        make(draft=small, kv_cache_dtype="int4_mixed")


def test_a_model_without_a_head_makes_embeddings_and_drafts_nothing(make, pair, tmp_path):
    """As Qwen3-Embedding is saved: without its head, and without the name of the model within."""
    base = shutil.copytree(pair[1], tmp_path / "base")
    weights = {name.removeprefix("model."): weight for name, weight in load_file(base / "model.safetensors").items()}
    del weights["lm_head.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    assert not make(model=base, draft=None).ready.has_head
    assert make(draft=None).ready.has_head
    with pytest.raises(ConfigError, match=r"no head \(lm_head\.weight\), so it cannot draft"):
        make(draft=base)


def test_the_model_as_its_own_draft_model_is_always_right(make_engine, prompts):
    """On the real model, answers held to a form apart: what the form forbids, the draft model does not know."""
    params = {
        "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
        "form": SamplingParams(
            temperature=0.0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-f]{4} [0-9]+\\.")
        ),
    }
    asked = [request(name, prompts[0], each) for name, each in params.items()]
    expected = drive(make_engine(), asked)
    core = make_engine(
        speculative_config={"method": "draft_model", "model": "smollm2-135m", "num_speculative_tokens": MOST}
    )
    core.scheduler.drafter = Eager(share=1.0)
    free = drive(core, asked[:2])
    assert free.tokens == {key: expected.tokens[key] for key in free.tokens}
    stats = core.stats()
    assert stats.accepted_tokens >= 0.9 * stats.draft_tokens > 20, "those behind the end are not"
    core.scheduler.drafter = Eager(share=1.0, branches=2)
    assert_same(drive(core, asked), expected)


def test_a_draft_model_in_fp8_is_widened_beside_a_model_of_integers(make, tmp_path):
    model, draft = save_pair(tmp_path, draft_layers=1, later=0.05, **SIZES)
    quantized_folders.quantize_folder(model, "gptq", group_size=32)
    float8_folders.quantize_folder(draft, "fp8", "block")
    core = make(draft=draft, model=model, quantization="gptq")
    drive(core, LOAD[:1])
