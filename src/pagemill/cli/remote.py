"""A server that speaks OpenAI's API, as the commands in the terminal ask it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Annotated, Any

import httpx
import typer

from pagemill.errors import ConfigError, InvalidRequestError, NotFoundError, RemoteServerError, shown

ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="OPENAI_API_KEY", show_envvar=False, help="The server's API key. Default: OPENAI_API_KEY."
    ),
]
LONGEST_REFUSAL = 100
"""Characters of an answer that is no JSON which a message shows."""


def unreachable(url: str, error: Exception) -> str:
    """Returns in words why a server could not be asked, with the way out."""
    why = (str(error) or type(error).__name__).rstrip(".")
    if "CERTIFICATE_VERIFY_FAILED" in why:
        return f"the certificate of {url} is not trusted: {why}; if it is your own, name its file in SSL_CERT_FILE"
    if isinstance(error, httpx.RemoteProtocolError) and url.startswith("http:"):
        return f"{url} does not answer as HTTP does: {why}; if it speaks HTTPS, give https://"
    return f"no server answers at {url}: {why}; check the address (--url)"


def client_of(
    url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None, connect_s: float = 30
) -> httpx.AsyncClient:
    """Returns a client of the API at a server's address, for any number of requests at once. transport: None for the
    network. Raises ConfigError for what is no address."""
    try:
        return httpx.AsyncClient(
            base_url=f"{url.rstrip('/').removesuffix('/v1')}/v1",
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=httpx.Timeout(connect_s, read=None),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
        )
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--url is {url!r}: {error}; give http://host:port", param="url") from error


async def event_lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Yields a stream's lines, which end at line feeds alone.

    httpx's own lines end at other characters too (U+0085, U+2028, U+2029), which may stand within JSON. Raises
    httpx.HTTPError where the stream breaks off.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class Remote:
    """Raises `RemoteServerError` where the server does not answer, or refuses; `NotFoundError` for its 404."""

    def __init__(self, url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises as `client_of`."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._http = client_of(url, api_key, transport)

    async def __aenter__(self) -> Remote:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._http.aclose()

    async def ask(self, path: str, method: str = "GET", body: dict[str, Any] | None = None) -> Any:
        """Returns an answer's JSON."""
        async with self._response(path, method, body) as response:
            return self._json(await self._body(response))

    async def models(self) -> list[str]:
        """Returns the names of the server's models."""
        answer = await self.ask("/models")
        listed = answer.get("data") if isinstance(answer, dict) else answer
        models = listed if isinstance(listed, list) else []
        return [str(one["id"]) for one in models if isinstance(one, dict) and "id" in one]

    @asynccontextmanager
    async def events(
        self, path: str, method: str = "GET", body: dict[str, Any] | None = None
    ) -> AsyncIterator[AsyncGenerator[Any, None]]:
        """Gives what server-sent events say, up to `[DONE]`. One that is an error is raised."""
        async with self._response(path, method, body) as response:
            yield self._events(response)

    async def _events(self, response: httpx.Response) -> AsyncGenerator[Any, None]:
        try:
            async for line in event_lines(response):
                field, _, data = line.partition(":")
                if field != "data" or not data.strip():
                    continue
                if data.strip() == "[DONE]":
                    return
                event = self._json(data)
                if isinstance(event, dict) and event.get("error"):
                    raise RemoteServerError(f"the answer broke off: {_said(event)}")
                yield event
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    @asynccontextmanager
    async def _response(self, path: str, method: str, body: dict[str, Any] | None) -> AsyncIterator[httpx.Response]:
        try:
            request = self._http.build_request(method, path, json=body)
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the request is not Unicode ({error}); leave that character out") from error
        try:
            response = await self._http.send(request, stream=True)
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(
                f"--url is {self.url!r}: {str(error).rstrip('.')}; give http://host:port", param="url"
            ) from error
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        try:
            if not response.is_success:
                raise self._refusal(response.status_code, await self._body(response))
            yield response
        finally:
            await response.aclose()

    async def _body(self, response: httpx.Response) -> bytes:
        try:
            return await response.aread()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _json(self, text: str | bytes) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise RemoteServerError(f"{self.url} does not answer as OpenAI's API does: {error}") from error

    def _unreachable(self, error: Exception) -> RemoteServerError:
        return RemoteServerError(unreachable(self.url, error))

    def _refusal(self, status: int, body: bytes) -> NotFoundError | RemoteServerError:
        kind = NotFoundError if status == httpx.codes.NOT_FOUND else RemoteServerError
        try:
            said = _said(json.loads(body))
        except ValueError:
            text = " ".join(body.decode(errors="replace").split())
            return kind(
                f"{self.url} answers with {status} and no JSON, and does not seem to speak OpenAI's API; check the "
                f"address (--url); it says: {shown(text[:LONGEST_REFUSAL])}"
            )
        if kind is NotFoundError:
            return kind(said)
        way_out = "; give its key with --api-key" if status == httpx.codes.UNAUTHORIZED else ""
        return kind(f"{self.url} refuses with {status}: {said}{way_out}")


def _said(answer: Any) -> str:
    """Returns what an error of OpenAI's shape says."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
