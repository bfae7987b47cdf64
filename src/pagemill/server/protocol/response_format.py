"""`response_format`: OpenAI's way to ask for JSON."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from pagemill.errors import InvalidRequestError
from pagemill.sampling.structured import StructuredOutputsParams, structured_outputs_of
from pagemill.server.protocol.body import Body, Name


class JsonSchema(Body):
    """A schema and its name. An answer follows it whether `strict` is true or not."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def structured_outputs(self) -> StructuredOutputsParams | None:
        """Returns what the answer must be; None for any text. Raises `InvalidRequestError` children."""
        schema = None if self.json_schema is None else self.json_schema.schema_
        if self.type == "json_schema":
            if schema is None:
                raise InvalidRequestError(
                    "response_format has the type json_schema and no json_schema.schema; give one, or the type "
                    "json_object for any JSON object",
                    param="response_format",
                )
            return structured_outputs_of({"json": schema})
        if self.json_schema is not None:
            raise InvalidRequestError(
                f"response_format has a json_schema and the type {self.type}; make that json_schema, or leave the "
                f"schema out",
                param="response_format",
            )
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None
