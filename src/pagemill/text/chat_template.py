"""Renders chat templates: a conversation becomes the text that a model was trained on.

Templates are Jinja programs that come with models, so they run in Jinja's immutable sandbox and see plain data only.
They get what transformers' `apply_chat_template` gives them, and render the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pagemill.errors import InvalidRequestError, shown
from pagemill.text.tool_dialect import ToolDialect
from pagemill.text.tool_messages import with_arguments_as_objects

MAX_MESSAGES = 16384
"""Messages of one conversation."""

BETWEEN_TEXTS = "\n"
"""Stands between two texts of one message."""

NO_PLACE = (
    "but this model's chat template has no place for them; leave them out, or give it another (--chat-template, "
    "chat_template=)"
)
"""Says why a conversation may not have some parts."""

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first one, or the second."""
_CONTINUE_MARK = "\u2063continue\u2063here\u2063"


class ChatTemplate:
    """Renders conversations with one template. Raises `jinja2.TemplateSyntaxError` for source that does not parse."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        tree = _ENVIRONMENT.parse(source)
        reads = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self._template = _ENVIRONMENT.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._dialect = ToolDialect(source, tree, reads, self._rendered)
        self.reads = reads if self._dialect.place is None else reads | {"tools"}
        """The variables that it asks for; "tools" also where it looks for them elsewhere."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Returns the text of `messages`, each with a `role` and mostly a `content`: text, or a list of
        `{"type": "text", "text": …}`, which are joined by line breaks.

        variables: the template's own options.
        continue_final_message: leaves the last message open at its end, so that the model goes on with it.
        Raises `InvalidRequestError` where the template refuses the messages, or does not read the tools or documents
        that are given.
        """
        check_messages(messages)
        conversation = [_message(f"messages[{at}]", message) for at, message in enumerate(messages)]
        if any("tool_calls" in message for message in conversation) and not self._dialect.takes_calls:
            raise InvalidRequestError(
                f"a message has tool_calls, {NO_PLACE}",
                param="messages",
            )
        if not isinstance(tools, (list, tuple, type(None))):
            raise InvalidRequestError(f"tools is {shown(tools)}; it must be a list", param="tools")
        beside = {"tools": _plain(tools), "documents": _plain(documents)}
        for name, value in beside.items():
            if value and name not in self.reads:
                raise InvalidRequestError(
                    f"{name} are given, {NO_PLACE}",
                    param=name,
                )
        conversation = self._dialect.conversation(conversation, beside["tools"])
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "add_generation_prompt and continue_final_message are both set: one opens a new message, the other "
                    "goes on with the last; switch one of them off",
                    param="continue_final_message",
                )
            if not isinstance(conversation[-1].get("content"), str):
                raise InvalidRequestError(
                    "continue_final_message is set, but the last message has no text to go on with; give it a content",
                    param="continue_final_message",
                )
            conversation[-1]["content"] += _CONTINUE_MARK
        try:
            text = self._rendered(
                {
                    **_plain(variables),
                    **beside,
                    **self._dialect.variables(beside["tools"]),
                    "messages": conversation,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template is a program, which may raise anything
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}; send roles and contents that the model knows, "
                f"or another chat_template",
                param="messages",
            ) from error
        return _cut_at_mark(text) if continue_final_message else text

    def _rendered(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**self._special_tokens, **variables})


def check_messages(messages: object) -> None:
    """Raises InvalidRequestError unless `messages` is a list of 1 to `MAX_MESSAGES` messages."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError(
            f"messages is {shown(messages)}; it must be a list of at least one message, each a dict such as "
            f'{{"role": "user", "content": "Hello"}}',
            param="messages",
        )
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages has {len(messages)} entries; give at most {MAX_MESSAGES} messages", param="messages"
        )


def without_content(which: str) -> InvalidRequestError:
    """Returns what a message that says nothing is refused with. which: how the refusal names it."""
    return InvalidRequestError(
        f"{which} has no content; give it one (an assistant's may have tool_calls instead)", param="messages"
    )


def _message(which: str, message: object) -> dict[str, Any]:
    """Returns a message as plain data, without keys whose value is None: templates test for a missing key."""
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{which} is of type {type(message).__name__}; it must be a dict with a role and a content",
            param="messages",
        )
    plain = {key: _plain(value) for key, value in message.items() if value is not None}
    if "role" not in plain:
        raise InvalidRequestError(
            f"{which} has no role; give it one that the model knows, such as user", param="messages"
        )
    if not plain.keys() & {"content", "tool_calls", *_REASONING_KEYS}:
        raise without_content(f"{which} of role {shown(plain['role'])}")
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = with_arguments_as_objects(plain["tool_calls"])
    if isinstance(plain.get("content"), list):
        plain["content"] = BETWEEN_TEXTS.join(_text_of(part) for part in plain["content"])
    reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
    if reasoning is not None:
        plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
    return plain


def _text_of(part: Any) -> str:
    """Returns the text of one part of a message's content. Raises `InvalidRequestError` for a part of another kind."""
    match part:
        case {"type": "text", "text": str(text), **others} if not others:
            return text
    raise InvalidRequestError(
        f"a part of a message's content is {shown(part)}; a model here reads text only: give "
        f"{{'type': 'text', 'text': …}}, or one text as the content",
        param="messages",
    )


def _plain(value: Any) -> Any:
    """Returns the value rebuilt from JSON's own types, so that a template cannot call methods of anything else."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise InvalidRequestError(
        f"a value of type {type(value).__name__} cannot go into a chat template; send text, numbers, lists and dicts",
        param="messages",
    )


def _cut_at_mark(text: str) -> str:
    place = text.rfind(_CONTINUE_MARK)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but this chat template leaves the last message's end out; leave it out",
            param="continue_final_message",
        )
    return text[:place]


class _GenerationTag(jinja2.ext.Extension):
    """Parses `{% generation %}…{% endgeneration %}`, which marks what a model writes in training, as a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (a class attribute of Jinja's)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON without the escapes for HTML that Jinja's own filter makes of `<` and `&`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


_ENVIRONMENT = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals |= {"raise_exception": _raise, "strftime_now": _now}
