"""Errors as Anthropic's clients expect them: `{"type": "error", "error": {"type", "message"}, "request_id"}`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

from pydantic import BaseModel

PATHS = "/v1/messages"
"""Begins the paths whose errors have this shape."""

KINDS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""Anthropic's types, by the status; those of other statuses are "invalid_request_error" or, of ours, "api_error"."""


class AnthropicErrorBody(BaseModel):
    type: str
    message: str


class AnthropicErrorResponse(BaseModel):
    """request_id: what the header `request-id` says too."""

    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str | None


def anthropic_response(message: str, status: int, request_id: str | None) -> AnthropicErrorResponse:
    """Returns an error as Anthropic writes one of this HTTP status, to the request of this name."""
    usual = "api_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    error = AnthropicErrorBody(type=KINDS.get(status, usual), message=message)
    return AnthropicErrorResponse(error=error, request_id=request_id)


def is_anthropic(path: str) -> bool:
    """Returns whether errors of this path have this shape."""
    return path == PATHS or path.startswith(f"{PATHS}/")
