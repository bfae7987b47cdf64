"""Says what is wrong with a command line, in one line."""

from __future__ import annotations

import difflib
from typing import Any, cast

import typer

WrongUsage = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""What typer raises for a command line that it cannot read; it exports this child of it only."""

NEAR = 0.7
"""The likeness from which on another flag is named."""


def words_of(error: Any) -> str:
    """Returns what is wrong, and where the way out stands."""
    said = error.format_message().rstrip(".")
    if (flag := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        near = difflib.get_close_matches(flag, error.possibilities or (), n=3, cutoff=NEAR)
        said = f"there is no flag {flag}" + (f"; did you mean {' or '.join(near)}?" if near else "")
    command = "pagemill" if error.ctx is None else error.ctx.command_path
    return f"{said}{'' if said.endswith('?') else ';'} see {command} --help"
