"""Shared by the commands: flags, made from the declarations of `EngineConfig`, `SamplingParams`, `ServerLimits` and
`ServerAccess`, and how they run.

So each setting is a flag of every command that starts an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import os
import re
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import typer

from pagemill.arguments import Argument, arguments_of
from pagemill.cli.large_number import BYTES, NUMBERS, large_number, number_of_bytes
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError
from pagemill.fixed_arguments import OF_ENGINES, OF_SERVERS, Fixed, without_fixed
from pagemill.frontend.supervisor import RestartLimits
from pagemill.sampling.params import RequestOutputKind, SamplingParams
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.logs.output import ServerLogs

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A pulled name (smollm2-135m), a folder or .gguf file, or a Hugging Face id."),
]

SAMPLING_FLAGS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop")

Command = Callable[..., Any]
T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Returns what a command's coroutine returns. Ctrl-C ends the command with the exit status 130."""
    try:
        return asyncio.run(work)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def engine_options(command: Command, **described: str) -> Command:
    """Gives a command a flag per engine setting; what was given arrives as the dict `settings`.

    vLLM's flags that leave no choice here are taken too, but not shown. described: what help says of settings that mean
    something else in this command.
    """

    def collect(given: dict[str, Any]) -> dict[str, Any]:
        for name in ("hf_overrides", "default_chat_template_kwargs"):
            if name in given:
                given[name] = _json_object(name, given[name])
        if given.get("speculative_config") not in (None, "auto", "off"):
            words = """auto, off or a JSON object such as '{"method": "ngram"}'"""
            given["speculative_config"] = _json_object("speculative_config", given["speculative_config"], words)
        if "lora_modules" in given:
            given["lora_modules"] = _paths_by_name(given["lora_modules"])
        return given

    declared = {
        name: argument._replace(description=described.get(name, argument.description))
        for name, argument in arguments_of(EngineConfig).items()
        if name != "model"
    }
    return _with_options(command, "settings", declared, "Engine", collect, OF_ENGINES)


def refuse_settings(settings: Mapping[str, Any], url: str) -> None:
    """Raises `ConfigError` for settings of an engine where a server is asked, which has its own."""
    for name in sorted(settings):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} is a setting of an engine of its own, and the server at {url} has its own; leave {flag} out",
            param=name,
        )


def server_options(command: Command) -> Command:
    """Gives a command a flag per limit of a server; they arrive as `limits`."""
    return _with_options(
        command, "limits", arguments_of(ServerLimits), "Server", lambda given: ServerLimits(**given), {}
    )


def restart_options(command: Command) -> Command:
    """Gives a command a flag for each limit on restarts of the engine; those given arrive as the dict `restarts`."""

    def collect(given: dict[str, Any]) -> dict[str, Any]:
        RestartLimits(**given)  # before anything is begun for nothing
        return given

    return _with_options(command, "restarts", arguments_of(RestartLimits), "Server", collect, {})


def access_options(command: Command) -> Command:
    """Gives a command a flag for each thing that decides who may ask a server; they arrive as `access`."""

    def collect(given: dict[str, Any]) -> ServerAccess:
        return ServerAccess.read(given, os.environ)

    return _with_options(command, "access", arguments_of(ServerAccess), "Access", collect, {})


def log_options(command: Command) -> Command:
    """Gives a command a flag for each thing that decides what a server logs, and vLLM's flags that leave no choice;
    they arrive as `logs`."""

    def collect(given: dict[str, Any]) -> ServerLogs:
        return ServerLogs(**without_fixed(given, OF_SERVERS, ConfigError))

    return _with_options(command, "logs", arguments_of(ServerLogs), "Logs", collect, OF_SERVERS)


