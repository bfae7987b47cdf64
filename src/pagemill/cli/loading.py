"""Starts an engine for a command: a progress bar while the weights load, then one line that says what runs."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pagemill.frontend.async_llm import AsyncLLM

messages = Console(stderr=True, highlight=False, markup=False, emoji=False)
"""For what people read; stdout is for what a command produces."""


def invite(engine: str, model: str, address: str, *, has_keys: bool) -> None:
    """Says what is served where, and how to try it. engine: what it is, in words. has_keys: whether one is needed."""
    messages.print(engine, style="dim", soft_wrap=not messages.is_terminal)
    question = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    key = " -H 'Authorization: Bearer KEY'" if has_keys else ""
    messages.print(
        Text.assemble(
            "\n",
            (model, "bold"),
            " is served at ",
            (f"{address}/v1", "bold"),
            ". Try it:\n\n"
            f"  curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{question}'\n\n"
            "Ctrl-C stops the server.",
        ),
        soft_wrap=True,
    )


class LoadingBar(Progress):
    """A bar on stderr, in bytes of weights; nothing where stderr is no terminal."""

    def __init__(self, model: str) -> None:
        columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=messages, transient=True, disable=not messages.is_terminal)
        self._model = model
        self._loading = self.add_task(f"loading {model}", total=None)

    def __call__(self, done: int, total: int) -> None:
        what = "loading" if done < total else "starting"  # which on GPUs compiles kernels and captures graphs
        self.update(self._loading, completed=done, total=total, description=f"{what} {self._model}")


class RequestsBar(Progress):
    """A bar on stderr, in requests that have ended, with the tokens per second so far; nothing without a terminal."""

    def __init__(self, total: int) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeElapsedColumn()
        super().__init__("requests", *columns, console=messages, transient=True, disable=not messages.is_terminal)
        self._requests = self.add_task("requests", total=total, speed="")
        self._tokens = 0
        self._started_s = time.monotonic()

    def ended(self, tokens: int) -> None:
        """Counts a request that has ended with so many tokens."""
        self._tokens += tokens
        speed = self._tokens / max(time.monotonic() - self._started_s, 1e-3)
        self.update(self._requests, advance=1, speed=f"{speed:.0f} tokens/s")


@asynccontextmanager
async def loaded_engine(model: str, settings: dict[str, Any]) -> AsyncIterator[AsyncLLM]:
    """Yields an engine that is ready. Raises what keeps it from loading."""
    with LoadingBar(model) as bar:
        llm = AsyncLLM(model, on_progress=bar, **settings)
        try:
            ready = await llm.ready()
        except BaseException:
            await llm.shutdown()
            raise
    messages.print(ready.description, style="dim", soft_wrap=not messages.is_terminal)
    async with llm:
        yield llm
