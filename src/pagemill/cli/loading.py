"""Starts an engine for a command: a progress bar while the weights load, then one line that says what runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from pagemill.frontend.async_llm import AsyncLLM

messages = Console(stderr=True, highlight=False)
"""For what people read; stdout is for what a command produces."""


class LoadingBar(Progress):
    """A bar on stderr, in bytes of weights; nothing where stderr is no terminal."""

    def __init__(self, model: str) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
        super().__init__(*columns, console=messages, transient=True, disable=not messages.is_terminal)
        self._loading = self.add_task(f"loading {model}", total=None)

    def __call__(self, done: int, total: int) -> None:
        self.update(self._loading, completed=done, total=total)


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
    messages.print(ready.description, style="dim")
    async with llm:
        yield llm
