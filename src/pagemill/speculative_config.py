"""Declares the settings of speculative decoding, under vLLM's names."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from pagemill.arguments import about, check_fields
from pagemill.errors import ConfigError, shown

Drafts = Annotated[int, Meta(ge=1, le=64)]
Branches = Annotated[int, Meta(ge=0, le=16)]
Ngram = Annotated[int, Meta(ge=1, le=16)]
Requests = Annotated[int, Meta(ge=1, le=1_000_000)]
Tokens = Annotated[int, Meta(ge=1024, le=2**30)]

MODELS = {"draft_model": "the smaller one", "medusa": "the folder of the heads"}
"""Names, for messages, of what `model` is, by the methods that have one."""
DRAFTS = 8
"""The most drafts of a sequence in one step where nothing else is said."""
OWNERS = {
    "num_speculative_branches": ("draft_model", "medusa"),
    "prompt_lookup_max": ("ngram",),
    "prompt_lookup_min": ("ngram",),
    "suffix_decoding_max_cached_requests": ("suffix",),
    "suffix_decoding_max_cached_tokens": ("suffix",),
}
"""The methods to which a setting belongs."""
MEASURED = ("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob")
"""vLLM's settings of how many drafts a place gives, which is measured here."""


@dataclass(kw_only=True, frozen=True)
class SpeculativeConfig:
    """Says how tokens are drafted, to be verified several in one step. Raises ConfigError for a wrong value."""

    method: Annotated[
        Literal["ngram", "suffix", "draft_model", "medusa"],
        about(
            "How drafts are made: ngram (looked up in the sequence itself), suffix (in other answers of the same "
            "namespace too), draft_model (by a smaller model) or medusa (by heads that were trained for the model).",
            "no other way of drafting is there",
        ),
    ]
    model: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        about(
            "With draft_model: the smaller model, as the model itself is named. Both must have one vocabulary. With "
            "medusa: the folder of the heads."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        Drafts | None,
        about("The most drafts of a sequence in one step. Default: 8; with medusa, as many as there are heads."),
    ] = None
    num_speculative_branches: Annotated[
        Branches,
        about(
            "With draft_model and medusa: the most branches of a sequence's drafts in one step, beside the likeliest "
            "tokens; 0 for none. As many are verified as are measured to pay."
        ),
    ] = 4
    prompt_lookup_max: Annotated[Ngram, about("The longest n-gram that is looked up, in tokens.")] = 4
    prompt_lookup_min: Annotated[Ngram, about("The shortest n-gram that is looked up, in tokens.")] = 2

    suffix_decoding_max_cached_requests: Annotated[
        Requests, about("With suffix: the most answers that are kept; the oldest are forgotten first.")
    ] = 10_000
    suffix_decoding_max_cached_tokens: Annotated[
        Tokens, about("With suffix: the most tokens of all answers that are kept, a quarter for each namespace.")
    ] = 2**19

    def __post_init__(self) -> None:
        try:
            check_fields(self, ConfigError)
        except ConfigError as error:
            raise _refusal(error.message) from None
        if self.method in MODELS and self.model is None:
            raise _refusal(f"method is {self.method!r}, but there is no model; name {MODELS[self.method]} with model")
        if self.method not in MODELS and self.model is not None:
            raise _refusal(
                f"model is {self.model!r}, but method {self.method!r} has none; use method 'draft_model' or 'medusa', "
                f"or leave model out"
            )
        for name, owners in OWNERS.items():
            if self.method not in owners and getattr(self, name) != getattr(type(self), name):
                meant = " or ".join(map(repr, owners))
                raise _refusal(f"{name} is for method {meant}; leave it out with {self.method!r}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refusal(
                f"prompt_lookup_min is {self.prompt_lookup_min}, above prompt_lookup_max ({self.prompt_lookup_max}); "
                f"raise the second or lower the first"
            )

    def most_drafts(self, offered: int | None = None) -> int:
        """Returns the most drafts of a sequence in one step. offered: by what drafts; None: any number."""
        return self.num_speculative_tokens or offered or DRAFTS

    @classmethod
    def read(cls, values: Any) -> SpeculativeConfig:
        """Reads the settings from a dict, as callers and flags give it. Raises ConfigError."""
        if isinstance(values, SpeculativeConfig):
            return values
        if isinstance(values, dict) and isinstance(values.get("model"), os.PathLike):
            values = values | {"model": os.fspath(values["model"])}
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or "method" not in values:
            raise ConfigError(
                f"speculative_config is {shown(values)}; it must be 'auto', 'off' or a dict with method='ngram', "
                f"'suffix', 'draft_model' or 'medusa' and, if wanted, {', '.join(known[1:])}",
                param="speculative_config",
            )
        for name in values:
            if name in MEASURED:
                raise _refusal(
                    f"{name} is not supported: as many are drafted as are measured to pay, up to "
                    f"num_speculative_tokens; leave it out"
                )
            if name not in known:
                raise _refusal(f"it has no {name!r}; known: {', '.join(known)}")
        return cls(**values)


def _refusal(why: str) -> ConfigError:
    return ConfigError(f"speculative_config: {why}", param="speculative_config")
