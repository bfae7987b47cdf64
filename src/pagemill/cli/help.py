"""Writes `--help`: whole at 80 columns, with a section for each group of flags."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class HelpInSections(TyperCommand):
    """A command whose flags are listed by their `rich_help_panel`. Long names have a line of their own."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                kind = "Arguments" if param.param_type_name == "argument" else "Options"
                name, text = record
                section = sections.setdefault(getattr(param, "rich_help_panel", None) or kind, [])
                section.append((name.replace("<list[str]>", "<str>").replace(" range>", ">"), text))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class GroupWithHelp(TyperGroup):
    """A group of commands that are listed with their whole first paragraph. Without a command it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, " ".join((one.help or "").partition("\n\n")[0].split())) for name, one in self.commands.items()]
            )
