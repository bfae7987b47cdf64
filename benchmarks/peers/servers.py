"""Measures pagemill's server beside vLLM's, in turns: the same requests, streamed over HTTP, prompts as token ids.

    python -m benchmarks.peers.servers [--workloads mixed,prefix] [--rounds 3] [--engines pagemill,vllm]

Both servers stay up; only one of them is asked at a time. The clients read bytes, in one thread, and count events.
Needs `python -m benchmarks.peers.install vllm`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator

import httpx
from benchmarks.peers import workloads
from benchmarks.peers.engines import CHECKPOINT, ENGINES, MODEL, process_environment
from benchmarks.peers.workloads import Workload
from benchmarks.streamed_answer import ask

NAME = "model"
"""The served model's name."""


def command_of(engine: str, port: int) -> list[str]:
    """Returns what starts a server of an engine. Raises ValueError for an engine that has none here."""
    setup = ENGINES[engine]
    flags = ["--port", str(port), "--served-model-name", NAME, "--dtype", str(setup.settings["dtype"])]
    if setup.adapter == "pagemill":
        return [str(setup.python), "-m", "pagemill", "serve", MODEL, *flags, "--speculative-config", "off"]
    if setup.adapter != "vllm":
        raise ValueError(f"{engine!r} has no server here; name engines of pagemill and vLLM")
    eager = ["--enforce-eager"] if setup.settings.get("enforce_eager") else []
    return [str(setup.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(CHECKPOINT), *flags, *eager]


@contextlib.contextmanager
def serving(engine: str) -> Iterator[str]:
    """Gives the URL of a server of this engine once it is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(
            command_of(engine, port),
            env=process_environment(ENGINES[engine]),
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as process,
    ):
        try:
            while True:
                if process.poll() is not None:
                    log.seek(0)
                    raise RuntimeError(log.read().decode(errors="replace")[-3000:])
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                        break
                time.sleep(0.2)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


async def measure(url: str, workload: Workload) -> tuple[float, list[float]]:
    """Runs a workload's requests at once. Returns the seconds that all took, and each one's to its first byte."""
    limits, timeout = httpx.Limits(max_connections=None), httpx.Timeout(600)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout) as client:
        began_s = time.perf_counter()
        asked = zip(workload.prompts, workload.max_tokens, strict=True)
        answers = await asyncio.gather(*(ask(client, NAME, prompt, tokens) for prompt, tokens in asked))
        return time.perf_counter() - began_s, [first_s for first_s, _ in answers]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", default="pagemill,vllm", help="the first is compared with each of the others")
    parser.add_argument("--workloads", default="mixed")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    engines, text = options.engines.split(","), workloads.tokenize(MODEL)
    with contextlib.ExitStack() as servers:
        urls = {engine: servers.enter_context(serving(engine)) for engine in engines}
        for name in options.workloads.split(","):
            speeds: dict[str, list[float]] = {engine: [] for engine in engines}
            for url in urls.values():  # what a first use costs is not counted
                asyncio.run(measure(url, workloads.make(name, text, options.rounds)))
            for number in range(options.rounds):
                workload = workloads.make(name, text, number)
                for engine, url in urls.items():
                    took_s, firsts = asyncio.run(measure(url, workload))
                    speeds[engine].append(workload.output_tokens / took_s)
                    print(
                        f"{name}, round {number + 1}, {engine}: {speeds[engine][-1]:.0f} output tokens/s; first byte "
                        f"after {statistics.median(firsts):.2f} s in the median",
                        flush=True,
                    )
            for other in engines[1:]:
                ratios = [own / its for own, its in zip(speeds[engines[0]], speeds[other], strict=True)]
                shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
                print(f"{name}: {engines[0]} over {other}: {statistics.median(ratios):.2f}x ({shown})")


if __name__ == "__main__":
    main()
