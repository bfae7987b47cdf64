"""Whole engines on a GPU, beside the CPU's: greedy tokens in fp32 are equal, however they came about.

Without a GPU all are skipped. The real model is skipped where it is not on this machine; a random one never is.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from harness import MODEL
from interpreter import DEVICE
from models.small_llama import save_llama
from pagemill import LLM, SamplingParams
from pagemill.errors import KVMemoryError
from pagemill.executor.common_keys import CommonKeys
from pagemill.executor.graphs import batch_sizes
from pagemill.hub.registry import REGISTRY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu", reason="no GPU"),
    pytest.mark.usefixtures("_whole_products"),
]

VOCAB = 512
"""Of the random model."""
SETTINGS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "kv_memory": "64MiB",
    "target_tpot_ms": "off",  # else admission keeps room, and nobody is preempted
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
ROUNDED = ["int8", "int4_mixed", "int8/int4", "fp8_e4m3"]
"""KV formats that move tokens where two are nearly alike; others are as good as the CPU's in the same format."""
ALIKE = 0.9


@pytest.fixture
def _whole_products():
    """Fails where somebody has fp32 products rounded to TF32: tokens would not be the CPU's."""
    assert not torch.backends.cuda.matmul.allow_tf32, "a setting rounds products in fp32 to TF32"


