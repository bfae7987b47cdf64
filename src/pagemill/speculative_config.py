"""Declares the settings of speculative decoding, under vLLM's names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from pagemill.arguments import about, check_fields
from pagemill.errors import ConfigError, shown

Drafts = Annotated[int, Meta(ge=1, le=64)]
Ngram = Annotated[int, Meta(ge=1, le=16)]


@dataclass(kw_only=True, frozen=True)
class SpeculativeConfig:
    """Says how tokens are drafted, to be verified several in one step. Raises ConfigError for a wrong value."""

    method: Annotated[
        Literal["ngram"],
        about("How drafts are made: ngram (looked up in the sequence itself).", "no other way of drafting is there"),
    ]
    num_speculative_tokens: Annotated[Drafts, about("The most drafts of a sequence in one step.")] = 8
    prompt_lookup_max: Annotated[Ngram, about("The longest n-gram that is looked up, in tokens.")] = 4
    prompt_lookup_min: Annotated[Ngram, about("The shortest n-gram that is looked up, in tokens.")] = 2

    def __post_init__(self) -> None:
        try:
            check_fields(self, ConfigError)
        except ConfigError as error:
            raise _refusal(error.message) from None
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refusal(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max ({self.prompt_lookup_max}); "
                f"raise the second or lower the first"
            )

    @classmethod
    def read(cls, values: Any) -> SpeculativeConfig:
        """Reads the settings from a dict, as callers and flags give it. Raises ConfigError."""
        if isinstance(values, SpeculativeConfig):
            return values
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or "method" not in values:
            raise ConfigError(
                f"speculative_config is {shown(values)}; it must be None or a dict with method='ngram' and, if wanted, "
                f"{', '.join(known[1:])}",
                param="speculative_config",
            )
        for name in values:
            if name not in known:
                raise _refusal(f"it has no {name!r}; known: {', '.join(known)}")
        return cls(**values)


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"speculative_config: {why}", param="speculative_config")
