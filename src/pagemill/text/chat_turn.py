"""Finds the text of a conversation's next turn, so that earlier turns are not tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.text.tokenizer import Tokenizer


def turn_text(
    tokenizer: Tokenizer, history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], **template: Any
) -> str | None:
    """Returns the text after the last answer of `history` once `new` messages follow, or None.

    The template is rendered twice: up to that answer, and as a whole. The second text must begin with the first, then
    hold the answer (apart from white space around it). If it does not, the template writes earlier turns differently
    from the last one (without their reasoning, for example), and the whole has to be tokenized: None.
    Raises what `Tokenizer.apply_chat_template` does.
    """
    *asked, answer = history
    opening = {**template, "add_generation_prompt": True, "continue_final_message": False}
    before = tokenizer.apply_chat_template(asked, **opening)
    whole = tokenizer.apply_chat_template([*history, *new], **template)
    if not whole.startswith(before):
        return None
    rest, content = whole[len(before) :], answer["content"]
    if not rest.startswith(content):
        rest, content = rest.lstrip(), content.strip()
        if not rest.startswith(content):
            return None
    return rest[len(content) :]
