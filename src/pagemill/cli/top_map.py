"""The block map as lines of characters, each for one block or for several."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rich.text import Text

from pagemill.cli.top_picture import Picture, Tier


class Look(NamedTuple):
    """How blocks of a state look: also without colours, and in ASCII."""

    label: str
    mark: str
    ascii: str
    colour: str


FREE = Look("free", "·", ".", "bright_black")
LOOKS = {
    "cached": Look("cached", "░", "-", "#56b4e9"),
    "active": Look("in use", "▒", "o", "#009e73"),
    "shared": Look("shared", "▓", "s", "#e69f00"),
    "pinned": Look("pinned", "█", "#", "#cc79a7"),
    "loading": Look("loading", "↓", "v", "#d55e00"),
}
"""Colours that people with any colour vision tell apart (Okabe and Ito), as on the page."""


def states_of(picture: Picture) -> list[Look]:
    """Returns the looks of the map's states, in the order of its columns; the last two columns are no states."""
    return [LOOKS[name] for name in picture.columns[:-2]]


def legend(picture: Picture, ascii_only: bool) -> Text:
    """Returns what the marks mean, with how many blocks of all tiers have each now."""
    looks = states_of(picture)
    counts = [
        int(sum(tier.cells[:, state].sum(dtype=np.int64) for tier in picture.tiers)) for state in range(len(looks))
    ]
    free = sum(tier.num_frames for tier in picture.tiers) - sum(counts)
    line = Text()
    for look, count in zip([FREE, *looks], [free, *counts], strict=True):
        line.append(look.ascii if ascii_only else look.mark, style=look.colour).append(f" {look.label} {count:,}  ")
    return line


def map_lines(picture: Picture, tier: Tier, width: int, most_lines: int, ascii_only: bool) -> tuple[list[Text], int]:
    """Returns a tier's map, and how many blocks a character stands for: for several, the state that most of those
    that are not free have; dim where more than half is free."""
    if not len(tier.cells):
        return [], 1
    looks = states_of(picture)
    per_mark = max(1, -(-len(tier.cells) // (width * most_lines)))
    begins = np.arange(0, len(tier.cells), per_mark)
    counts: npt.NDArray[np.int64] = np.add.reduceat(tier.cells[:, : len(looks)].astype(np.int64), begins, axis=0)
    used, blocks = counts.sum(axis=1), per_mark * tier.frames_per_cell
    latest_most = len(looks) - 1 - np.argmax(counts[:, ::-1], axis=1)
    lines = []
    for first in range(0, len(begins), width):
        line = Text()
        for at in range(first, min(first + width, len(begins))):
            look = looks[latest_most[at]] if used[at] else FREE
            style = f"{look.colour} dim" if used[at] and 2 * used[at] < blocks else look.colour
            line.append(look.ascii if ascii_only else look.mark, style=style)
        lines.append(line)
    return lines, blocks
