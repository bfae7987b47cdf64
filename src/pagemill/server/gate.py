"""Decides about a request before its body is read: whose it is, by its API key, and how large its body may be."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.errors import (
    AuthenticationError,
    BodyTooLargeError,
    PagemillError,
    PermissionDeniedError,
    ServerBusyError,
    SlowBodyError,
)
from pagemill.server.errors import error_answer
from pagemill.server.events import ClientGone
from pagemill.server.limits import ServerLimits
from pagemill.tenant_limits import DEFAULT_TENANT, TenantsFile, key_digest

SMALL_BODY_BYTES = 64 << 10
"""A body of at most so many bytes is always taken, so that large ones cannot shut out everybody."""


class ApiKeys:
    """Finds whose a request is, by the keys of a tenants file.

    Without keys every request is the default tenant's, and nobody needs to be an admin.
    """

    def __init__(self, file: TenantsFile | None) -> None:
        self._tenants = {} if file is None else file.keys
        self._admins = dict.fromkeys([] if file is None else file.admin_keys, "")

    def tenant(self, method: str, path: str, headers: Headers) -> str:
        """Returns the request's tenant.

        Raises AuthenticationError for a `/v1` path without a known key, PermissionDeniedError for a path that concerns
        all tenants without an admin's key.
        """
        if not (self._tenants or self._admins) or not path.startswith("/v1/"):
            return DEFAULT_TENANT
        scheme, _, key = headers.get("authorization", "").partition(" ")
        digest = key_digest(key.strip() if scheme.lower() == "bearer" else "")
        tenant, admin = _find(digest, self._tenants.items()), _find(digest, self._admins.items())
        concerns_all = path.startswith("/v1/tenants") or (path == "/v1/kv_memory" and method != "GET")
        if tenant is None and admin is None and (self._tenants or concerns_all):
            raise AuthenticationError("no known API key; send one as 'Authorization: Bearer KEY'")
        if concerns_all and admin is None:
            raise PermissionDeniedError(f"{method} {path} needs one of the admin keys")
        return tenant or DEFAULT_TENANT


class Gate:
    """ASGI middleware. Sets `request.state.tenant`, or answers at once what it refuses; reads the body for the
    application, up to a limit and within a time; makes HEAD work where GET does. A large body counts until its request
    is answered.

    The path is the one that routes see (`scope["path"]`): `request.url` is made of what the client says its host is.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, limits: ServerLimits) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._large_bytes = 0
        """Bytes of the large bodies of all open requests."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the HTTP server, which has its own scope, leaves the body out
        headers, body = Headers(scope=scope), bytearray()
        try:
            tenant = self._keys.tenant(scope["method"], scope["path"], headers)
            scope.setdefault("state", {})["tenant"] = tenant
            self._check_size(int(headers.get("content-length", 0)))
            await asyncio.wait_for(self._read(receive, body), self._limits.request_timeout_s)
        except ClientGone:
            return
        except asyncio.TimeoutError:
            error: PagemillError = SlowBodyError(
                f"the body had not come after {self._limits.request_timeout_s:g} s, but {len(body)} bytes of it; send "
                f"it without a pause, or start the server with a higher --request-timeout-s"
            )
        except PagemillError as refused:
            error = refused
        else:
            size, replay = len(body), _replay(bytes(body), receive)
            body.clear()
            try:
                await self._app(scope, replay, send)
            finally:
                self._large_bytes -= _large(size)
            return
        answer = error_answer(error)
        answer.headers["Connection"] = "close"  # the rest of the body may still be on its way
        await answer(scope, receive, send)

    async def _read(self, receive: Receive, body: bytearray) -> None:
        """Appends the whole body, which is counted if it is large.

        Raises BodyTooLargeError as soon as it is too long, ServerBusyError where there is no room for it now,
        ClientGone if it breaks off.
        """
        size, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                body += message.get("body", b"")
                self._check_size(len(body))
                self._count(size, len(body))
                size = len(body)
                more = message.get("more_body", False)
        except BaseException:
            self._large_bytes -= _large(size)
            raise

    def _check_size(self, size: int) -> None:
        limit = self._limits.max_body_bytes
        if size > limit:
            raise BodyTooLargeError(
                f"the body has {size} bytes or more, and this server takes at most {limit}; send a shorter prompt, or "
                f"start the server with a higher --max-body-bytes"
            )

    def _count(self, before: int, size: int) -> None:
        """Counts a body that has `size` bytes now. before: as many have been counted."""
        limit, others = self._limits.max_bodies_bytes, self._large_bytes - _large(before)
        if others + _large(size) > limit:
            raise ServerBusyError(
                f"this body has {size} bytes or more, those of other open requests have {others}, and all together may "
                f"have {limit}; try again later, or start the server with a higher --max-bodies-bytes"
            )
        self._large_bytes = others + _large(size)


def _large(size: int) -> int:
    """Returns how many bytes of a body count."""
    return size if size > SMALL_BODY_BYTES else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body that has been read, then what else comes of the client."""
    unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return unread.pop() if unread else await receive()

    return replayed


def _find(digest: bytes, known: Iterable[tuple[bytes, str]]) -> str | None:
    """Returns what stands beside a digest. Takes equally long wherever it stands, and if it is not there."""
    found = None
    for each, name in known:
        if hmac.compare_digest(digest, each):
            found = name
    return found
