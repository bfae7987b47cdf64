"""Measures how fast blocks come from another engine: against the loopback itself, and against computing them.

    python -m benchmarks.fetch [--dtype float32] [--tokens 1024,4096] [--rounds 5]

A second process runs an engine that computes prompts and gives their blocks. This one asks for the first token of each
prompt: computed, fetched, and found in the pool, which says what the step takes. Between, bare sockets move as many
bytes by as many connections, in the same pieces, which is the limit; and blocks are read into plain memory, checksums
included. Medians of rounds, each of which takes prompts that are new to both engines; the first is not counted, since
it pays for memory that the system has to find.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import numpy as np
from benchmarks.peers.engines import MODEL
from benchmarks.peers.machine import describe_machine, heading
from benchmarks.peers.workloads import tokenize
from numpy.typing import NDArray

from pagemill import SamplingParams
from pagemill.config import EngineConfig
from pagemill.engine.core import EngineCore
from pagemill.engine.messages import EngineRequest, HeldBlocks, Peering
from pagemill.hub import resolve_model
from pagemill.memory.digest import extend_chain

THREADS = 4
"""As `Transfers` has."""
PIECE_BYTES = 4 << 20
SECRET = bytes(32)


def make_engine(dtype: str, longest: int, threads: int) -> EngineCore:
    config = EngineConfig(
        str(resolve_model(MODEL)), dtype=dtype, kv_memory="1GiB", max_model_len=longest + 64, num_threads=threads,
        hf_overrides={"max_position_embeddings": longest + 64},
    )  # fmt: skip
    return EngineCore(config, peering=Peering(SECRET, "127.0.0.1"))


def first_token_s(core: EngineCore, name: str, prompt: list[int], held: HeldBlocks | None = None) -> float:
    """Returns the seconds from a request to its first token, and its last."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    begin = time.perf_counter()
    core.add_request(
        EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, arrival_s=time.monotonic(), held=held)
    )
    while core.has_work():
        core.step()
    return time.perf_counter() - begin


def hold(pipe: Any, dtype: str, longest: int, threads: int) -> None:
    """Runs the other engine: computes the prompts that come, and says where their blocks are."""
    core = make_engine(dtype, longest, threads)
    listener = socket.create_server(("127.0.0.1", 0))
    pipe.send((core.ready.peer_address, listener.getsockname()[1]))
    content = bytes(PIECE_BYTES)
    while (asked := pipe.recv()) is not None:
        name, prompt, nbytes = asked
        core.reset_prefix_cache()
        first_token_s(core, name, prompt)
        pipe.send(True)
        with ThreadPoolExecutor(THREADS) as pool:
            pool.map(
                send, [listener.accept()[0] for _ in range(THREADS)], [content] * THREADS, [nbytes // THREADS] * THREADS
            )
    core.close()


def send(sock: socket.socket, content: bytes, nbytes: int) -> None:
    with sock:
        sock.recv(1)
        for at in range(0, nbytes, PIECE_BYTES):
            sock.sendall(memoryview(content)[: nbytes - at])


def loopback_s(port: int, nbytes: int) -> float:
    """Returns the seconds in which bare sockets bring so many bytes."""
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(THREADS)]
    buffers = [memoryview(bytearray(PIECE_BYTES)) for _ in socks]

    def receive(at: int) -> None:
        with socks[at] as sock:
            sock.sendall(b"!")
            while sock.recv_into(buffers[at], PIECE_BYTES, socket.MSG_WAITALL):
                pass

    return timed(receive, range(THREADS))


def timed(work: Callable[[Any], None], parts: Any) -> float:
    with ThreadPoolExecutor(THREADS) as pool:
        begin = time.perf_counter()
        list(pool.map(work, parts))
        return time.perf_counter() - begin


def read_s(core: EngineCore, address: str, digests: list[bytes], out: NDArray[np.uint8]) -> float:
    """Returns the seconds in which a peer's blocks are read into memory."""
    assert core.tiers is not None
    assert core.tiers.peers is not None
    store, nbytes = core.tiers.peers.store, core.executor.facts.record_bytes
    store.note_held(address, digests)
    step = max(1, PIECE_BYTES // nbytes)

    def read(first: int) -> None:
        found = store.read([(digest, 0) for digest in digests[first : first + step]], out[first : first + step])
        assert None not in found

    return timed(read, range(0, len(digests), step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of each engine")
    arguments = parser.parse_args()
    print(heading(describe_machine()), end="\n\n")
    lengths = [int(length) for length in arguments.tokens.split(",")]
    text, at = tokenize(MODEL), 0
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    other = context.Process(target=hold, args=(theirs, arguments.dtype, max(lengths), arguments.threads), daemon=True)
    other.start()
    core = make_engine(arguments.dtype, max(lengths), arguments.threads)
    assert core.tiers is not None
    record_bytes, size = core.executor.facts.record_bytes, core.memory.block_size
    address, port = mine.recv()
    memory = np.ones((max(lengths) // size, record_bytes), dtype=np.uint8)
    print("| tokens | MB | loopback, MB/s | blocks into memory, MB/s | computed, s | fetched, s | in the pool, s |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for length in lengths:
        rounds = []
        for number in range(arguments.rounds + 1):
            prompt, at = [number + 1, *text[at : at + length - 1]], (at + length) % (len(text) - length)
            name, blocks = f"{length}.{number}", length // size
            mine.send((name, prompt, blocks * record_bytes))
            mine.recv()
            bare_s = loopback_s(port, blocks * record_bytes)
            digests: list[bytes] = []
            extend_chain(digests, core.root(EngineRequest(
                request_id=name, prompt_token_ids=prompt, params=SamplingParams(), arrival_s=0.0
            )), prompt, size)  # fmt: skip
            copied_s = read_s(core, address, digests, memory)
            core.tiers.prefill.s_per_token = 0.0
            core.reset_prefix_cache()
            computed_s = first_token_s(core, f"{name} computed", [*prompt[:-1], 0][::-1])
            core.tiers.prefill.s_per_token = 0.0  # so that it is fetched whatever that takes
            core.reset_prefix_cache()
            before = core.stats().blocks_fetched
            fetched_s = first_token_s(core, f"{name} fetched", prompt, HeldBlocks(address, blocks))
            wanted = (length - 1) // size
            assert core.stats().blocks_fetched - before == wanted, core.stats().fetches_failed
            found_s = first_token_s(core, f"{name} found", prompt)
            mb = blocks * record_bytes / 1e6
            rounds.append((mb, mb / bare_s, mb / copied_s, computed_s, fetched_s, found_s))
        mb, bare, copied, *seconds = (median(each) for each in zip(*rounds[1:], strict=True))
        print(f"| {length} | {mb:.0f} | {bare:.0f} | {copied:.0f} | {' | '.join(f'{each:.3f}' for each in seconds)} |")
    mine.send(None)
    core.close()
    other.join(10)


if __name__ == "__main__":
    main()
