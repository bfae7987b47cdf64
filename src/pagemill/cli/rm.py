"""`pagemill rm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pagemill.hub.local_models import remove_model


def rm(
    models: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Names, or Hugging Face ids (org/name), with all files.")
    ],
) -> None:
    """Delete models that were fetched to this machine.

    Models in Hugging Face's cache are deleted there, for other programs too.
    """
    for name in models:
        freed = remove_model(name)
        sys.stdout.write(f"{name} deleted, {freed / 2**20:,.0f} MiB came free\n")
