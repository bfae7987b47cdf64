"""`/v1/models`: the names under which the model is served, in OpenAI's shape or Anthropic's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Header

from pagemill.errors import ConfigError, ModelNotServedError, shown
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.lora_request import LoRARequest
from pagemill.server.protocol.anthropic_models import AnthropicModel, AnthropicModels
from pagemill.server.protocol.body import LONGEST_NAME, Listing, ModelCard

AnthropicVersion = Annotated[
    str | None, Header(description="Anthropic's clients send it, and are answered in Anthropic's shape.")
]


class ServedModels:
    """Knows the names of one model, the first of which is in answers to requests that name none, and its LoRA adapters,
    which are served under their own names.

    Raises ConfigError for a name that no request could have, and for one that is given twice.
    """

    def __init__(self, llm: AsyncLLM, names: str | Sequence[str], adapters: Sequence[LoRARequest] = ()) -> None:
        self.names = [names] if isinstance(names, str) else [*names]
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self._llm = llm
        self._created = int(time.time())
        check_served_names([*self.names, *self._adapters])

    def name_for(self, asked: str | None) -> str:
        """Returns the name that an answer has. Raises `ModelNotServedError` for a name that is not served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names and asked not in self._adapters:
            served = " and ".join(map(repr, self.all_names))
            raise ModelNotServedError(
                f"the model {asked!r} is not served here; this server has {served}", param="model"
            )
        return asked

    @property
    def all_names(self) -> list[str]:
        """The model's names, then its adapters'."""
        return [*self.names, *self._adapters]

    def adapter(self, name: str) -> LoRARequest | None:
        """Returns the LoRA adapter of this name; None for the model itself."""
        return self._adapters.get(name)

    def card(self, name: str) -> ModelCard:
        """Returns what `/v1/models` says of the model under one of its names."""
        facts = self._llm.facts
        longest = None if facts is None else facts.longest_sequence
        adapter = self._adapters.get(name)
        root = str(self._llm.model) if adapter is None else adapter.lora_path
        parent = None if adapter is None else self.names[0]
        return ModelCard(id=name, created=self._created, root=root, parent=parent, max_model_len=longest)


def check_served_names(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that no request could have, and for one that is given twice."""
    for name in names:
        if not 0 < len(name) <= LONGEST_NAME:
            raise ConfigError(
                f"a served_model_name is {shown(name)}; it must have 1 to {LONGEST_NAME} characters",
                param="served_model_name",
            )
        if names.count(name) > 1:
            raise ConfigError(f"served_model_name has {name!r} twice; give each once", param="served_model_name")


def model_routes(served: ServedModels) -> APIRouter:
    """Returns the routes."""
    routes = APIRouter(prefix="/v1/models")

    @routes.get("")
    @routes.get("/", include_in_schema=False)
    async def models(anthropic_version: AnthropicVersion = None) -> Listing[ModelCard] | AnthropicModels:
        """Lists the model that is served, once for each of its names, and its LoRA adapters, which name it as their
        parent."""
        cards = [served.card(name) for name in served.all_names]
        if anthropic_version is None:
            return Listing(data=cards)
        return AnthropicModels(data=[*map(AnthropicModel.of, cards)], first_id=cards[0].id, last_id=cards[-1].id)

    @routes.get("/{name:path}")
    async def model(name: str, anthropic_version: AnthropicVersion = None) -> ModelCard | AnthropicModel:
        """Describes the model that is served."""
        card = served.card(served.name_for(name))
        return card if anthropic_version is None else AnthropicModel.of(card)

    return routes
