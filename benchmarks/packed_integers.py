"""Times a model of random weights from a GPTQ folder, on its integers, beside the same shape in bf16.

    python -m benchmarks.packed_integers [--hidden 1536] [--layers 12] [--rounds 3]

Decode is one sequence's tokens per second, prefill those of one prompt. The two models take turns. The GPTQ folder has
4 bits in groups of 128; the embedding, which is the head too, is bf16 in both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from benchmarks.loading import Shape, write_checkpoint
from safetensors.torch import load_file, save_file

from pagemill.config import EngineConfig
from pagemill.doctor import cpu_model
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.sampling.params import SamplingParams

VOCAB, GROUP, PROMPT, ANSWER = 8192, 128, 512, 48
STEP = 0.02 / 4.6
"""A scale with which 4-bit numbers deviate as the dense weights do, by 0.02."""


def pack(folder: Path) -> None:
    """Replaces a checkpoint's linear layers by random integers in GPTQ's layout."""
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            layer, (rows, columns) = name.removesuffix(".weight"), stored.pop(name).shape
            stored[f"{layer}.qweight"] = torch.randint(-(2**31), 2**31, (columns // 8, rows)).int()
            stored[f"{layer}.qzeros"] = torch.full((columns // GROUP, rows // 8), 0x77777777).int()
            stored[f"{layer}.scales"] = torch.full((columns // GROUP, rows), STEP).half()
        save_file(stored, file)
    (folder / "model.safetensors.index.json").unlink()
    (file,) = folder.glob("*.safetensors")
    file.rename(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
    (folder / "config.json").write_text(json.dumps(config))


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
    heads = args.hidden // 64
    shape = Shape(args.hidden, args.hidden * 8 // 3 // GROUP * GROUP, args.layers, heads, heads // 4, 64, VOCAB)
    cores = {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("bf16", "gptq"):
            folder = Path(temporary) / name
            write_checkpoint(folder, shape)
            if name == "gptq":
                pack(folder)
            cores[name] = EngineCore(
                EngineConfig(model=str(folder), max_num_seqs=1, max_model_len=1024, speculative_config="off")
            )
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
