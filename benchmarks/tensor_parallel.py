"""Measures what a model in parts pays for the exchange between them, and models what scaling follows elsewhere.

    python -m benchmarks.tensor_parallel [--rows 1,8,64] [--steps 40]

First a collective between two processes, through shared memory and through gloo, by the tokens of a step. Then decode
steps of a random model of SmolLM2-135M's size (8 heads, 4 KV heads): one process on one thread and on two, two
processes on one thread each, in turn. Last, modelled and not measured: Llama-3-8B and 70B on two sockets of 32 cores
and on 8 GPUs, beside the design with two all-reduces in a layer. Medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import NamedTuple

import torch
from benchmarks.peers.machine import describe_machine
from transformers import AutoModelForCausalLM, LlamaConfig

from pagemill import _kernels
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest
from pagemill.executor.process_group import GroupExchange, host_meeting, join_meeting
from pagemill.executor.shared_memory import SharedExchange, make_memory
from pagemill.models.cpu_decoder import CpuDecoder
from pagemill.sampling.params import SamplingParams

WIDTH = 1536
"""Numbers that are gathered for a token: SmolLM2-135M's activations between the projections of its MLP."""
TOKENS = (1, 8, 64, 512)
PER_LAYER = 4
"""Collectives: the heads' outputs, what o adds, the activations, what down adds."""


def collectives(exchange: SharedExchange | GroupExchange, times: int) -> list[float]:
    """Returns the seconds of a collective for each of TOKENS."""
    found, half = [], WIDTH // 2
    for tokens in TOKENS:
        part, spent = torch.zeros(tokens, half, dtype=torch.bfloat16), []
        for _ in range(times):
            begin = time.perf_counter()
            exchange.all_gather(part, [half, half])
            spent.append(time.perf_counter() - begin)
        found.append(median(spent))
    return found


def other_rank(kind: str, number: int, times: int) -> None:
    if kind == "shared":
        collectives(SharedExchange(1, 2, number), times)
    else:
        gloo = GroupExchange(1, 2)
        gloo.connect(join_meeting(number))
        collectives(gloo, times)
    os._exit(0)


