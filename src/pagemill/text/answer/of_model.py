"""Chooses how a model's answers are read: by what it was told, or else by its chat template."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from pagemill.errors import InvalidRequestError
from pagemill.sampling.literals import check_literals
from pagemill.sampling.structured import StructuredOutputsParams
from pagemill.text.answer.calls import Functions
from pagemill.text.answer.formats import (
    REASONING,
    TOOL_CALLS,
    ReasoningFormat,
    ToolCallFormat,
    reasoning_of,
    tool_calls_of,
)
from pagemill.text.answer.grammar import Calls, grammar_of_call, grammar_of_form, grammar_of_text_and_calls
from pagemill.text.answer.json_text import is_json
from pagemill.text.answer.reader import AnswerReader
from pagemill.text.chat_template import NO_PLACE
from pagemill.text.tool_messages import functions_of

if TYPE_CHECKING:
    from pagemill.text.tokenizer import Tokenizer

PARTS_OF_CONVERSATIONS = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"),
        *("raise_exception", "strftime_now", "namespace", "range", "loop"),
    }
)
"""Variables of chat templates that are no options."""

SWITCHES_OF_REASONING = frozenset({"enable_thinking", "thinking"})
"""Options of chat templates; clients send False to any model, whether its template reads it or not."""

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_CALL_ID_LENGTH = 22


class AnswerFormats:
    """Knows how one model writes tool calls and reasoning.

    tool_call_parser, reasoning_parser: the name of a format; "auto" tells it by the chat template, "off" reads none.
    """

    def __init__(self, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> None:
        self._tokenizer = tokenizer
        self._tool_call_parser = tool_call_parser
        self._reasoning_parser = reasoning_parser

    @functools.cached_property
    def tool_calls(self) -> ToolCallFormat | None:
        if self._tool_call_parser == "auto":
            return tool_calls_of(self._tokenizer.template_source(with_tools=True) or "")
        return TOOL_CALLS[self._tool_call_parser]

    @functools.cached_property
    def reasoning(self) -> ReasoningFormat | None:
        if self._reasoning_parser == "auto":
            return reasoning_of(self._tokenizer.template_source(with_tools=False) or "")
        return REASONING.get(self._reasoning_parser)

    def check_tool_calls(self) -> None:
        """Raises `InvalidRequestError` if the model takes no tools, or if it is not known how it calls them."""
        if self.tool_calls is None and "tools" not in self._tokenizer.template_reads(tools=True):
            raise InvalidRequestError(f"tools are given, {NO_PLACE}", param="tools")
        if self.tool_calls is None:
            raise InvalidRequestError(
                "how this model writes tool calls cannot be told by its chat template; start the server with "
                f"--tool-call-parser ({', '.join(TOOL_CALLS)}), or set tool_choice to 'none'",
                param="tools",
            )

    def check_options(self, given: Mapping[str, Any]) -> None:
        """Raises `InvalidRequestError` for an option that the model's chat template does not read, unless it asks such
        a model not to reason."""
        for name, value in given.items():
            if name not in self._options_read and not (name in SWITCHES_OF_REASONING and value is False):
                known = f"; it reads {', '.join(sorted(self._options_read))}" if self._options_read else ""
                raise InvalidRequestError(
                    f"chat_template_kwargs has {name!r:.128}, which this model's chat template does not read{known}; "
                    f"leave it out",
                    param="chat_template_kwargs",
                )

    def options(self, reasoning_effort: str | None, thinks: bool = False) -> dict[str, Any]:
        """Returns what asks a chat template for so much reasoning. Raises `InvalidRequestError` where it has no place
        for that; "none" is what such a model does anyway. thinks: asks for reasoning where it can be left out."""
        if thinks and "enable_thinking" in self._options_read:
            return {"enable_thinking": True, **self.options(reasoning_effort)}
        if reasoning_effort is None:
            return {}
        if "reasoning_effort" in self._options_read:
            return {"reasoning_effort": reasoning_effort}
        if reasoning_effort == "none":
            return {"enable_thinking": False} if "enable_thinking" in self._options_read else {}
        raise InvalidRequestError(
            f"reasoning_effort is {reasoning_effort!r}, but this model's chat template does not read it; leave it out",
            param="reasoning_effort",
        )

    @functools.cached_property
    def _options_read(self) -> frozenset[str]:
        """Returns the variables of the chat template that are options: no part of a conversation, and no token."""
        return self._tokenizer.template_reads(tools=False) - PARTS_OF_CONVERSATIONS

    def grammar(
        self,
        asked: StructuredOutputsParams | None,
        functions: Functions | None,
        *,
        prompt: str | None,
        forced: bool,
        one_call: bool,
    ) -> str | None:
        """Returns the grammar of an answer; None where what is asked for says all.

        asked: the form of an answer that is no calls. functions: those that calls are of, with arguments by their
        schemas. prompt: the end of the text that is answered, at least; None where an answer goes on from another, and
        there is no reasoning. forced: the answer is one call. one_call: it has one at most beside a form. Raises what
        `grammar_of_call`, `grammar_of_text_and_calls`, `grammar_of_form` and `check_literals` do.
        """
        words, form, reasoning = self._tokenizer.parts_of, self.tool_calls, self.reasoning
        has_begun = prompt is not None and self._begins_reasoning(prompt)
        if functions is not None and (forced or asked is None):
            assert form is not None
            if not forced:
                return grammar_of_text_and_calls(form, functions, words)
            return grammar_of_call(form, functions, words, reasoning if has_begun else None)
        if prompt is None or (reasoning and prompt.rstrip().endswith(reasoning.end) and not has_begun):
            reasoning = None
        if asked is None or (reasoning is None and functions is None):
            return None
        calls = None if form is None or functions is None else Calls(form, functions, one_call)
        grammar = grammar_of_form(asked, words, reasoning, calls, has_begun=has_begun)
        check_literals(asked, self._tokenizer.missing_characters)
        return grammar

    def _begins_reasoning(self, prompt: str) -> bool:
        """Returns whether a prompt ends with the mark that begins reasoning, or need not."""
        reasoning = self.reasoning
        return reasoning is not None and (reasoning.always or prompt.rstrip().endswith(reasoning.begin))

    @property
    def marks_calls(self) -> bool:
        """Says whether calls are told from other text by marks."""
        return self.tool_calls is not None and not self.tool_calls.bare

    def needs_special_tokens(self, with_tools: bool) -> bool:
        """Returns whether marks that must be read are special tokens, which texts leave out otherwise."""
        words = self._special_words
        return bool(
            (with_tools and self.tool_calls is not None and words & {*self.tool_calls.words})
            or (self.reasoning is not None and words & {*self.reasoning.words})
        )

    def reader(
        self,
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        prompt: str,
        answer_id: str,
        max_calls: int | None = None,
        calls_only: bool = False,
    ) -> AnswerReader:
        """Returns what reads one answer.

        prompt: the end of the text that is answered, at least. answer_id: makes the ids of its calls, the same for the
        same id. max_calls, calls_only: see `AnswerReader`; 0 calls reads none.
        """
        form = self.tool_calls if tools and max_calls != 0 else None
        length = (form and form.call_id_length) or _CALL_ID_LENGTH
        return AnswerReader(
            form,
            functions_of(tools),
            self.reasoning,
            reasons_from_start=self._begins_reasoning(prompt),
            call_id=lambda number: _call_id(f"{answer_id}/{number}", length),
            max_calls=max_calls,
            calls_only=calls_only,
        )

    @functools.cached_property
    def _special_words(self) -> set[str]:
        """Returns the words of both formats that have a special token in them."""
        words = [*(self.tool_calls.words if self.tool_calls else ()), *(self.reasoning.words if self.reasoning else ())]
        return {word for word in words if self._tokenizer.has_special_token(word)}


def message_of(reader: AnswerReader, text: str) -> dict[str, Any]:
    """Returns an answer as the assistant's message in OpenAI's shape, without what it does not have; all as content
    where a call's arguments broke off, for templates take whole ones only."""
    answer = reader.read(text)
    if not all(is_json(call.arguments) for call in answer.calls):
        return {"role": "assistant", "content": text}
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def _call_id(seed: str, length: int) -> str:
    """Returns letters and digits that are the seed's."""
    number = xxhash.xxh3_128_intdigest(seed.encode())
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(_LETTERS))
        digits.append(_LETTERS[digit])
    return "".join(digits)