@pytest.fixture(scope="module", params=["random", MODEL])
def model(request, tmp_path_factory):
    if request.param == MODEL:
        if not REGISTRY[MODEL].is_pulled():
            pytest.skip(f"{MODEL} is not on this machine: pagemill pull {MODEL}")
        return MODEL
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 256}
    folder = save_llama(tmp_path_factory.mktemp("random"), num_hidden_layers=3, **sizes)
    words = Tokenizer(WordLevel({str(word): word for word in range(VOCAB)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return str(folder)


@cache
def prompts() -> list[list[int]]:
    """Returns token ids, of which some prompts share their first half: the pool finds it again."""
    draw = random.Random(7)
    common = [draw.randrange(3, VOCAB) for _ in range(40)]
    lengths = (1, 5, 17, 33, 64, 90, 130)
    alone = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]
    return [*alone, *([*common, *more] for more in alone[:4])]


def answers(model: str, device: str, params: SamplingParams = GREEDY, **settings) -> list[tuple[int, ...]]:
    """Returns all prompts' tokens, computed as one batch."""
    with LLM(model, device=device, **(SETTINGS | settings)) as llm:
        return answers_of(llm, params)


def answers_of(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    outputs = llm.generate([{"prompt_token_ids": one} for one in prompts()], params, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * len(outputs)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def on_cpu(model):
    """Returns answers of the CPU with these settings, each computed once."""
    return cache(lambda **settings: answers(model, "cpu", **settings))


def alike(found: list[tuple[int, ...]], expected: list[tuple[int, ...]]) -> float:
    """Returns the share of tokens before the first that differs, over all answers."""
    pairs = list(zip(found, expected, strict=True))
    same = (next((at for at, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a)) for a, b in pairs)
    return sum(same) / sum(map(len, expected))


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_tokens_equal_the_cpus(model, on_cpu, enforce_eager) -> None:
    assert answers(model, DEVICE, enforce_eager=enforce_eager) == on_cpu()


def test_serving_captures_and_compiles_nothing_after_the_start(model, monkeypatch) -> None:
    from triton import knobs

    late = []
    with LLM(model, device=DEVICE, **SETTINGS) as llm:
        before = llm.stats()
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **what: late.append(what["fn"].name))
        for params in (
            GREEDY,
            SamplingParams(temperature=0.9, top_p=0.8, max_tokens=8, detokenize=False, ignore_eos=True),
        ):
            for prompt in prompts():
                llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            llm.generate([{"prompt_token_ids": one} for one in prompts()], params, use_tqdm=False)
        after = llm.stats()
    assert before.graphs == after.graphs == 2 * len(batch_sizes(SETTINGS["max_num_seqs"]))
    assert before.graph_bytes > 0
    assert not late


def test_a_prompt_alone_has_the_tokens_that_it_has_in_a_batch(model, on_cpu) -> None:
    with LLM(model, device=DEVICE, **SETTINGS) as llm:
        for prompt, expected in zip(prompts(), on_cpu(), strict=True):
            output = llm.generate({"prompt_token_ids": prompt}, GREEDY, use_tqdm=False)[0]
            assert tuple(output.outputs[0].token_ids) == expected


def test_rows_behind_a_common_prompt_are_attended_together(model, monkeypatch) -> None:
    if model != MODEL:
        pytest.skip("the random model's contexts are shorter than a chunk")
    draw, joined, find = random.Random(8), [], CommonKeys.find
    common = [draw.randrange(3, VOCAB) for _ in range(600)]
    asked = [{"prompt_token_ids": [*common, draw.randrange(3, VOCAB), row + 3]} for row in range(4)]

    def noting(*args, **how):
        order, found = find(*args, **how)
        joined.append(np.count_nonzero(found))
        return order, found

    monkeypatch.setattr(CommonKeys, "find", noting)
    tokens = {}
    for device in (DEVICE, "cpu"):
        with LLM(model, device=device, **(SETTINGS | {"max_model_len": 1024})) as llm:
            llm.generate(asked[0], GREEDY, use_tqdm=False)  # whose blocks the others find
            tokens[device] = [tuple(one.outputs[0].token_ids) for one in llm.generate(asked, GREEDY, use_tqdm=False)]
    assert tokens[DEVICE] == tokens["cpu"]
    assert max(joined) >= 2, "with 3 query heads per KV head, a tile holds five rows"


AGAIN, SWAP = {"kv_host_memory": 0}, {"kv_host_memory": "64MiB"}


@pytest.mark.parametrize("host", [AGAIN, SWAP | {"preemption_mode": "swap"}], ids=["again", "swap"])
def test_sequences_that_were_preempted(model, on_cpu, host) -> None:
    """The pool holds two or three of the sequences: the others' blocks are computed again, or come back from host."""
    with LLM(model, device=DEVICE, **(SETTINGS | {"kv_memory": small_pool(model)} | host)) as llm:
        found = answers_of(llm)
        stats = llm.stats()
    assert found == on_cpu()
    assert stats.preemptions > 0
    assert (stats.preempted_tokens_swapped_in > 0) == (host is not AGAIN)


def test_what_leaves_the_pool_goes_to_host_memory_by_default(model, on_cpu) -> None:
    with LLM(model, device=DEVICE, **(SETTINGS | {"kv_memory": small_pool(model)})) as llm:
        found = answers_of(llm)
        stats = llm.stats()
    assert found == on_cpu()
    assert (stats.tier_blocks.get("host", 0) > 0) == (DEVICE != "cpu")


def small_pool(model: str) -> int:
    """Returns bytes of 24 blocks of 16 tokens in fp32."""
    layers, heads, dim = (30, 3, 64) if model == MODEL else (3, 2, 32)
    return 24 * 16 * layers * 2 * heads * dim * 4


@pytest.fixture
def ranks(model) -> int:
    """Returns a number of ranks that can share the model's heads, and are as many as there are GPUs at least."""
    size = 3 if model == MODEL else 2
    if (count := torch.cuda.device_count()) < size:
        pytest.skip(f"needs {size} GPUs, and there is {count}: ranks on GPUs were not tested")
    return size


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_ranks_on_several_gpus(model, on_cpu, ranks, enforce_eager) -> None:
    assert answers(model, DEVICE, tensor_parallel_size=ranks, enforce_eager=enforce_eager) == on_cpu()


def test_ranks_on_several_gpus_swap_their_parts_of_blocks(model, on_cpu, ranks) -> None:
    settings = {"kv_memory": small_pool(model), "kv_host_memory": "64MiB", "preemption_mode": "swap"}
    with LLM(model, device=DEVICE, **(SETTINGS | settings), tensor_parallel_size=ranks) as llm:
        found = answers_of(llm)
        assert llm.stats().preempted_tokens_swapped_in > 0
    assert found == on_cpu()


@pytest.mark.parametrize("kv_cache_dtype", ROUNDED)
def test_narrow_caches(model, on_cpu, kv_cache_dtype) -> None:
    """Rounds are the same, and sums in another order may round to the neighbour: most tokens are the CPU's."""
    found = answers(model, DEVICE, kv_cache_dtype=kv_cache_dtype)
    assert alike(found, on_cpu(kv_cache_dtype=kv_cache_dtype)) > ALIKE


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_sixteen_bits(model, on_cpu, enforce_eager) -> None:
    dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
    found = answers(model, DEVICE, dtype=dtype, enforce_eager=enforce_eager)
    first = [a[0] == b[0] for a, b in zip(found, on_cpu(), strict=True)]
    assert sum(first) >= len(first) - 2, "first tokens differ where two are nearly alike only"


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.get_device_capability() < (8, 0), reason="needs capability 8.0")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_prompts_by_torchs_own_attention(model, monkeypatch, kv_cache_dtype) -> None:
    """Prompts take several steps, beside others that decode; first tokens are those of Triton's attention."""
    from pagemill.attention import sdpa_backend

    attended, cut = [], sdpa_backend.cut
    monkeypatch.setattr(sdpa_backend, "cut", lambda *lengths: attended.append(lengths) or cut(*lengths))
    draw = random.Random(11)
    asked = [[draw.randrange(3, VOCAB) for _ in range(length)] for length in (2500, 2048, 4200, 5, 3000, 90, 5000, 800)]
    settings = {
        "dtype": "bfloat16", "max_model_len": 6144, "hf_overrides": {"max_position_embeddings": 6144},
        "max_num_batched_tokens": 3000, "kv_memory": "1GiB", "kv_cache_dtype": kv_cache_dtype,
    }  # fmt: skip
    found = []
    for backend in ("sdpa", "triton"):
        with LLM(model, device=DEVICE, **(SETTINGS | settings), attention_backend=backend) as llm:
            attended.clear()
            outputs = llm.generate([{"prompt_token_ids": one} for one in asked], GREEDY, use_tqdm=False)
            assert bool(attended) == (backend == "sdpa")
            assert backend == "triton" or any(before for _, before in attended)
        found.append([output.outputs[0].token_ids[0] for output in outputs])
    same = [a == b for a, b in zip(*found, strict=True)]
    assert sum(same) >= len(same) - 2, "first tokens differ where two are nearly alike only"


def test_weights_in_eight_bits(model, on_cpu) -> None:
    """The real model's file is one of 8 bits: its own numbers, here on purpose."""
    found = answers(model, DEVICE, quantization="int8")
    first = [a[0] == b[0] for a, b in zip(found, on_cpu(), strict=True)]
    assert sum(first) >= len(first) - 2


@pytest.mark.parametrize("limits", [{}, {"top_k": 20}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_a_seed_draws_the_same_again(model, limits) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=32, ignore_eos=True, detokenize=False, **limits)
    other = SamplingParams(temperature=0.9, seed=12, max_tokens=32, ignore_eos=True, detokenize=False, **limits)
    with LLM(model, device=DEVICE, **SETTINGS) as llm:
        first, again, others = (answers_of(llm, each) for each in (params, params, other))
    assert first == again
    assert first != others


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_contexts_longer_than_the_pool(model, enforce_eager) -> None:
    """Long prompts stream beside a short one: of the memory of 26 blocks, streaming leaves the pool 11 (of the random
    model) or 24, and contexts have up to 32."""
    long = [token for prompt in prompts() for token in prompt] * 2
    asked = [long[:420], long[100:480], long[:300], long[7:30]]
    settings = {"max_model_len": 512, "hf_overrides": {"max_position_embeddings": 512}}
    small = {"kv_memory": small_pool(model) // 24 * 26, "kv_host_memory": "64MiB", "enforce_eager": enforce_eager}
    found = []
    for device, pool in ((DEVICE, small), ("cpu", {})):
        with LLM(model, device=device, **(SETTINGS | settings | pool)) as llm:
            outputs = llm.generate([{"prompt_token_ids": one} for one in asked], GREEDY, use_tqdm=False)
        found.append([tuple(output.outputs[0].token_ids) for output in outputs])
        streamed = [output.outputs[0].kv_blocks[1] for output in outputs]
        assert (max(streamed) > 0) == (device == DEVICE)
    assert found[0] == found[1]


@pytest.mark.parametrize("host", [AGAIN, SWAP], ids=["again", "swap"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
def test_an_engine_whose_pool_changes_while_it_serves(model, on_cpu, enforce_eager, host) -> None:
    """Answers are those of a pool that stays; what goes is free for others, and comes back."""
    with LLM(model, device=DEVICE, **(SETTINGS | host), enforce_eager=enforce_eager) as llm:
        sizes, frees = ("16MiB", "used", "48MiB", small_pool(model) * 2, "96MiB", None), []
        engine, size = llm.frontend.client, llm.resize_kv_memory(None).kv_bytes
        step, left, steps = engine.core.step, [*sizes], 0

        def stepped():
            nonlocal steps
            steps += 1
            if steps % 5 == 0 and left:
                llm.resize_kv_memory(left.pop(0))
                frees.append(torch.cuda.mem_get_info()[0])
            return step()

        engine.core.step = stepped
        found = answers_of(llm)
        assert not left
        assert max(frees) - min(frees) > 32 << 20
        assert llm.resize_kv_memory(None).kv_bytes == size
        assert answers_of(llm) == found == on_cpu()
        with pytest.raises(KVMemoryError, match="are free"):
            llm.resize_kv_memory("1TiB")
        assert answers_of(llm) == found


@pytest.mark.alone_on_gpu
def test_an_engine_sleeps_and_gives_its_memory_to_others(model, on_cpu) -> None:
    with LLM(model, device=DEVICE, **(SETTINGS | {"kv_memory": "1GiB"})) as llm:
        before = torch.cuda.mem_get_info()[0]
        llm.sleep()
        assert torch.cuda.mem_get_info()[0] > before + (900 << 20)
        others = torch.empty(torch.cuda.mem_get_info()[0] - (256 << 20), dtype=torch.uint8, device=DEVICE)
        with pytest.raises(KVMemoryError, match=r"ask for less, or free memory"):
            llm.wake_up()
        del others
        llm.wake_up()
        assert answers_of(llm) == on_cpu()
