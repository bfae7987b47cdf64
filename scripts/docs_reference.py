"""Writes the reference pages that state what the code declares: commands, settings, sampling parameters, metrics
and errors. mkdocs runs it as a hook; no such page lies in the repository, so none can be out of date.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import MISSING
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from prometheus_client.parser import text_string_to_metric_families

from pagemill import (
    BeamSearchParams,
    EngineConfig,
    PoolingParams,
    SamplingParams,
    StructuredOutputsParams,
    TenantLimits,
    errors,
)
from pagemill.arguments import arguments_of
from pagemill.cli.app import app
from pagemill.engine.stats import EngineStats, TenantStats
from pagemill.fixed_arguments import OF_CALLS, OF_ENGINES, OF_SAMPLING, OF_SERVERS
from pagemill.server.routes.metrics import Metrics
from pagemill.speculative_config import SpeculativeConfig


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages to the site."""
    pages = {"cli": cli, "settings": settings, "sampling": sampling, "metrics": metrics}
    for name, page in (pages | {"errors": errors_page}).items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(page())))
    return files


def table(head: str, rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    """Yields a Markdown table; `head` names its columns, separated by bars."""
    columns = head.split("|")
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for row in rows:
        yield f"| {' | '.join(str(cell).replace('|', chr(92) + '|').replace(chr(10), ' ') for cell in row)} |"
    yield ""


def code(text: object) -> str:
    return f"`{text}`" if str(text) else ""


def text_of(thing: Any) -> str:
    return inspect.getdoc(thing) or ""


def commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields every command that can be run, with the words that call it."""
    if hasattr(command, "list_commands"):
        context = command.context_class(command)
        for name in command.list_commands(context):
            _, found, _ = command.resolve_command(context, [name])
            yield from commands(found, f"{path} {name}")
    else:
        yield path, command


def flags(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option" and not param.hidden]


def panel_of(option: Any) -> str:
    return getattr(option, "rich_help_panel", None) or ""


def spelled(option: Any) -> str:
    names = ", ".join(code(name) for name in option.opts)
    return f"{names}, {code(option.secondary_opts[0])}" if option.secondary_opts else names


def cli() -> Iterator[str]:
    yield "# Commands\n"
    yield "Commands that start an engine also take the [settings](settings.md) as flags; those that generate text take"
    yield "the sampling flags listed under `generate`.\n"
    for path, command in commands(typer.main.get_command(app), "pagemill"):
        arguments = [param for param in command.params if param.param_type_name == "argument"]
        metavars = " ".join((param.metavar or param.name.upper()) + "..." * (param.nargs != 1) for param in arguments)
        panels = {panel_of(option) for option in flags(command)}
        yield f"## {path}\n"
        yield f"```\n{path} {metavars} [OPTIONS]\n```\n".replace("  ", " ")
        yield f"{command.help}\n"
        own = [option for option in flags(command) if panel_of(option) != "Engine"]
        if path != "pagemill generate":
            own = [option for option in own if panel_of(option) != "Sampling"]
        if own:
            yield from table("flag|meaning", ((spelled(option), option.help or "") for option in own))
        if "Engine" in panels:
            yield "It takes every [setting of the engine](settings.md).\n"


def settings() -> Iterator[str]:
    yield "# Settings\n"
    yield "`LLM(...)`, `AsyncLLM(...)` and `EngineConfig(...)` take these as keyword arguments; `pagemill serve`,"
    yield "`chat`, `generate` and `bench` take them as flags: `--max-model-len` is `max_model_len`. A wrong value"
    yield "raises `ConfigError`.\n"
    yield from arguments_table(EngineConfig)
    yield "## vLLM's arguments that leave no choice\n"
    yield "They are accepted with these values, which ask for what pagemill does anyway, so that snippets run as they"
    yield "are. A value in the last column is accepted with a warning; any other is refused.\n"
    tables = {"Settings": OF_ENGINES, "Flags of `pagemill serve`": OF_SERVERS}
    for title, fixed in (tables | {"`SamplingParams`": OF_SAMPLING, "Calls": OF_CALLS}).items():
        yield f"### {title}\n"
        rows = [
            (code(name), f"pagemill {one.what}", *(", ".join(map(code, map(repr, values))) for values in one[::2]))
            for name, one in fixed.items()
        ]
        yield from table("name|because|accepted|with a warning", rows)
    yield "## Limits of a tenant\n"
    yield "`tenants` maps a tenant's name to these; `--tenants` names a file with them (see"
    yield "[Serve several tenants](../guide/tenants.md)).\n"
    yield from arguments_table(TenantLimits)
    yield "## Speculative decoding\n"
    yield "`speculative_config` takes a dict, and `--speculative-config` a JSON object, of these (see"
    yield "[Draft tokens](../guide/speculation.md)).\n"
    yield from arguments_table(SpeculativeConfig)


def arguments_table(cls: type) -> Iterator[str]:
    rows = []
    for argument in arguments_of(cls).values():
        default = "required" if argument.default is MISSING else code(repr(argument.default))
        rows.append((code(argument.name), argument.description, argument.limit, default))
    return table("name|meaning|must be|default", rows)


def sampling() -> Iterator[str]:
    yield "# Sampling parameters\n"
    for cls in (SamplingParams, StructuredOutputsParams, BeamSearchParams, PoolingParams):
        yield f"## {cls.__name__}\n"
        yield f"{text_of(cls)}\n"
        yield from arguments_table(cls)


def metrics() -> Iterator[str]:
    yield "# Metrics\n"
    yield "`GET /metrics` answers in Prometheus' text format. Counters end in `_total` there. Every metric has"
    yield "the label `model_name`: the first name under which the model is served. `LLM.stats()` and"
    yield "`AsyncLLM.stats()` return the engine's part in Python. A snapshot is taken between two steps.\n"
    tiers = {"host": 0, "disk": 0}
    tenants = {"default": zeros(TenantStats, tier_blocks=tiers)}
    positions = {"drafted_per_position": [0], "accepted_per_position": [0]}
    stats = zeros(EngineStats, frames=1, tier_blocks=tiers, fetches_failed={"slow": 0}, tenants=tenants, **positions)
    families = text_string_to_metric_families(Metrics("a model").render(stats, (0, 0)).decode())
    rows = []
    for family in families:
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name"})
        rows.append((code(family.name), family.type, ", ".join(map(code, labels)), family.documentation))
    yield from table("name|type|labels|meaning", rows)


def zeros(cls: type, **given: Any) -> Any:
    """Returns an instance with 0 in every field that is not given."""
    return cls(**(dict.fromkeys(inspect.signature(cls).parameters, 0) | given))


def errors_page() -> Iterator[str]:
    yield "# Errors\n"
    yield "Every error that pagemill raises on purpose is one of `pagemill.errors`. Its message names the value, the"
    yield "limit that it broke, and the way out. Over HTTP it arrives with this status and `type`.\n"
    found = [thing for thing in vars(errors).values() if isinstance(thing, type)]
    rows = [
        (code(cls.__name__), code(cls.__bases__[0].__name__), cls.http_status, code(cls.kind), text_of(cls))
        for cls in found
        if issubclass(cls, errors.PagemillError) and cls is not errors.PagemillError
    ]
    yield from table("error|is a|status|type|when", rows)
