"""Times the loading of models of several sizes: seconds, peak memory over what is held, and decode speed.

    python -m benchmarks.loading [--shapes 135m,1b,3b,8b] [--quantization none,int8] [--folder FOLDER] [--rounds 1]

Each shape is a checkpoint of random weights in bf16, made in FOLDER (by default a temporary one) and removed at last.
`read` is the same file, read once by as many threads into memory that is reused: what the disk or the system's cache
gives. `memory` is what the system takes to give as much memory as is held; behind the load it is the shortest, since
what the load has just given back is at hand. `load` is from the file's headers to a decoder that is ready, in a process
of its own, the file in the system's cache as far as it fits. `peak / held` is the most memory while loading over what
is held afterwards, both without what the process held before. `decode` is one sequence's tokens per second, behind a
prompt of 16 tokens.

`--kept` measures packed weights that are kept on disk instead: `start` is the time from the process's start to the
first token, without them, when they are written, and when they are mapped; `two engines` is the memory that two
processes have together (Pss), each with 256 MiB for K/V, of which few are touched.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

PIECE = 8 << 20
FILE_BYTES = 1 << 30
"""Tensors are gathered up to about so many bytes in a file of a checkpoint."""


class Shape(NamedTuple):
    """Describes a Llama; embeddings are tied."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


SHAPES = {
    "135m": Shape(576, 1536, 30, 9, 3, 64, 49152),  # SmolLM2-135M
    "1b": Shape(2048, 8192, 16, 32, 8, 64, 128256),  # Llama-3.2-1B
    "3b": Shape(3072, 8192, 28, 24, 8, 128, 128256),  # Llama-3.2-3B
    "8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),  # Llama-3.1-8B, but for its own head
}

CHILD = """
import json, sys, time
import pagemill.engine.core, torch
from pagemill.config import EngineConfig
from pagemill.engine.messages import EngineRequest
from pagemill.executor import share
from pagemill.sampling.params import SamplingParams
began, settings = json.loads(sys.argv[1])
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) << 10
seen = {}
loading = share.load_model
def timed(*args, **kwargs):
    before = status("VmRSS"); begin = time.perf_counter()
    model = loading(*args, **kwargs)
    seen["load"] = time.perf_counter() - begin
    seen["held"] = status("VmRSS") - before; seen["peak"] = status("VmHWM") - before
    return model
share.load_model = timed
settings |= {"kv_memory": "256MiB", "max_model_len": 1024, "speculative_config": "off"}
core = pagemill.engine.core.EngineCore(EngineConfig(**settings), None)
params = SamplingParams(max_tokens=33, ignore_eos=True)
core.add_request(EngineRequest(request_id="r", prompt_token_ids=list(range(1, 17)), params=params, arrival_s=0.0))
core.step()
seen["start"] = time.time() - began
begin = time.perf_counter()
for _ in range(32): core.step()
seen["decode"] = 32 / (time.perf_counter() - begin)
print(json.dumps(seen), flush=True)
sys.stdin.readline()
import os; os._exit(0)
"""


