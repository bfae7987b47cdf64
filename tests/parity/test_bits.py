"""On CPU the same sequence gives the same bits, whatever runs beside it and however it is cut; and bfloat16 is as close
to float32 as transformers' own."""

from __future__ import annotations

import pytest
import torch
from random_models import CASES, reference_logits
from transformers import AutoModelForCausalLM

from harness import PagedSequences, load_on

BY_NAME = {case.name: case for case in CASES}


KINDS = [("float32", None), ("bfloat16", None), ("float32", torch.int8)]
LATENT_KINDS = [*KINDS[:2], ("bfloat16", "fp8")]


@pytest.mark.parametrize(
    ("name", "dtype", "kv_dtype"),
    [(name, *kind) for name in ("llama3", "gemma3", "phi3-partial", "mixtral", "qwen3-moe") for kind in KINDS]
    + [(name, *kind) for name in ("deepseek-v2", "deepseek-v3") for kind in LATENT_KINDS],
)
def test_same_bits(name, dtype, kv_dtype, tmp_path):
    case = BY_NAME[name]
    case.save(tmp_path)
    prompts = case.prompts()
    model = load_on("cpu", tmp_path, dtype=dtype)
    whole = PagedSequences(model.decoder, prompts, kv_dtype=kv_dtype).run()
    for other in (
        PagedSequences(model.decoder, prompts, kv_dtype=kv_dtype, seed=5).run_mixed(seed=5),
        PagedSequences(model.decoder, prompts[:1], kv_dtype=kv_dtype, seed=6).run(11) + whole[1:],
    ):
        for a, b in zip(whole, other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen3", "deepseek-v3"])
def test_bfloat16_is_as_close_as_transformers(name, tmp_path):
    case = BY_NAME[name]
    case.save(tmp_path)
    prompts = case.prompts()
    exact = torch.cat(reference_logits(tmp_path, prompts))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.bfloat16).eval()
    with torch.no_grad():
        their = torch.cat([theirs(torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts])
    model = load_on("cpu", tmp_path, dtype="bfloat16")
    ours = torch.cat(PagedSequences(model.decoder, prompts).run())
    assert (ours - exact).pow(2).mean().sqrt() <= 1.1 * (their - exact).pow(2).mean().sqrt()
