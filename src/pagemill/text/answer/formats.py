"""Declares how families of models write tool calls and reasoning, and tells them by their chat templates.

The names are vLLM's, where it has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shape = Literal["json", "named", "tags", "pythonic"]


@dataclass(frozen=True)
class ToolCallFormat:
    """How a family writes tool calls.

    begin: what stands before calls, in several spellings. bare: the character with which an answer may begin that is a
    call without such a mark. end: what stands behind calls, if anything. shape: "json" is an object with a name and
    arguments, or a list of such; "named" is the name, then `behind_name`, then the arguments as an object; "tags" is
    `<function=NAME>` with a `<parameter=KEY>` each; "pythonic" is `NAME(KEY=value)`, alone or in a list. around: what
    may stand around all calls, and means nothing. marks: parts of a chat template by which the family is known, all of
    one entry. written: where a grammar makes the model call, what stands before the name, between that and the
    arguments in JSON, and behind them; None where arguments are no JSON. call_id_length: letters and digits of a call's
    id, where the family's templates demand so many.
    """

    name: str
    shape: Shape
    begin: tuple[str, ...]
    end: str = ""
    behind_name: tuple[str, ...] = ("",)
    around: tuple[str, ...] = ()
    bare: str = ""
    marks: tuple[tuple[str, ...], ...] = ()
    written: tuple[str, str, str] | None = None
    call_id_length: int | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """All that the format writes beside calls."""
        return tuple(filter(None, (*self.begin, self.end, *self.behind_name, *self.around)))


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family marks reasoning. always: an answer begins with it, whether or not it begins with the mark."""

    name: str
    begin: str
    end: str
    always: bool = False
    marks: tuple[tuple[str, ...], ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        return self.begin, self.end


TOOL_CALLS = {
    each.name: each
    for each in (
        ToolCallFormat("qwen3_coder", "tags", ("<tool_call>",), "</tool_call>", marks=(("<function=", "<parameter="),)),
        ToolCallFormat(
            "hermes",
            "json",
            ("<tool_call>",),
            "</tool_call>",
            marks=(("<tool_call>",),),
            written=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        ),
        ToolCallFormat(
            "mistral",
            "named",
            ("[TOOL_CALLS]",),
            behind_name=("[ARGS]", ""),
            marks=(("[TOOL_CALLS]",),),
            written=('[TOOL_CALLS][{"name": "', '", "arguments": ', "}]"),
            call_id_length=9,
        ),
        ToolCallFormat(
            "deepseek_v3",
            "named",
            ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
            "```<｜tool▁call▁end｜>",
            ("\n```json\n",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            marks=(("<｜tool▁call▁begin｜>", "```json"),),
            written=(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
                "\n```json\n",
                "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
        ),
        ToolCallFormat(
            "deepseek_v31",
            "named",
            ("<｜tool▁call▁begin｜>",),
            "<｜tool▁call▁end｜>",
            ("<｜tool▁sep｜>",),
            ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            marks=(("<｜tool▁call▁begin｜>",),),
            written=(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
                "<｜tool▁sep｜>",
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ),
        ),
        ToolCallFormat(
            "phi4_mini_json",
            "json",
            ("<|tool_call|>", "functools"),
            "<|/tool_call|>",
            marks=(("<|/tool_call|>",), ("functools",), ("<|tool|>", "<|/tool|>")),
            written=('<|tool_call|>[{"name": "', '", "arguments": ', "}]<|/tool_call|>"),
        ),
        ToolCallFormat(
            "granite",
            "json",
            ("<|tool_call|>",),
            marks=(("<|tool_call|>",),),
            written=('<|tool_call|>[{"name": "', '", "arguments": ', "}]"),
        ),
        ToolCallFormat("gemma", "pythonic", ("```tool_code",), "```", marks=(("```tool_code",),)),
        ToolCallFormat(
            "pythonic", "pythonic", ("<|python_start|>",), "<|python_end|>", bare="[", marks=(("func_name1(",),)
        ),
        ToolCallFormat(
            "llama3_json",
            "json",
            ("<|python_tag|>",),
            bare="{",
            marks=(("<|python_tag|>",), ('"parameters": dictionary of argument name',)),
            written=('{"name": "', '", "parameters": ', "}"),
        ),
    )
}
"""The first whose marks a template has is its family's."""

REASONING = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", always=True),
        ReasoningFormat("qwen3", "<think>", "</think>", marks=(("</think>",),)),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]", marks=(("[THINK]",),)),
        ReasoningFormat(
            "granite",
            "Here is my thought process:",
            "Here is my response:",
            marks=(("Here is my thought process:", "Here is my response:"),),
        ),
    )
}
"""The first whose marks a template has is its family's."""


def tool_calls_of(template: str) -> ToolCallFormat | None:
    """Returns how the model of a chat template writes tool calls; None if that cannot be told."""
    return next((each for each in TOOL_CALLS.values() if _has(template, each.marks)), None)


def reasoning_of(template: str) -> ReasoningFormat | None:
    """Returns how the model of a chat template marks its reasoning; None if it does not."""
    return next((each for each in REASONING.values() if _has(template, each.marks)), None)


def _has(template: str, marks: tuple[tuple[str, ...], ...]) -> bool:
    return any(all(part in template for part in entry) for entry in marks)
