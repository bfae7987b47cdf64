"""Times a model of random weights from a GPTQ folder, on its integers, beside the same shape in bf16.

    python -m benchmarks.packed_integers [--hidden 1536] [--layers 12] [--rounds 3]

Decode is one sequence's tokens per second, prefill those of one prompt. The two models take turns. The GPTQ folder has
4 bits in groups of 128; embedding and head are bf16 in both.
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
from pagemill.sampling.params import SamplingParams

VOCAB, GROUP, PROMPT, ANSWER = 8192, 128, 512, 48


def write(folder: Path, hidden: int, layers: int, packed: bool) -> Path:
    folder.mkdir()
    inner = hidden * 8 // 3 // GROUP * GROUP
    kv = hidden // 4
    shapes = {f"self_attn.{p}": (n, hidden) for p, n in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv))}
    shapes |= {"self_attn.o_proj": (hidden, hidden), "mlp.down_proj": (hidden, inner)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, hidden).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB, hidden).bfloat16() / hidden**0.5,
        "model.norm.weight": torch.ones(hidden).bfloat16(),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden).bfloat16()
        for name, (rows, columns) in shapes.items():
            if not packed:
                tensors[f"{prefix}{name}.weight"] = torch.randn(rows, columns).bfloat16() / columns**0.5
                continue
            words = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
            tensors[f"{prefix}{name}.qweight"] = words
            tensors[f"{prefix}{name}.qzeros"] = torch.full((columns // GROUP, rows // 8), 0x77777777).int()
            scales = torch.full((columns // GROUP, rows), 0.22 / columns**0.5)
            tensors[f"{prefix}{name}.scales"] = scales.half()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "vocab_size": VOCAB,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 256, "max_position_embeddings": 1024, "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
    }  # fmt: skip
    if packed:
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(core: EngineCore, number: int) -> tuple[float, float]:
    """Returns tokens per second of prefill and of decode."""
    prompt = torch.randint(0, VOCAB, (PROMPT,)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    core.add_request(
        EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params, arrival_s=time.monotonic())
    )
    before = core.stats().generated_tokens
    begin = time.perf_counter()
    while core.stats().generated_tokens == before:
        core.step()
    first = time.perf_counter()
    while core.stats().generated_tokens < before + ANSWER:
        core.step()
    return PROMPT / (first - begin), (ANSWER - 1) / (time.perf_counter() - first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    cores = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("bf16", "gptq"):
            folder = write(Path(temporary) / name, args.hidden, args.layers, name == "gptq")
            cores[name] = EngineCore(EngineConfig(model=str(folder), max_num_seqs=1, max_model_len=1024))
            print(name, cores[name].ready.description)
    found = {name: [] for name in cores}
    for number in range(args.rounds + 1):
        for name, core in cores.items():
            found[name].append(measure(core, number))
    print(cpu_model())
    for name, rounds in found.items():
        prefill, decode = (median(each) for each in zip(*rounds[1:], strict=True))
        print(f"{name}: prefill {prefill:.0f}, decode {decode:.1f} tokens/s")
        cores[name].close()


if __name__ == "__main__":
    main()
