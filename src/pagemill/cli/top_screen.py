"""The window of `pagemill top`."""

from __future__ import annotations

import sys
from copy import copy

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pagemill.cli.top_frame import SORTS, View, frame
from pagemill.cli.top_picture import Picture

LINES_OF_A_PIPE = 60
"""The height of a frame that goes into a pipe, whose lines are as many as there is something to say."""


class TopScreen:
    """Shows the last picture. While it is open, it has the whole window."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self._picture: Picture | None = None
        self._sort = 0
        self._paused = False
        self._lost = ""

    def __enter__(self) -> TopScreen:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @property
    def has_picture(self) -> bool:
        return self._picture is not None

    def show(self, picture: Picture) -> None:
        """Takes in a picture, which may change afterwards."""
        self._lost = ""
        if not self._paused:
            self._picture = copy(picture)
            self._draw()

    def lost(self, why: str) -> None:
        """Says why no pictures come."""
        self._lost = why
        self._draw()

    def press(self, key: str) -> None:
        """p pauses and goes on, s chooses the next order."""
        if key == "p":
            self._paused = not self._paused
        elif key == "s":
            self._sort = (self._sort + 1) % len(SORTS)
        else:
            return
        self._draw()

    def print_once(self) -> None:
        """Prints one frame as plain lines."""
        console = self._console
        view = self._view(console.width, console.height if console.is_terminal else LINES_OF_A_PIPE)
        for line in self._lines(view):
            console.print(line, no_wrap=True, crop=False)

    def _draw(self) -> None:
        if self._live.is_started and self._picture is not None:
            keys = sys.stdin.isatty()
            view = self._view(*self._console.size)._replace(keys=keys)
            self._live.update(Group(*self._lines(view)), refresh=True)

    def _lines(self, view: View) -> list[Text]:
        assert self._picture is not None
        return frame(self._picture, self._title, view)

    def _view(self, width: int, height: int) -> View:
        status = f"not connected: {self._lost}" if self._lost else "paused" if self._paused else ""
        return View(width, height, list(SORTS)[self._sort], status, ascii_only=self._console.options.ascii_only)
