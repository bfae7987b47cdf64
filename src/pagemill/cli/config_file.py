"""Reads a configuration file: YAML with one entry for each flag, under the flag's name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from pagemill.errors import ConfigError, shown


@dataclass(frozen=True)
class Given:
    """A setting's value, as the words of a command line would have it, and where it stands.

    A list of words for several values, JSON for a mapping (`is_mapping`), None for the default.
    """

    value: str | list[str] | None
    source: str
    is_mapping: bool = False


def read_config_file(path: Path) -> dict[str, Given]:
    """Returns the entries of a file by their flag's name (`max-model-len`; `max_model_len` is the same).

    Raises ConfigError, which names the file and the line, for what is no such file, and for a name that comes twice.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return dict(_entries(path, root))
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise ConfigError(f"config file {str(path)!r}{place}: {error.problem}; correct it", param="config") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        why = " ".join(str(error).split()) or "its nodes contain themselves"
        raise ConfigError(f"config file {str(path)!r} cannot be read: {why}", param="config") from error


def _entries(path: Path, root: yaml.Node | None) -> Iterator[tuple[str, Given]]:
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise _refused(path, root, "the file must have one 'name: value' for each setting, such as 'port: 8000'")
    _check_once(path, root)
    for key, node in root.value:
        yield key.value.replace("_", "-"), _given(path, key.value, node)


def _given(path: Path, name: str, node: yaml.Node) -> Given:
    source = f"{path}, line {node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        _check_once(path, node)
        loader = yaml.SafeLoader("")
        try:
            return Given(msgspec.json.encode(loader.construct_document(node)).decode(), source, is_mapping=True)
        finally:
            loader.dispose()
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(item, yaml.ScalarNode) for item in node.value):
            raise _refused(path, node, f"{name} is a list of more than words and numbers")
        return Given([item.value for item in node.value], source)
    return Given(None if node.tag == "tag:yaml.org,2002:null" else node.value, source)


def _check_once(path: Path, mapping: yaml.MappingNode) -> None:
    """Raises ConfigError where two names of a mapping, or of one in it, are the same."""
    names = set()
    for key, node in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused(path, key, "a name is a list or a mapping; it must be a word")
        name = key.value.replace("_", "-")
        if name in names:
            raise _refused(path, key, f"{shown(key.value)} is given twice; give it once")
        names.add(name)
        if isinstance(node, yaml.MappingNode):
            _check_once(path, node)


def _refused(path: Path, node: Any, why: str) -> ConfigError:
    return ConfigError(f"config file {str(path)!r}, line {node.start_mark.line + 1}: {why}", param="config")
