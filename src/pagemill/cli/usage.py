"""Says what is wrong with a command line, in one line."""

from __future__ import annotations

import difflib
from typing import Any, cast

import typer

WrongUsage = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""What typer raises for a command line that it cannot read; it exports this child of it only."""

FIRST_MODEL = "smollm2-135m"
"""The model that is offered where none is named."""
NEAR = 0.7
"""The likeness from which on another flag is named."""


def words_of(error: Any, command: str) -> str:
    """Returns what is wrong, and where the way out stands. command: what was called, where the error names nothing."""
    said = _what_is_wrong(error)
    command = command if error.ctx is None else error.ctx.command_path
    return f"{said}{'' if said.endswith('?') else ';'} see {command} --help"


def _what_is_wrong(error: Any) -> str:
    flag, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if flag and hasattr(error, "possibilities"):
        near = difflib.get_close_matches(flag, error.possibilities or (), n=3, cutoff=NEAR)
        return f"there is no flag {flag}" + (f"; did you mean {' or '.join(near)}?" if near else "")
    if param and hasattr(error.__cause__, "errors"):  # pydantic's, which converts values for typer
        wrong = error.__cause__.errors()[0]
        must = wrong["msg"].partition(",")[0].removeprefix("Input should be ")
        return f"{param.opts[0]} is {wrong['input']!r}; it must be {must}"
    if param is not None and param.name == "model" and error.format_message().startswith("Missing argument"):
        return f"no model is named; to begin with, a small one: {error.ctx.command_path} {FIRST_MODEL}"
    said: str = error.format_message().rstrip(".").removeprefix("Invalid value: ")
    said = said.replace("No such command", "there is no command").replace(". Did you mean", "; did you mean")
    return f"{said[:1].lower()}{said[1:]}"
