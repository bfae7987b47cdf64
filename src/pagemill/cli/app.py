"""The `pagemill` command's flags and help: finds the sub-command's module when it is asked for.

Nothing here, and nothing that a sub-command's module imports at its top, loads torch: help and errors come at once.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import pagemill
from pagemill.cli.help import GroupWithHelp
from pagemill.cli.several_values import SeveralValues

# The function, or group of commands, COMMAND in pagemill.cli.COMMAND, and its line in `pagemill --help` (the first line
# of its docstring).
COMMANDS = {
    "generate": "Continue one or more prompts.",
    "chat": "Talk to a model in the terminal.",
    "serve": "Serve a model through OpenAI's API.",
    "top": "Watch a server's KV memory and requests in the terminal.",
    "bench": "Measure throughput and latency on a workload.",
    "calibrate": "Measure a model on this machine, and make a device of it.",
    "plan": "Say how many replicas serve a load within limits.",
    "pull": "Fetch a model and check it.",
    "ls": "List the models that are on this machine.",
    "rm": "Delete models that were fetched to this machine.",
    "cache": "List, check, shrink and carry KV blocks that are kept on disk.",
    "sessions": "List and delete the conversations that are kept in a file.",
    "doctor": "Show what this machine offers, for bug reports.",
}


HELP_FLAGS = {"help_option_names": ["-h", "--help"]}


def command_group(description: str) -> typer.Typer:
    """Returns a group of commands, still empty."""
    return typer.Typer(
        cls=GroupWithHelp,
        add_completion=False,
        context_settings=HELP_FLAGS,
        help=description,
        rich_markup_mode=None,
    )


class LazyGroup(GroupWithHelp):
    """Lists commands by name and one line of help; imports the module of the one that runs."""

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        self.commands = {name: TyperCommand(name, help=line) for name, line in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(name), rest


def load_command(name: str | None) -> Any:
    """Returns a sub-command, or group of them, as click has it. Imports its module."""
    function = getattr(importlib.import_module(f"pagemill.cli.{name}"), str(name))
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(add_completion=False, context_settings=HELP_FLAGS, rich_markup_mode=None)
    single.command(name, cls=SeveralValues)(function)
    return typer.main.get_command(single)


def _show_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"pagemill {pagemill.__version__}\n")
        raise typer.Exit


app = typer.Typer(
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    context_settings=HELP_FLAGS,
    rich_markup_mode=None,
)


@app.callback()
def pagemill_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """LLM inference and serving with a real virtual-memory system for the KV cache."""