def sampling_options(**defaults: Any) -> Callable[[Command], Command]:
    """Gives a command the sampling flags; they arrive as `params`, with the command's own defaults filled in."""
    declared, own = arguments_of(SamplingParams), {"max_tokens": None, **defaults}
    flags = {name: declared[name]._replace(default=own.get(name, declared[name].default)) for name in SAMPLING_FLAGS}

    def collect(given: dict[str, Any]) -> SamplingParams:
        return SamplingParams(**{**own, **given}, output_kind=RequestOutputKind.DELTA)

    return lambda command: _with_options(command, "params", flags, "Sampling", collect, {})


def _with_options(
    command: Command,
    target: str,
    declared: Mapping[str, Argument],
    panel: str,
    collect: Callable[[dict[str, Any]], Any],
    hidden: Mapping[str, Fixed],
) -> Command:
    """Replaces the command's parameter `target` by one flag for each declared argument, and by one that is not shown
    for each entry of `hidden`, typed as the values that it accepts."""
    flags = {name: _option(name, argument.kind, panel, argument) for name, argument in declared.items()}
    flags |= {name: _option(name, _kind_of(fixed), panel) for name, fixed in hidden.items()}
    options = [
        inspect.Parameter(
            f"{panel.lower()}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
        for name, annotation in flags.items()
    ]
    signature = inspect.signature(command, eval_str=True)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != target]

    @functools.wraps(command)
    def with_flags(**arguments: Any) -> Any:
        given = {name: arguments.pop(option.name) for name, option in zip(flags, options, strict=True)}
        given = {name: _read(declared, name, value) for name, value in given.items() if value not in (None, [])}
        value = collect(given)
        return command(**arguments, **{target: value})

    with_flags.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in [*kept, *options]}
    return with_flags


def _read(declared: Mapping[str, Argument], name: str, value: Any) -> Any:
    """Returns a flag's text as a number where its argument is one or a word, as in `60` or `auto`."""
    kinds = typing.get_args(declared[name].kind) if name in declared else ()
    if isinstance(value, str) and float in kinds and str not in kinds:
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _kind_of(fixed: Fixed) -> Any:
    """Returns the type of a flag's values: a text where None is the only one accepted, which no flag can say."""
    return next((type(value) for value in fixed.accepted if value is not None), str)


def _option(name: str, hint: Any, panel: str, argument: Argument | None = None) -> Any:
    """Makes an optional flag: what is not given is left to the defaults of the config or the parameters."""
    flag = f"--{name.replace('_', '-')}"
    parts = [hint] if typing.get_origin(hint) is not typing.Union else typing.get_args(hint)
    kinds = [type(typing.get_args(part)[0]) if typing.get_origin(part) is Literal else part for part in parts]
    if hint == dict[str, str]:
        kinds = [list[str]]
    kind: Any = next((kind for kind in (bool, list[str], str, float, int) if kind in kinds), str)
    if kind is bool:
        flag = f"{flag}/--no-{flag[2:]}"
    if argument is None:
        return Annotated[kind | None, typer.Option(flag, hidden=True)]
    text, default = argument.description, argument.default
    if default is not None and default != dataclasses.MISSING and not isinstance(default, (list, dict)):
        text = re.sub(r" Default: [^.]*\.", "", text)  # of the parameter, where the command has its own
        text += f" Default: {str(default).lower() if kind is bool else default}."
    written: dict[str, Any] = {}
    if name in (*NUMBERS, *BYTES):
        written = {"parser": number_of_bytes if name in BYTES else large_number, "metavar": "<int>"}
    return Annotated[kind | None, typer.Option(flag, help=text, show_default=False, rich_help_panel=panel, **written)]


def _paths_by_name(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in given:
        key, equals, path = text.partition("=")
        if not equals or not key or not path:
            raise ConfigError(f"lora_modules is {text!r}; it must be NAME=PATH", param="lora_modules")
        if key in found:
            raise ConfigError(
                f"lora_modules has {key!r} twice; give each adapter a name of its own", param="lora_modules"
            )
        found[key] = path
    return found


def _json_object(name: str, text: str, words: str = "a JSON object") -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{name} is {text!r}; it must be {words} ({error})", param=name) from error
