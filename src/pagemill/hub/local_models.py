"""Lists and removes the models that have been fetched to this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.errors import ModelNotFoundError, shown
from pagemill.hub import huggingface
from pagemill.hub.registry import REGISTRY, pulled_models


@dataclass(frozen=True)
class LocalModel:
    """One model on this machine. used_s: seconds since 1970 of the last time that its files were read or fetched."""

    name: str
    path: Path
    bytes: int
    used_s: float


def local_models() -> list[LocalModel]:
    """Returns what commands take as MODEL without fetching anything, by name."""
    own = [LocalModel(name, path, *_size_and_use(path)) for name, path in pulled_models().items()]
    return sorted([*own, *_of_hugging_face()], key=lambda model: model.name)


def remove_model(name: str) -> int:
    """Deletes a model that was fetched, and returns how many bytes came free. Raises ModelNotFoundError."""
    if name in pulled_models():
        path = REGISTRY[name].file
        freed = path.stat().st_size
        shutil.rmtree(path.parent)
        return freed
    cache = _cache()
    repos = [] if cache is None else [repo for repo in cache.repos if (repo.repo_id, repo.repo_type) == (name, "model")]
    if not repos:
        known = ", ".join(model.name for model in local_models()) or "none"
        raise ModelNotFoundError(
            f"no model {shown(name)} has been fetched; those that have: {known} (of a file in a repository, give "
            f"org/name; what lies under a path of your own is yours to delete)",
            param="model",
        )
    assert cache is not None
    plan = cache.delete_revisions(*(revision.commit_hash for revision in repos[0].revisions))
    plan.execute()
    return int(plan.expected_freed_size)


def _of_hugging_face() -> Iterator[LocalModel]:
    """Yields the models in Hugging Face's cache that are whole: repositories, and GGUF files of those with several."""
    cache = _cache()
    for repo in () if cache is None else cache.repos:
        if repo.repo_type != "model":
            continue
        path = huggingface.cached(repo.repo_id)
        if path is not None:
            yield LocalModel(repo.repo_id, path, repo.size_on_disk, repo.last_accessed)
            continue
        for file in {file.file_name: file for revision in repo.revisions for file in revision.files}.values():
            if file.file_name.endswith(".gguf"):
                name = f"{repo.repo_id}:{file.file_name}"
                yield LocalModel(name, file.file_path, file.size_on_disk, file.blob_last_accessed)


def _cache() -> Any:
    """Returns what Hugging Face's cache holds, None where there is none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _size_and_use(path: Path) -> tuple[int, float]:
    status = path.stat()
    return status.st_size, max(status.st_atime, status.st_mtime)
