"""Prepares the arithmetic before anything is computed: checks that the compiled kernels belong to the files here, and
has MKL choose its own."""

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


def settle_vector_math() -> None:
    """Calls each function that torch leaves to MKL, as far as pagemill uses them, once, on one element, in this thread.
    Call it before torch's threads have work.

    MKL 2024.2, which torch 2.13 brings, chooses a function's kernel at its first call. When several threads make that
    call together, one may compute its share with a kernel of low precision (about 1e-5 of the result), that once:
    https://github.com/pytorch/pytorch/issues/188792. Rotary angles are computed at first use and kept, so the bits of a
    whole run would hang on it.
    """
    import torch  # not above: `pagemill doctor` checks the kernels without it

    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in (torch.exp, torch.log, torch.sqrt, torch.sin, torch.cos, torch.tanh):
            function(one)


def _sources(csrc: Path) -> hashlib._Hash:
    """Returns the digest of all sources, as CMakeLists.txt computes it."""
    folders = csrc, csrc / "bindings", csrc / "isa"
    files = [path for folder in folders for path in folder.iterdir() if path.suffix in (".cpp", ".h")]
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
