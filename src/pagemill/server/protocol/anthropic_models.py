"""Models as Anthropic's clients expect `/v1/models` to list them."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Literal

from pydantic import BaseModel

from pagemill.server.protocol.body import ModelCard


class AnthropicModel(BaseModel):
    """created_at: when the server began to serve it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"

    @classmethod
    def of(cls, card: ModelCard) -> AnthropicModel:
        """Returns what the card says, as Anthropic says it."""
        created = datetime.fromtimestamp(card.created, timezone.utc)
        return cls(id=card.id, display_name=card.id, created_at=created)


class AnthropicModels(BaseModel):
    """Holds all models: there is no second page."""

    data: list[AnthropicModel]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