def measure_collectives(kind: str, times: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.tensor_parallel", "--rank", kind, "--times", str(times), "--number"]
    if kind == "shared":
        memory = make_memory()
        other = subprocess.Popen([*command, str(memory)], pass_fds=[memory])
        found = collectives(SharedExchange(0, 2, memory), times)
    else:
        store, gloo = host_meeting(), GroupExchange(0, 2)
        other = subprocess.Popen([*command, str(store.port)])
        gloo.connect(store)
        found = collectives(gloo, times)
    other.wait()
    return found


class Engine:
    """Decodes one sequence per row, with what there is of each step's seconds for exchange."""

    def __init__(self, path: str, ranks: int, threads: int, rows: int, steps: int) -> None:
        length = 16 + steps + 16
        self._threads = threads
        config = EngineConfig(
            path, tensor_parallel_size=ranks, num_threads=threads, dtype="bfloat16", max_model_len=length,
            max_num_seqs=rows, max_num_batched_tokens=max(512, rows), kv_memory="256MiB", enable_prefix_caching=False,
            speculative_config="off",
        )  # fmt: skip
        self.core = EngineCore(config)
        params = SamplingParams(temperature=0.0, max_tokens=length - 16, ignore_eos=True)
        for row in range(rows):
            prompt = [3 + (row * 17 + i) % 40000 for i in range(16)]
            self.core.add_request(
                EngineRequest(request_id=f"r{row}", prompt_token_ids=prompt, params=params, arrival_s=0.0)
            )
        while self.core.scheduler.num_running < rows:
            self.core.step()
        self.core.step()
        self.seconds: list[float] = []
        self.exchange: list[float] = []

    def step(self) -> None:
        _kernels.set_num_threads(self._threads)
        decoder = self.core.executor.decoder
        assert isinstance(decoder, CpuDecoder)
        before, begin = decoder.operator_seconds()["exchange"], time.perf_counter()
        self.core.step()
        self.seconds.append(time.perf_counter() - begin)
        self.exchange.append(decoder.operator_seconds()["exchange"] - before)


def measure_steps(path: str, rows: int, steps: int) -> None:
    kinds = {"1 process, 1 thread": (1, 1), "1 process, 2 threads": (1, 2), "2 processes, 1 thread each": (2, 1)}
    engines = {name: Engine(path, *kind, rows, steps) for name, kind in kinds.items()}
    for _ in range(steps):
        for engine in engines.values():
            engine.step()
    base = median(engines["1 process, 1 thread"].seconds)
    for name, engine in engines.items():
        took, gathering = median(engine.seconds), median(engine.exchange)
        print(
            f"{rows:4} rows  {name:28} {took * 1e3:8.2f} ms  {base / took:5.2f}x  in exchange {gathering * 1e3:6.2f} ms"
        )
        engine.core.close()


class Shape(NamedTuple):
    """Describes a model. parameters: those that each token is multiplied with."""

    name: str
    layers: int
    hidden: int
    heads: int
    intermediate: int
    vocab: int
    parameters: float

    def gathered(self, tokens: int) -> int:
        """Bytes that a rank has after a layer's gathers: 16 bits each."""
        return 2 * tokens * (self.heads + 2 * self.hidden + self.intermediate)

    def reduced(self, tokens: int) -> int:
        """Bytes of the sums of two all-reduces, in 16 bits."""
        return 2 * tokens * 2 * self.hidden


class Machine(NamedTuple):
    """Describes ranks that are alike. link: bytes/s into a rank. latency_s: of a collective of nothing."""

    name: str
    ranks: int
    memory: float
    link: float
    latency_s: float


SHAPES = [
    Shape("Llama-3-8B", 32, 4096, 4096, 14336, 128256, 7.5e9),
    Shape("Llama-3-70B", 80, 8192, 8192, 28672, 128256, 69.5e9),
]
MACHINES = [
    Machine("2 sockets of 32 cores (2 x 300 GB/s, 50 GB/s between them, 5 us)", 2, 300e9, 50e9, 5e-6),
    Machine("8 H100 (8 x 3.35 TB/s, NVLink 450 GB/s, 10 us)", 8, 3.35e12, 450e9, 10e-6),
]


def modelled(shape: Shape, machine: Machine, tokens: int) -> tuple[float, float, float]:
    """Returns the seconds of a decode step on one rank, and on all by gathers and by all-reduces.

    A step reads the weights once, and waits for its collectives: nothing overlaps, attention costs nothing, cores are
    never the limit. A ring brings a rank (N - 1) / N of what is gathered, and twice that of what is reduced.
    """
    ranks = machine.ranks
    reading = 2 * shape.parameters / machine.memory
    share = (ranks - 1) / ranks
    outside = share * 2 * tokens * (ranks * shape.hidden + shape.vocab) / machine.link + 2 * machine.latency_s
    gathers = PER_LAYER * machine.latency_s + share * shape.gathered(tokens) / machine.link
    reduces = 2 * machine.latency_s + 2 * share * shape.reduced(tokens) / machine.link
    return reading, *(reading / ranks + outside + shape.layers * each for each in (gathers, reduces))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--times", type=int, default=400)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.rank:
        other_rank(arguments.rank, arguments.number, arguments.times)
    print(describe_machine())
    print(f"\nA collective of two processes, {WIDTH} numbers of 16 bits per token, microseconds (measured)")
    print("tokens         " + "".join(f"{tokens:8}" for tokens in TOKENS))
    for kind in ("shared", "gloo"):
        found = measure_collectives(kind, arguments.times if kind == "shared" else arguments.times // 4)
        print(f"{kind:15}" + "".join(f"{seconds * 1e6:8.0f}" for seconds in found))
    print("\nDecode steps (measured)")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=8,
            num_key_value_heads=4, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for rows in map(int, arguments.rows.split(",")):
            measure_steps(folder, rows, arguments.steps)
    print("\nDecode steps, MODELLED: weights read once, collectives waited for, attention left out; 16 bits")
    for machine in MACHINES:
        print(machine.name)
        for shape in SHAPES:
            for tokens in (1, 64):
                one, gathers, reduces = modelled(shape, machine, tokens)
                print(
                    f"  {shape.name:12} {tokens:3} rows: one rank {one * 1e3:7.2f} ms; {machine.ranks} by gathers "
                    f"{gathers * 1e3:6.2f} ms ({one / gathers:.2f}x); by all-reduces {reduces * 1e3:6.2f} ms "
                    f"({one / reduces:.2f}x)"
                )


if __name__ == "__main__":
    main()
