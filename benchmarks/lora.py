"""Holds decode steps and prefill with four LoRA adapters mixed against those of the model alone.

    python -m benchmarks.lora [--model smollm2-135m] [--dtype auto] [--rank 16] [--held bfloat16] [--rounds 5]

`--model random-1b` is a model of random weights in the sizes of Llama 3.2 1B: there an adapter is a smaller part.

Two engines take turns of a few steps, with equal prompts and lengths; requests take the adapters in turn, and each has
one. Adapters are random and add to all seven projections of every layer. Figures are medians: of decode, a step in
which all sequences generate; of prefill, the seconds of all steps. Ratios are of neighbouring turns, with their
quartiles.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from benchmarks.in_turns import ratios_of, sums_of_steps, turns_of_steps
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.executor.local import LocalExecutor
from pagemill.lora_request import LoRARequest
from pagemill.models.spec import DecoderSpec
from pagemill.sampling.params import SamplingParams

ADAPTERS = 4
PROMPT_LEN = 16
LONG_PROMPT_LEN = 512
"""Of the prompts of prefill; there is one for each adapter."""
DECODE_TOKENS = 49
RANDOM = "random-1b"
SIZES = {
    "vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
"""By transformers' names. The vocabulary is SmolLM2's."""


def save_random(folder: Path) -> str:
    """Saves a model of random bf16 weights, and returns its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **SIZES)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def save_adapter(folder: Path, spec: DecoderSpec, rank: int, dtype: torch.dtype, seed: int) -> None:
    """Writes a random adapter as PEFT does."""
    random = torch.Generator().manual_seed(seed)
    hidden, size = spec.hidden_size, spec.intermediate_size
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden),
        "mlp.down_proj": (hidden, size),
    }  # fmt: skip
    tensors = {}
    for layer in range(len(spec.layers)):
        for module, (outputs, inputs) in shapes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = (torch.randn(rank, inputs, generator=random) * inputs**-0.5).to(dtype)
            tensors[f"{name}.lora_B.weight"] = (torch.randn(outputs, rank, generator=random) * 0.01).to(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def add(core: EngineCore, count: int, prompt_len: int, tokens: int, adapted: bool, seed: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(count):
        prompt = [(7 * i + 3 * j + seed) % 40000 + 100 for j in range(prompt_len)]
        adapter = i % ADAPTERS + 1 if adapted else 0
        core.add_request(
            EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_s=0.0, adapter=adapter)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--held", default="bfloat16", help="dtype in which the adapters are stored")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="state the seconds of each operator, too")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(given, Path(folder))


def measure(given: argparse.Namespace, folder: Path) -> None:
    config = EngineConfig(
        model=save_random(folder / "model") if given.model == RANDOM else given.model,
        dtype=given.dtype,
        max_model_len=LONG_PROMPT_LEN + 8,
        max_num_seqs=64,
        kv_memory="1GiB",
        enable_prefix_caching=False,
        enable_lora=True,
        max_lora_rank=given.rank,
        speculative_config="off",
    )
    cores = [EngineCore(config), EngineCore(config)]
    decoders = []
    for core in cores:
        assert isinstance(core.executor, LocalExecutor)
        decoders.append(core.executor.decoder)
    for number in range(1, ADAPTERS + 1):
        path = folder / str(number)
        save_adapter(path, decoders[0].spec, given.rank, getattr(torch, given.held), number)
        cores[1].load_adapter(LoRARequest(str(number), number, str(path)))
    print(f"{cpu_model()}; {cores[1].ready.model}; rank {given.rank} in {given.held}")
    print(f"{sum(adapter.nbytes for adapter in cores[1].ready.adapters) >> 20} MiB of adapters")
    print("what | without, ms | with, ms | with / without")
    for count, prompt_len, tokens in (
        (16, PROMPT_LEN, DECODE_TOKENS),
        (64, PROMPT_LEN, DECODE_TOKENS),
        (ADAPTERS, LONG_PROMPT_LEN, 1),
    ):
        turns, before = [], [_operators(decoder) for decoder in decoders]
        for number in range(given.rounds + 1):
            for adapted, core in enumerate(cores):
                add(core, count, prompt_len, tokens, bool(adapted), number)
            found = [sums_of_steps(cores)] if tokens == 1 else turns_of_steps(cores, count)
            turns += found if number else []  # the first warms up
        what = f"prefill, {count} prompts of {prompt_len}" if tokens == 1 else f"decode, {count} running"
        print(f"{what} | {ratios_of(turns)}", flush=True)
        for which, decoder, earlier in zip(("without", "with"), decoders, before, strict=True):
            spent = {key: seconds - earlier[key] for key, seconds in _operators(decoder).items()}
            if given.profile:
                print(f"  {which}, ms: {', '.join(f'{key} {1e3 * value:.0f}' for key, value in spent.items())}")
    for core in cores:
        core.close()


def _operators(decoder: object) -> dict[str, float]:
    seconds = getattr(decoder, "operator_seconds", None)
    return {} if seconds is None else seconds()


if __name__ == "__main__":
    main()
