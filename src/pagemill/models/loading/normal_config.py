"""Configurations in Hugging Face's form, completed as transformers does it: with the family's defaults, old spellings
in today's form.

Importing transformers takes one to two seconds. So what it has made is kept in pagemill's cache, by a digest of what it
was made from, and later loads of the same configuration read that.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pagemill.errors import ModelConfigError
from pagemill.hub.registry import cache_dir

_LEFT_OUT = ("model_type", "transformers_version", "quantization_config")


def complete(model_type: str, raw: dict[str, Any], path: Path) -> dict[str, Any]:
    """Returns the settings of config.json, `raw`, which is at `path`, completed.

    Raises ModelConfigError for what transformers does not take.
    """
    settings = {key: value for key, value in raw.items() if key not in _LEFT_OUT}
    made_from = json.dumps([importlib.metadata.version("transformers"), model_type, settings], sort_keys=True)
    kept = cache_dir() / "configurations" / f"{hashlib.sha256(made_from.encode()).hexdigest()}.json"
    with suppress(OSError, ValueError):  # absent, or damaged
        config: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        if config["model_type"] == model_type:
            return config
    text = _ask_transformers(model_type, settings, path)
    _keep(kept, text)
    config = json.loads(text)
    return config


def _ask_transformers(model_type: str, settings: dict[str, Any], path: Path) -> str:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # takes over a second

    try:
        return json.dumps(CONFIG_MAPPING[model_type](**settings).to_dict())
    except Exception as error:  # each configuration class raises its own kinds
        raise ModelConfigError(f"{path} is not a valid configuration of {model_type!r}: {error}") from error


def _keep(path: Path, text: str) -> None:
    """Writes a file in one step. A cache that cannot be written only costs the next load its time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, encoding="utf-8", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
