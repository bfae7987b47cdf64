"""Decides about a request before its body is read: whether its key is known, and how large its body may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import (
    AuthenticationError,
    BodyTooLargeError,
    EncodedBodyError,
    InvalidRequestError,
    PagemillError,
    SlowBodyError,
    shown,
)
from pagemill.frontend.rates import RateStatus
from pagemill.server.access.api_keys import ANTHROPIC_KEY, ApiKeys, Caller, challenge, is_open
from pagemill.server.access.connections import client_of
from pagemill.server.access.failed_keys import FailedKeys
from pagemill.server.access.hosts import AllowedHosts
from pagemill.server.access.large_bodies import SMALL_BODY_BYTES, LargeBodies
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.rate_headers import with_rate_headers
from pagemill.server.logs.access_log import MAX_PATH, Lines, client_address
from pagemill.server.logs.output import AUDIT, fields
from pagemill.server.protocol.errors import error_answer, without_frames
from pagemill.server.protocol.events import HEAD_ALONE, ClientGone


class Gate:
    """ASGI middleware. Sets `request.state.tenant` and `is_admin`, or answers at once what it refuses; reads the body
    for the application, up to a limit and within a time; makes HEAD work where GET does. A large body counts until its
    request is answered.

    The path is the one that routes see (`scope["path"]`): `request.url` is made of what the client says its host is.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        limits: ServerLimits,
        hosts: AllowedHosts | None = None,
        rates: Callable[[str], Mapping[str, RateStatus]] = lambda tenant: {},
    ) -> None:
        """hosts: None lets the server be asked under any name. rates: gives a tenant's limits per minute."""
        self._app = app
        self._keys = keys
        self._hosts = hosts
        self._rates = rates
        self._failed = FailedKeys(limits.max_failed_keys)
        self._lines = Lines()
        self._limits = limits
        self._large = LargeBodies(limits, lambda: keys.num_tenants)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = scope
        if scope["method"] == "HEAD":
            # the HTTP server, which has its own scope, leaves the body out
            scope = {**scope, "method": "GET", HEAD_ALONE: True}
        headers, body = Headers(scope=scope), bytearray()
        try:
            if self._hosts is not None:
                self._hosts.check(scope["method"], headers)
            _check_framing(headers)
            scope.setdefault("state", {})
            caller = self._caller(scope, headers)
            scope["state"].update(caller._asdict())
            _check_encoding(headers)
            self._check_size(scope["path"], int(headers.get("content-length", 0)))
            reading = self._read(receive, body, scope["path"], caller.tenant)
            await asyncio.wait_for(reading, self._limits.request_timeout_s)
        except ClientGone:
            return
        except asyncio.TimeoutError:
            error: PagemillError = SlowBodyError(
                f"the body had not come after {self._limits.request_timeout_s:g} s, but {len(body)} bytes of it; send "
                f"it without a pause, or start the server with a higher --request-timeout-s"
            )
        except PagemillError as refused:
            error = without_frames(refused)
        else:
            size, replay = len(body), _replay(body, receive)
            del body
            tenant = caller.tenant
            told = send if is_open(scope["path"]) else with_rate_headers(send, partial(self._rates, tenant))
            try:
                await self._app(scope, replay, told)
            finally:
                self._large.end(tenant, size)
                if "route" in scope:
                    asked["route"] = scope["route"]  # for the log
            return
        answer = error_answer(error, scope)
        if isinstance(error, AuthenticationError):
            answer.headers["WWW-Authenticate"] = challenge(scope["path"])
        answer.headers["Connection"] = "close"  # the rest of the body may still be on its way
        await answer(scope, receive, send)

    def _caller(self, scope: Scope, headers: Headers) -> Caller:
        """Does what `ApiKeys.caller` does, and raises RateLimitError for an address that guesses."""
        path, address = scope["path"], client_of((scope.get("client") or ("",))[0])
        if not is_open(path):
            self._failed.check(address)
        try:
            return self._keys.caller(scope["method"], path, headers)
        except AuthenticationError:
            if "authorization" in headers or ANTHROPIC_KEY in headers:
                self._failed.note(address)
                if self._lines.allow(0):
                    AUDIT.warning(
                        "key refused",
                        extra=fields(
                            client=client_address(scope),
                            path=path[:MAX_PATH],
                            request_id=scope["state"].get("request_id"),
                            left_out=self._lines.take_left_out(0),
                        ),
                    )
            raise

    async def _read(self, receive: Receive, body: bytearray, path: str, tenant: str) -> None:
        """Appends the whole body, which is counted if it is large.

        Raises BodyTooLargeError as soon as it is too long, what `LargeBodies.grow` raises, ClientGone if it breaks off.
        """
        size, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message.get("body", b"")
                self._check_size(path, len(body))
                self._large.grow(tenant, size, len(body))
                size = len(body)
                more = message.get("more_body", False)
        except BaseException:
            self._large.end(tenant, size)
            raise

    def _check_size(self, path: str, size: int) -> None:
        """Raises BodyTooLargeError for a body that is longer than the path takes; without a key, that is little."""
        limit = self._limits.max_body_bytes
        if size > limit:
            raise BodyTooLargeError(
                f"the body has {size} bytes or more, and this server takes at most {limit}; send a shorter prompt, or "
                f"start the server with a higher --max-body-bytes"
            )
        if size > SMALL_BODY_BYTES and is_open(path):
            raise BodyTooLargeError(
                f"the body has {size} bytes or more, and {path} takes at most {SMALL_BODY_BYTES}; it needs none, leave "
                f"it out"
            )


def _check_framing(headers: Headers) -> None:
    """Refuses a body whose length is said twice: a proxy before this server may have believed the other one, and take
    for a body what would be a request here."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise InvalidRequestError(
            "the request has Content-Length and Transfer-Encoding, which each say where its body ends; send one of them"
        )


def _check_encoding(headers: Headers) -> None:
    """Refuses a body that would have to be decoded: how large it is then, nobody knows before."""
    given = ", ".join(headers.getlist("content-encoding"))
    if any(coding.strip().lower() not in ("", "identity") for coding in given.split(",")):
        raise EncodedBodyError(
            f"Content-Encoding is {shown(given)}, and this server takes no encoded bodies; send the JSON as it is, "
            f"without Content-Encoding"
        )


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body that has been read, then what else comes of the client."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed
