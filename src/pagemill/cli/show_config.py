"""Shows a command's settings as they take effect, as a file that `--config` takes, with where each comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import msgspec
import typer

from pagemill.cli.setting_sources import KEYS, OF_THE_FILE_ITSELF, SOURCES, flag_of


def lines_of(context: typer.Context, defaults: Mapping[str, Any]) -> Iterator[str]:
    """Yields a line for each setting. Keys are counted, never shown.

    defaults: by flag, where the command itself declares none.
    """
    yield "# The settings of 'pagemill serve', and where each comes from. This is a file for --config."
    for parameter in context.command.params:
        flag = flag_of(parameter)
        if flag in OF_THE_FILE_ITSELF:
            continue
        value, source = context.params.get(str(parameter.name)), context.meta[SOURCES].get(flag, "default")
        if getattr(context.get_parameter_source(str(parameter.name)), "name", "") == "COMMANDLINE":
            source = "command line"
        if flag in KEYS:
            yield f"# {flag}: {'none' if source == 'default' else 'not shown'} ({source})"
        elif source != "default" or not getattr(parameter, "hidden", False):
            shown = defaults.get(flag, value) if source == "default" else value
            yield f"{flag}: {_as_yaml(shown)}  # {source}"


def _as_yaml(value: Any) -> str:
    """Returns a value in the part of YAML that is JSON, with words that need no quotes as they are."""
    if value is MISSING or value is None or value in ([], {}):
        return "null"
    if isinstance(value, Path):
        value = str(value)
    return msgspec.json.encode(value).decode()
