"""Whether the compiled kernels belong to these Python files: a checkout moves on without its binary."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

from pagemill.errors import StaleKernelsError


def check_compiled() -> None:
    """Raises StaleKernelsError unless the kernels were compiled with the interface in `_kernels.pyi` as it is now."""
    compiled = getattr(importlib.import_module("pagemill._kernels"), "interface", None)
    here = hashlib.sha256(Path(__file__).parents[1].joinpath("_kernels.pyi").read_bytes()).hexdigest()
    if compiled != here:
        name = "none" if compiled is None else compiled[:8]
        raise StaleKernelsError(
            f"the compiled kernels have interface {name}, the Python files {here[:8]}: they are of different versions; "
            "run `make build` in the checkout, or install pagemill again"
        )
