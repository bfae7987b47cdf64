"""Holds decode steps and prefill with four LoRA adapters mixed against those of the model alone.

    python -m benchmarks.lora [--model smollm2-135m] [--dtype auto] [--rank 16] [--held bfloat16] [--rounds 5]

Both take turns in one engine, with equal prompts and lengths; requests take the adapters in turn, and each has one.
Adapters are random and add to all seven projections of every layer. Figures are medians over rounds: of decode, the
step in which all sequences generate; of prefill, tokens per second.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

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
DECODE_TOKENS = 12


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


def run(
    core: EngineCore, count: int, prompt_len: int, tokens: int, adapted: bool, seed: int
) -> list[tuple[int, float]]:
    """Returns the new tokens and seconds of each step."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for i in range(count):
        prompt = [(7 * i + 3 * j + seed) % 40000 + 100 for j in range(prompt_len)]
        adapter = i % ADAPTERS + 1 if adapted else 0
        core.add_request(
            EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params, arrival_s=0.0, adapter=adapter)
        )
    steps = []
    while core.has_work():
        begin = time.perf_counter()
        outputs = core.step()
        steps.append((sum(len(output.new_token_ids) for output in outputs), time.perf_counter() - begin))
        if failed := next((output.error for output in outputs if output.error is not None), None):
            raise SystemExit(f"a request failed: {failed.message}")
    return steps


def decode_s(core: EngineCore, running: int, adapted: bool, seed: int) -> float:
    steps = run(core, running, PROMPT_LEN, DECODE_TOKENS, adapted, seed)
    return median(seconds for tokens, seconds in steps if tokens == running)


def prefill_s(core: EngineCore, adapted: bool, seed: int) -> float:
    return sum(seconds for _, seconds in run(core, ADAPTERS, LONG_PROMPT_LEN, 1, adapted, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--held", default="bfloat16", help="dtype in which the adapters are stored")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true", help="state the seconds of each operator, too")
    given = parser.parse_args()
    core = EngineCore(
        EngineConfig(
            model=given.model,
            dtype=given.dtype,
            max_model_len=LONG_PROMPT_LEN + 8,
            max_num_seqs=64,
            enable_prefix_caching=False,
            enable_lora=True,
            max_lora_rank=given.rank,
        )
    )
    assert isinstance(core.executor, LocalExecutor)
    decoder = core.executor.decoder
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, ADAPTERS + 1):
            path = Path(folder) / str(number)
            save_adapter(path, decoder.spec, given.rank, getattr(torch, given.held), number)
            core.load_adapter(LoRARequest(str(number), number, str(path)))
    print(f"{cpu_model()}; {core.ready.model}; rank {given.rank} in {given.held}")
    print(f"{sum(adapter.nbytes for adapter in core.ready.adapters) >> 20} MiB of adapters")
    print("what | without, ms | with, ms | with / without: each round, median")
    for name, measure in (
        ("decode, 16 running", lambda adapted, seed: decode_s(core, 16, adapted, seed)),
        ("decode, 64 running", lambda adapted, seed: decode_s(core, 64, adapted, seed)),
        (f"prefill, {ADAPTERS} prompts of {LONG_PROMPT_LEN}", lambda adapted, seed: prefill_s(core, adapted, seed)),
    ):
        rounds, spent = [], ({}, {})
        for number in range(given.rounds + 1):
            pair = []
            for adapted in (False, True):
                before = _operators(decoder)
                pair.append(measure(adapted, number))
                for key, seconds in _operators(decoder).items():
                    spent[adapted][key] = spent[adapted].get(key, 0.0) + seconds - before[key]
            if number:  # the first warms up
                rounds.append(pair)
        ratios = [b / a for a, b in rounds]
        ms = [1e3 * median(times) for times in zip(*rounds, strict=True)]
        each = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"{name} | {ms[0]:.1f} | {ms[1]:.1f} | {each}, {median(ratios):.3f}", flush=True)
        if given.profile:
            for which, seconds in zip(("without", "with"), spent, strict=True):
                print(f"  {which}, ms: {', '.join(f'{key} {1e3 * value:.0f}' for key, value in seconds.items())}")
    core.close()


def _operators(decoder: object) -> dict[str, float]:
    seconds = getattr(decoder, "operator_seconds", None)
    return {} if seconds is None else seconds()


if __name__ == "__main__":
    main()
