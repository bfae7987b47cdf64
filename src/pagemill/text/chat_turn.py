"""The next turn of a conversation as text alone, so that what came before is neither rendered nor tokenized again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagemill.text.tokenizer import Tokenizer


def turn_text(
    tokenizer: Tokenizer, history: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], **template: Any
) -> str | None:
    """What follows the last answer of `history` once `new` messages are added: its end, and all of the new turn.

    The template is asked twice: for what led to that answer, and for everything; the second must begin with the first,
    then hold the answer (white space around it aside). None if it does not, because the template writes earlier turns
    otherwise than the last one (leaves out their reasoning, say): then only the whole is what the model knows.
    Raises as `Tokenizer.apply_chat_template`.
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
