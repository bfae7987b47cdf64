"""Markdown that is written while it comes: what is finished is printed once, only the last block is drawn anew."""

from __future__ import annotations

import asyncio
import time

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

from pagemill.cli.wording import printable

PERIOD_S = 0.05
"""The last block is drawn no more often."""
PARSER = MarkdownIt().enable("table").enable("strikethrough")


class MarkdownStream:
    """An answer in a terminal, its reasoning dim before it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasoning = self._rest = ""
        self._printed = False
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._last_block)
        self._drawn_s = 0.0
        self._drawing: asyncio.TimerHandle | None = None

    def __enter__(self) -> MarkdownStream:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Prints what is left, whole."""
        if self._drawing is not None:
            self._drawing.cancel()
        rest, self._rest = self._rest, ""
        self._end_reasoning()
        for block in blocks(rest, whole=True):
            if block.strip():
                self._print(_markdown(block))
        self._live.stop()

    def add(self, content: str, reasoning: str) -> None:
        """Takes what is new."""
        self._reasoning += printable(reasoning)
        if content:
            self._end_reasoning()
            self._rest += printable(content)
        *whole, self._rest = blocks(self._rest)
        for block in whole:
            self._print(_markdown(block))
        self._draw_soon()

    def draw(self) -> None:
        """Draws the last block as it is now."""
        self._drawing, self._drawn_s = None, time.monotonic()
        self._live.refresh()

    def _end_reasoning(self) -> None:
        text, self._reasoning = self._reasoning, ""
        if text.strip():
            self._print(Text(text.strip(), style="dim"))

    def _print(self, block: RenderableType) -> None:
        self._console.print(_Lines(block, self._printed))
        self._printed = True

    def _draw_soon(self) -> None:
        if self._drawing is None:
            wait_s = max(0.0, self._drawn_s + PERIOD_S - time.monotonic())
            self._drawing = asyncio.get_running_loop().call_later(wait_s, self.draw)

    def _last_block(self) -> RenderableType:
        most = max(1, self._console.height - 2)  # what is drawn anew must fit into the window
        if self._reasoning.strip():
            return _Lines(Text(self._reasoning.strip(), style="dim"), self._printed, most)
        return _Lines(_markdown(self._rest), self._printed, most) if self._rest.strip() else ""


class _Lines:
    """A block without empty lines around it; of many lines the last. space_before: one empty line goes before it."""

    def __init__(self, block: RenderableType, space_before: bool, most: int | None = None) -> None:
        self._block = block
        self._space_before = space_before
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._block, options.update(height=None), pad=False)
        said = [at for at, line in enumerate(lines) if "".join(segment.text for segment in line).strip()]
        lines = lines[said[0] : said[-1] + 1] if said else []
        if self._space_before:
            lines.insert(0, [])
        for line in lines if self._most is None else lines[-self._most :]:
            yield from line
            yield Segment.line()


def blocks(text: str, whole: bool = False) -> list[str]:
    """Returns the blocks of a text; only the last one may change with what follows, if the text is not whole.

    A line without an end may belong to the block before it, so it begins none yet.
    """
    lines = text.split("\n")
    parsed = PARSER.parse("\n".join(lines if whole else lines[:-1]))
    begins = [token.map[0] for token in parsed if token.level == 0 and token.map and token.nesting >= 0][1:]
    ends = [*begins, len(lines)]
    return ["\n".join(lines[begin:end]) for begin, end in zip([0, *begins], ends, strict=True)]


def _markdown(text: str) -> Markdown:
    return Markdown(text, hyperlinks=False)
