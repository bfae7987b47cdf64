"""How commands print listings: a table for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")]


def print_listing(rows: Sequence[Mapping[str, Any]], table: Table, nothing: str, as_json: bool) -> None:
    """Prints a listing to stdout. nothing: what is said where it is empty."""
    if as_json:
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    elif not rows:
        sys.stdout.write(f"{nothing}\n")
    else:
        console = Console(markup=False)
        if not console.is_terminal:
            console.width = 1 << 16  # whoever reads it gets whole columns
        console.print(table)
