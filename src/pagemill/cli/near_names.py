"""Finds the flags, settings and commands that a wrong name may have been meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from typing import Any

FLAGS_ELSEWHERE = {
    "ctx-size": "max-model-len",
    "n-ctx": "max-model-len",
    "c": "max-model-len",
    "context-length": "max-model-len",
    "num-requests": "num-prompts",
    "tp": "tensor-parallel-size",
    "tp-size": "tensor-parallel-size",
}
"""Flags here, by the names that other engines have for them."""
COMMANDS_ELSEWHERE = {"run": "chat", "list": "ls", "ps": "top"}
"""Commands here, by the names that other programs have for them."""
MODEL_ELSEWHERE = ("model", "model-path", "m")
"""Flags with which other engines take the model."""
NEAR = 0.7
"""The likeness from which on another name is named."""


def near_flags(name: str, known: Collection[str], most: int = 3) -> list[str]:
    """Returns those of the known flags that a name may stand for, the nearest first. All are without dashes."""
    if (ours := FLAGS_ELSEWHERE.get(name)) in known:
        return [str(ours)]
    return difflib.get_close_matches(name, known, n=most, cutoff=NEAR)


def near_commands(name: str, known: Collection[str]) -> list[str]:
    """Returns those of the known commands that a name may stand for, the nearest first."""
    if (ours := COMMANDS_ELSEWHERE.get(name)) in known:
        return [str(ours)]
    return difflib.get_close_matches(name, known, n=3)


def shown_flags(parameters: Iterable[Any]) -> list[str]:
    """Returns the flags of a command that its help shows, without dashes; those before "no-" too."""
    options = [one for one in parameters if one.param_type_name == "option" and not one.hidden]
    return [flag.lstrip("-") for one in options for flag in (*one.opts, *one.secondary_opts)]
