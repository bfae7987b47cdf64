"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`, for every failure; of the
paths of Anthropic's API, in its shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Scope

from pagemill.errors import (
    AuthenticationError,
    ConfigError,
    EngineRestartingError,
    EngineStoppedError,
    InvalidRequestError,
    ModelNotServedError,
    NotFoundError,
    PagemillError,
    PromptTooLongError,
    RateLimitError,
    RequestTimeoutError,
    ServerBusyError,
    TooFewBlocksError,
    TooManyWaitingError,
)
from pagemill.server.protocol.anthropic_errors import AnthropicErrorResponse, anthropic_response, is_anthropic
from pagemill.server.protocol.body import ErrorBody, ErrorResponse
from pagemill.server.protocol.events import ClientGone
from pagemill.server.protocol.refusals import not_json, refusal_of

E = TypeVar("E", bound=BaseException)

CODES: dict[type[PagemillError], str] = {
    PromptTooLongError: "context_length_exceeded",
    AuthenticationError: "invalid_api_key",
    TooManyWaitingError: "rate_limit_exceeded",
    RateLimitError: "rate_limit_exceeded",
    ModelNotServedError: "model_not_found",
}
"""OpenAI's machine-readable codes, where it has one."""

SIMILAR = "compare embeddings, see POST /v1/embeddings"
INSTEAD = {
    "score": SIMILAR,
    "rerank": SIMILAR,
    "classify": "ask in words, and give the classes as choice in structured_outputs",
    "pooling": "ask POST /v1/embeddings, with pooling_type",
}
"""What to ask instead of endpoints of vLLM that are not served, by the last part of their paths."""

CLIENT_CLOSED_REQUEST = 499

RETRY_AFTER_S = "1"
"""Seconds to wait before asking again where nothing says how long it takes."""

SHOULD_RETRY = "X-Should-Retry"
"""The header by which OpenAI's clients are told whether to ask again."""

LONGEST_MESSAGE = 4096
"""Characters of a message that an answer has: what a caller sent may be quoted in it."""


def error_response(error: PagemillError) -> ErrorResponse:
    """Returns an error as OpenAI writes it."""
    message, param = _sendable(error.message), None if error.param is None else _sendable(error.param)
    body = ErrorBody(message=message, type=error.kind, param=param, code=CODES.get(type(error)))
    return ErrorResponse(error=body)


def anthropic_error_response(
    error: PagemillError, status: int | None = None, request_id: str | None = None
) -> AnthropicErrorResponse:
    """Returns an error as Anthropic writes it. status: another than the error's own. request_id: the request's name."""
    return anthropic_response(_sendable(error.message), status or error.http_status, request_id)


def _sendable(text: str) -> str:
    """Returns a text cut to `LONGEST_MESSAGE`, with halves of surrogate pairs, which JSON may bring but no answer can
    have, as escapes."""
    cut = text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]}…"
    return cut.encode(errors="backslashreplace").decode()


@contextmanager
def asked_by_client() -> Iterator[None]:
    """Turns a ConfigError into an InvalidRequestError: a setting that a request changes is the caller's to mend."""
    try:
        yield
    except ConfigError as error:
        raise InvalidRequestError(error.message, param=error.param) from error


@contextmanager
def of_entry(name: str, index: int) -> Iterator[None]:
    """Says in an error about a prompt which of several it is. name: the field that has them."""
    try:
        yield
    except PagemillError as error:
        if error.param == "prompt" or isinstance(error, (PromptTooLongError, TooFewBlocksError)):
            error.message = f"{name}.{index}: {error.message}"
        raise


def install_error_handlers(app: FastAPI, wait_s: Callable[[str], float]) -> None:
    """Makes every failure of the application an answer of this shape. wait_s: seconds until a tenant's queue has a
    place again."""

    async def pagemill_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PagemillError)
        answer = error_answer(error, request.scope)
        if isinstance(error, TooManyWaitingError):
            answer.headers["Retry-After"] = str(math.ceil(wait_s(request.state.tenant)))
        return answer

    app.add_exception_handler(PagemillError, pagemill_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected_error)


def error_answer(error: PagemillError, scope: Scope, status: int | None = None) -> JSONResponse:
    """Returns an error as the answer to an HTTP request. status: another than the error's own."""
    if is_anthropic(scope["path"]):
        body = anthropic_error_response(error, status, scope.get("state", {}).get("request_id")).model_dump()
    else:
        body = error_response(error).model_dump()
    response = JSONResponse(body, status_code=status or error.http_status)
    if isinstance(error, (TooManyWaitingError, ServerBusyError, EngineRestartingError, EngineStoppedError)):
        response.headers["Retry-After"] = RETRY_AFTER_S
    elif isinstance(error, RateLimitError):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    elif isinstance(error, RequestTimeoutError):
        response.headers[SHOULD_RETRY] = "false"  # OpenAI's clients would do so, though the caller's time is over
    return response


def without_frames(error: E) -> E:
    """Returns an error without the frames that it and its causes came through.

    Frames that keep an error are kept by it in turn, with the request's body, until a collection of cycles.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answers with the first of pydantic's findings."""
    assert isinstance(error, RequestValidationError)
    return error_answer(refusal_of(error.errors(), error.body, None), request.scope)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers with 404, 405 and their like, from the router, and with why a body could not be read."""
    assert isinstance(error, HTTPException)
    cause, path = error.__cause__, request.scope["path"]
    if isinstance(cause, ClientGone):
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    if error.status_code == HTTPStatus.BAD_REQUEST and cause is not None:
        return error_answer(cause if isinstance(cause, PagemillError) else not_json(cause), request.scope)
    kind = NotFoundError if error.status_code == HTTPStatus.NOT_FOUND else InvalidRequestError
    why = f"{HTTPStatus(error.status_code).phrase}; see /docs for what is served"
    instead = INSTEAD.get(path.rpartition("/")[2]) if kind is NotFoundError else None
    refusal = kind(f"{request.method} {path}: {why if instead is None else f'not served here; {instead}'}")
    response = error_answer(refusal, request.scope, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _unexpected_error(request: Request, _: Exception) -> Response:
    """Tells the client nothing of our insides; the HTTP server writes the traceback to its log."""
    return error_answer(PagemillError("the server failed on this request; its log says why"), request.scope)