def write_checkpoint(folder: Path, shape: Shape) -> int:
    """Writes a checkpoint of random weights, in files as large ones have. Returns its bytes of weights."""
    folder.mkdir(parents=True)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {"model.embed_tokens": (shape.vocab, shape.hidden), "model.norm": (shape.hidden,)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        sizes |= {
            prefix + "self_attn.q_proj": (queries, shape.hidden),
            prefix + "self_attn.k_proj": (keys, shape.hidden),
            prefix + "self_attn.v_proj": (keys, shape.hidden),
            prefix + "self_attn.o_proj": (shape.hidden, queries),
            prefix + "mlp.gate_proj": (shape.intermediate, shape.hidden),
            prefix + "mlp.up_proj": (shape.intermediate, shape.hidden),
            prefix + "mlp.down_proj": (shape.hidden, shape.intermediate),
            prefix + "input_layernorm": (shape.hidden,),
            prefix + "post_attention_layernorm": (shape.hidden,),
        }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    gathered: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal held
        file = f"model-{len(set(places.values())):05}.safetensors"
        save_file(gathered, folder / file)
        places.update(dict.fromkeys(gathered, file))
        gathered.clear()
        held = 0

    for name, size in sizes.items():
        weight = torch.empty(size, dtype=torch.bfloat16)
        gathered[f"{name}.weight"] = weight.fill_(1) if len(size) == 1 else weight.normal_(0, 0.02, generator=generator)
        total, held = total + weight.nbytes, held + weight.nbytes
        if held > FILE_BYTES:
            flush()
    flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return total


def read_seconds(folder: Path) -> float:
    """Returns how long it takes to read a checkpoint's files by all cores."""

    def read(path: Path, begin: int) -> None:
        buffer = bytearray(PIECE)
        with path.open("rb", buffering=0) as file:
            file.seek(begin)
            for _ in range(8):
                file.readinto(buffer)

    files = sorted(folder.glob("*.safetensors"))
    begin = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        tasks = [pool.submit(read, file, start) for file in files for start in range(0, file.stat().st_size, 8 * PIECE)]
        for task in tasks:
            task.result()
    return time.perf_counter() - begin


def memory_seconds(nbytes: int) -> float:
    """Returns how long it takes to write to so many bytes of fresh memory, in huge pages where there are any."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        begin = time.perf_counter()
        for at in range(0, nbytes, mmap.PAGESIZE):
            memory[at] = 1
        return time.perf_counter() - begin


class Engine:
    """A process with an engine that has answered. seen: what it has measured. It ends with the `with` block."""

    def __init__(self, **settings: object) -> None:
        command = [sys.executable, "-c", CHILD, json.dumps([time.time(), settings])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Engine:
        assert self._process.stdout is not None
        self.seen: dict[str, float] = json.loads(self._process.stdout.readline())
        return self

    def pss(self) -> int:
        """Returns the bytes of its memory, where what it shares counts as its part."""
        lines = Path(f"/proc/{self._process.pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))

    def __exit__(self, *raised: object) -> None:
        self._process.communicate("\n")


def measure(**settings: object) -> dict[str, float]:
    with Engine(**settings) as engine:
        return engine.seen


def loads(folder: Path, name: str, kind: str, rounds: int) -> str:
    """Returns a line of the table of loads."""
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    reads, memories, seen = [], [], []
    for _ in range(rounds):
        reads.append(read_seconds(folder))
        seen.append(measure(model=str(folder), quantization=None if kind == "none" else kind))
        memories.append(memory_seconds(int(seen[-1]["held"])))
    read, memory = statistics.median(reads), statistics.median(memories)
    load, held, peak, decode = (
        statistics.median(each[key] for each in seen) for key in ("load", "held", "peak", "decode")
    )
    return (
        f"| {name} | {'bf16' if kind == 'none' else kind} | {size / 1e9:.2f} | {read:.2f} | {memory:.2f} | "
        f"{load:.2f} | {load / (read + memory):.1f} | {held / 2**30:.2f} | {peak / held:.2f} | {decode:.1f} |"
    )


def kept(folder: Path, name: str, kind: str, rounds: int) -> str:
    """Returns a line of the table of starts with and without packed weights that are kept."""
    plain = {"model": str(folder), "quantization": None if kind == "none" else kind}
    seen: dict[str, list[dict[str, float]]] = {"plain": [], "written": [], "mapped": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder.parent) as weights:
            keeping = plain | {"weights_disk_memory": "20GiB", "weights_disk_path": weights}
            for how, settings in (("plain", plain), ("written", keeping), ("mapped", keeping)):
                seen[how].append(measure(**settings))
            with Engine(**keeping) as first:
                alone = first.pss()
                with Engine(**keeping) as second:
                    together = first.pss() + second.pss()
            size = sum(file.stat().st_size for file in Path(weights).iterdir())

    def median(how: str, key: str) -> float:
        return statistics.median(each[key] for each in seen[how])

    starts = " | ".join(f"{median(how, 'start'):.1f} s" for how in seen)
    return (
        f"| {name} | {'bf16' if kind == 'none' else kind} | {size / 2**30:.2f} | {starts} | "
        f"{median('mapped', 'load'):.2f} s | {median('written', 'peak') / median('written', 'held'):.2f} | "
        f"{alone / 2**30:.2f} | {together / 2**30:.2f} ({together / alone:.2f}x) | "
        f"{median('mapped', 'decode') / median('plain', 'decode'):.3f} |"
    )


LOADS_HEAD = """
| shape | weights | GB in the file | read, s | memory, s | load, s | load / both | held, GiB | peak / held | tokens/s |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""
KEPT_HEAD = """
| shape | weights | kept, GiB | start without | first start | later start | its load | first peak / held | \
one engine, GiB | two engines, GiB | decode, mapped / not |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,1b,3b")
    parser.add_argument("--quantization", default="none,int8")
    parser.add_argument("--folder", type=Path, help="where files are made; 8 GB for all shapes, 16 GB with --kept")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints, and take those that are there")
    parser.add_argument("--kept", action="store_true", help="measure packed weights that are kept on disk")
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {given.rounds} rounds, medians")
    print(KEPT_HEAD if given.kept else LOADS_HEAD)
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        for name in given.shapes.split(","):
            folder = (given.folder if given.keep and given.folder else Path(temporary)) / name
            if not folder.exists():
                write_checkpoint(folder, SHAPES[name])
            read_seconds(folder)
            for kind in given.quantization.split(","):
                print((kept if given.kept else loads)(folder, name, kind, given.rounds), flush=True)


if __name__ == "__main__":
    main()
