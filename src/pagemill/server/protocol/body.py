"""What all bodies of HTTP have in common, and the small ones: models, the KV pool's size, errors."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, model_validator

from pagemill.errors import InvalidRequestError

LONGEST_NAME = 256
Name = Annotated[str, Field(max_length=LONGEST_NAME)]
FIRST_ERROR = Field(fail_fast=True)
"""For a list of which the first wrong entry is enough for a refusal: there may be a million."""
Timeout = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Seconds after which a request without an answer is given up."""
Ids = Annotated[list[int], FIRST_ERROR]
"""Token ids: of a large body, an array."""


def _check_salt(salt: str) -> str:
    if not salt:
        raise InvalidRequestError(
            "cache_salt is ''; it must have one character at least: give it some, or leave it out", param="cache_salt"
        )
    return salt


Salt = Annotated[str, AfterValidator(_check_salt)]
"""Keeps a request's prefixes to those of equal salt."""


def check_length(name: str, entries: Any, limit: int | None, way_out: str = "") -> None:
    """Raises `InvalidRequestError` for a list or a dict of too many entries, before anybody looks at each."""
    if limit is not None and isinstance(entries, (list, dict)) and len(entries) > limit:
        raise InvalidRequestError(f"{name} has {len(entries)} entries; give at most {limit}{way_out}", param=name)


def check_one_given(which: str, prompt: object, messages: object) -> None:
    """Raises `InvalidRequestError` unless there is either a prompt or messages. which: begins the error's sentence."""
    if (prompt is None) == (messages is None):
        has = "neither a prompt nor messages" if prompt is None else "a prompt and messages"
        raise InvalidRequestError(f"{which} {has}; give one of the two", param="prompt")


class Body(BaseModel):
    """A request's body, or an object in it: these fields and no other. One that need not be given may be null, which
    means: not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict) or all(value is not None for value in body.values()):
            return body
        needless = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in body.items() if value is not None or name not in needless}


class KVMemory(Body):
    """The KV pool's size. In a request: what the setting `kv_memory` may be, "used", or null for the size at the start;
    in an answer: bytes."""

    kv_memory: StrictInt | StrictFloat | StrictStr | None


C = TypeVar("C")


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagemill"
    root: str
    """The model, or the adapter's folder, as the server was told it."""
    parent: str | None = None
    """A LoRA adapter's model; None for that itself."""
    max_model_len: int | None = None
    """Tokens of a prompt and its answer, or fewer where the KV pool holds no more; None until the model is loaded."""


class Listing(BaseModel, Generic[C]):
    object: Literal["list"] = "list"
    data: list[C]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorBody
