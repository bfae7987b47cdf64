"""`pagemill pull`."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pagemill.errors import TokenizerError
from pagemill.hub import pull_model
from pagemill.text.tokenizer_files import read_tokenizer


def pull(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A name (smollm2-135m), a Hugging Face id (org/name, org/name:file.gguf), or a path.",
        ),
    ],
) -> None:
    """Fetch a model and check it.

    The name is then accepted wherever a model's path is. A model that is here already is verified, not fetched again.
    """
    if model and Path(os.path.expanduser(model)).exists():
        sys.stdout.write(f"{model} is a path on this machine: nothing to fetch\n")
        return
    pulled = pull_model(model)
    with contextlib.suppress(TokenizerError):  # a model without one can be served with another's
        read_tokenizer(pulled.path)  # converted and kept now, so that the first start need not
    sys.stdout.write(f"{model} {'is ready' if pulled.fetched else 'is already here and intact'}: {pulled.path}\n")
