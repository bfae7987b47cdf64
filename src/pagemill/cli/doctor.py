"""`pagemill doctor`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pagemill.doctor import as_markdown, examine


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of Markdown.")] = False) -> None:
    """Show what this machine offers, for bug reports.

    Prints Markdown that can be pasted into an issue as it is.
    """
    report = examine()
    sys.stdout.write((json.dumps(report, indent=2) if as_json else as_markdown(report)) + "\n")
