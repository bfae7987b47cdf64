"""Takes settings from a file and the environment: a flag comes first, then a variable, the file, the default."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import typer

from pagemill.cli.config_file import Given, read_config_file
from pagemill.cli.near_names import near_flags
from pagemill.errors import ConfigError, shown
from pagemill.server.access.server_access import KEY_VARIABLES

PREFIX = "PAGEMILL_SERVE_"
"""Begins the variable of a setting. Kubernetes gives a Service's pods variables that begin with the Service's name, so
the command's name is in it: a Service is likely to be called pagemill."""
KEYS = {name.replace("_", "-"): variable for name, variable in KEY_VARIABLES.items()}
"""Variables of keys, which every command has under these names."""
OF_THE_FILE_ITSELF = ("config", "show-config", "help")
JSON_OBJECTS = ("default-chat-template-kwargs", "hf-overrides", "speculative-config")
"""Settings whose value is a JSON object, or a mapping in the file."""
PATHS_BY_NAME = ("lora-modules",)
"""Settings that may be given several times, as NAME=PATH, or as a mapping in the file."""
SOURCES = "pagemill.setting_sources"
"""Where a command's context keeps, by flag, where each value that is not the command line's comes from."""


def take_settings(context: typer.Context, config: Path | None) -> Path | None:
    """Makes what the file and the environment say the defaults of the command that is being read.

    Raises ConfigError for a name that is no setting, with the nearest one, and for a value that its flag would refuse.
    """
    place = config or (Path(os.environ[f"{PREFIX}CONFIG"]) if os.environ.get(f"{PREFIX}CONFIG") else None)
    parameters = {flag: one for one in context.command.params if (flag := flag_of(one)) not in OF_THE_FILE_ITSELF}
    given = {} if place is None else read_config_file(place)
    for flag, one in given.items():
        if flag not in parameters:
            raise ConfigError(f"{one.source}: there is no setting {shown(flag)}; {_way_out(flag, parameters)}")
    given |= _of_environment(os.environ, parameters)
    sources = context.meta[SOURCES] = {}
    defaults = {}
    for flag, one in given.items():
        if one.value is None:
            continue
        sources[flag] = one.source
        if not (flag in KEYS and one.source == KEYS[flag]):  # ServerAccess reads those
            defaults[str(parameters[flag].name)] = _value(context, parameters[flag], flag, one)
    context.default_map = defaults
    return place


def flag_of(parameter: Any) -> str:
    """Returns a flag's name without dashes before it, or an argument's name."""
    return str(parameter.opts[0]).removeprefix("--")


def variable_of(flag: str) -> str:
    """Returns the environment variable of a flag."""
    return KEYS.get(flag) or PREFIX + flag.replace("-", "_").upper()


def _of_environment(environment: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Given]:
    """Returns what the environment gives. An empty variable gives nothing."""
    known = {variable_of(flag): flag for flag in parameters}
    for variable in filter(environment.get, environment):
        if variable.startswith(PREFIX) and variable not in known and variable != f"{PREFIX}CONFIG":
            flag = variable.removeprefix(PREFIX).lower().replace("_", "-")
            raise ConfigError(f"the variable {variable} is no setting; {_way_out(flag, parameters, variable_of)}")
    return {
        flag: Given(_words(variable, value, parameters[flag]), variable)
        for variable, flag in known.items()
        if (value := environment.get(variable))
    }


def _words(variable: str, value: str, parameter: Any) -> str | list[str]:
    """Returns a variable's value: a list where the flag may be given several times, written as JSON or as one word."""
    if not _is_list(parameter):
        return value
    if not value.startswith("[") or variable in KEYS.values():
        return [value]
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.DecodeError as error:
        raise ConfigError(f"the variable {variable} is no JSON list of texts: {error}") from None


def _value(context: typer.Context, parameter: Any, flag: str, given: Given) -> Any:
    """Returns a value as the flag takes it. Raises ConfigError, which names its place."""
    value = given.value
    if given.is_mapping and flag in PATHS_BY_NAME:
        value = _named_paths(flag, given)
    elif given.is_mapping and flag not in JSON_OBJECTS:
        raise ConfigError(f"{given.source}: {flag} is a mapping; it must be a single value")
    if isinstance(value, list) and not _is_list(parameter):
        raise ConfigError(f"{given.source}: {flag} is a list; it must be a single value")
    if isinstance(value, str) and _is_list(parameter):
        value = [value]
    try:
        parameter.process_value(context, value)
    except typer.BadParameter as error:
        raise ConfigError(f"{given.source}: {flag} is {shown(value)}: {error.message}") from None
    return value


def _named_paths(flag: str, given: Given) -> list[str]:
    """Returns a mapping as flags have it, NAME=PATH for each entry."""
    paths = msgspec.json.decode(str(given.value))
    for name, path in paths.items():
        if not isinstance(path, str):
            raise ConfigError(f"{given.source}: {flag} has {shown(path)} for {shown(name)}; it must be a path")
        if "=" in name:
            raise ConfigError(f"{given.source}: {flag} has {shown(name)}; a name must be without '='")
    return [f"{name}={path}" for name, path in paths.items()]


def _is_list(parameter: Any) -> bool:
    return bool(getattr(parameter, "multiple", False))


def _way_out(flag: str, parameters: Mapping[str, Any], written: Callable[[str], str] = str) -> str:
    """Returns what to do instead of a setting that is not there. written: how settings are, by their flags."""
    if flag in OF_THE_FILE_ITSELF:
        return f"give --{flag} on the command line"
    near = near_flags(flag, [name for name, one in parameters.items() if not getattr(one, "hidden", False)], most=1)
    return f"did you mean {written(near[0])!r}?" if near else "'pagemill serve --help' lists all"
