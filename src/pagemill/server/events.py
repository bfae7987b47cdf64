"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from pydantic import BaseModel

DONE = "data: [DONE]\n\n"


def event(body: BaseModel) -> str:
    return f"data: {body.model_dump_json()}\n\n"
