"""Says what is wrong with a command line, in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import typer

from pagemill.cli.near_names import MODEL_ELSEWHERE, near_commands, near_flags, shown_flags
from pagemill.names_elsewhere import INSTEAD

WrongUsage = cast("type[Exception]", typer.BadParameter.__mro__[2])
"""What typer raises for a command line that it cannot read; it exports this child of it only."""

FIRST_MODEL = "smollm2-135m"
"""The model that is offered where none is named."""


def words_of(error: Any, command: str, given: Sequence[str]) -> str:
    """Returns what is wrong, and where the way out stands.

    command: what was called, where the error names nothing. given: the words of the command line.
    """
    said = _what_is_wrong(error, given)
    command = command if error.ctx is None else error.ctx.command_path
    return f"{said}{'' if said.endswith('?') else ';'} see {command} --help"


def _what_is_wrong(error: Any, given: Sequence[str]) -> str:
    flag, param = getattr(error, "option_name", None), getattr(error, "param", None)
    if flag and hasattr(error, "possibilities"):
        return _no_flag(flag if flag.startswith("--") else _whole(flag, given), error.ctx)
    if param and hasattr(error.__cause__, "errors"):  # pydantic's, which converts values for typer
        wrong = error.__cause__.errors()[0]
        choice = re.search(r" is not (one of .*)\.$", wrong["msg"])
        must = choice[1] if choice else wrong["msg"].partition(",")[0].removeprefix("Input should be ")
        return f"{param.opts[0]} is {wrong['input']!r}; it must be {must}"
    if param is not None and param.name == "model" and error.format_message().startswith("Missing argument"):
        return f"no model is named; to begin with, a small one: {error.ctx.command_path} {FIRST_MODEL}"
    if (extra := _extra(error, given)) is not None:
        has_url = any("--url" in one.opts for one in error.ctx.command.params)
        hint = f"; did you mean --url {extra}?" if has_url and "://" in extra else ""
        return f"there is no place for {extra!r}{hint}"
    said: str = error.format_message().rstrip(".").removeprefix("Invalid value: ")
    if unknown := re.match(r"No such command '(.*?)'", said):
        near = near_commands(unknown[1], error.ctx.command.commands)
        return f"there is no command {unknown[1]!r}" + _guess(map(repr, near))
    return f"{said[:1].lower()}{said[1:]}"


def _extra(error: Any, given: Sequence[str]) -> str | None:
    """Returns the first word that a command has no place for; None where the error is another."""
    found = re.match(r"Got unexpected extra \S+ \((.*)\)", error.format_message())
    return None if found is None else next((word for word in given if found[1].startswith(word)), found[1])


def _no_flag(flag: str, context: Any) -> str:
    """Returns what to say of a flag that the command does not have. It names none that help does not show."""
    name, parameters = flag.lstrip("-"), context.command.params
    if name in MODEL_ELSEWHERE and any(one.param_type_name == "argument" and one.name == "model" for one in parameters):
        return f"there is no flag {flag}; MODEL is given without a flag: {context.command_path} MODEL"
    if (instead := INSTEAD.get(name.replace("-", "_"))) is not None:
        return f"there is no flag {flag}; {instead}"
    near = [f"--{one}" for one in near_flags(name, shown_flags(parameters))]
    return f"there is no flag {flag}" + _guess(near)


def _whole(flag: str, given: Sequence[str]) -> str:
    """Returns the word of a command line of which an error names the first letter, as -t of -tp."""
    return next((word.partition("=")[0] for word in given if word.startswith(flag)), flag)


def _guess(near: Iterable[str]) -> str:
    words = " or ".join(near)
    return f"; did you mean {words}?" if words else ""
