"""Checks that the compiled kernels belong to the files here: a checkout moves on without its binary."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

from pagemill.errors import StaleKernelsError

PACKAGE = Path(__file__).parents[1]


def check_compiled(csrc: Path = PACKAGE.parents[1] / "csrc") -> None:
    """Raises StaleKernelsError unless the kernels were compiled with the interface in `_kernels.pyi` as it is now, and,
    in a checkout, from the C++ sources as they are now."""
    kernels = importlib.import_module("pagemill._kernels")
    _compare(kernels, "interface", "Python files", hashlib.sha256((PACKAGE / "_kernels.pyi").read_bytes()))
    if csrc.is_dir():
        _compare(kernels, "sources", "files in csrc", _sources(csrc))


def _sources(csrc: Path) -> hashlib._Hash:
    """Returns the digest of all sources, as CMakeLists.txt computes it."""
    files = [path for folder in (csrc, csrc / "isa") for path in folder.iterdir() if path.suffix in (".cpp", ".h")]
    digests = (hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files, key=str))
    return hashlib.sha256("".join(digests).encode())


def _compare(kernels: object, attribute: str, files: str, digest: hashlib._Hash) -> None:
    compiled, here = getattr(kernels, attribute, None), digest.hexdigest()
    if compiled != here:
        name = "none" if compiled is None else compiled[:8]
        raise StaleKernelsError(
            f"the compiled kernels have {attribute} {name}, the {files} {here[:8]}: they are of different versions; "
            "run `make build` in the checkout, or install pagemill again"
        )
