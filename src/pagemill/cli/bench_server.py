"""A server that speaks OpenAI's API, as `pagemill bench --url` measures it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import httpx
import msgspec

from pagemill.cli.bench_report import Sample
from pagemill.cli.bench_workload import BenchWorkload, make_prompts, make_texts
from pagemill.cli.remote import client_of, event_lines, unreachable
from pagemill.errors import BenchmarkError, ConfigError

LONGEST_TEXT = 400_000
"""Characters of the text that the server is asked to tokenize."""


class Server:
    """Asks one server for completions. Raises `BenchmarkError` where it does not answer as OpenAI's API does.

    notes: what a reader of the figures must know.
    """

    def __init__(
        self, url: str, model: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        """Raises as `client_of`."""
        self.notes: list[str] = []
        self._model = model
        self._url = url
        self._http = client_of(url, api_key, transport, connect_s=60)
        self._options: dict[str, Any] = {"ignore_eos": True}
        self._failures: list[str] = []

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._http.aclose()

    async def prompts(self, corpus: str, workload: BenchWorkload) -> Sequence[list[int] | str]:
        """Returns token ids where the server tokenizes, as vLLM's and pagemill's do; else texts of about that length.

        The text's beginning is enough for both.
        """
        body = {"model": self._model, "prompt": corpus[:LONGEST_TEXT], "add_special_tokens": False}
        try:
            answer = await self._http.post("../tokenize", json=body)
        except httpx.UnsupportedProtocol as error:
            raise ConfigError(f"--url is {self._url!r}: {error}; give http://host:port", param="url") from error
        except httpx.HTTPError as error:
            raise BenchmarkError(unreachable(self._url, error)) from error
        tokens = _tokens_in(answer)
        if tokens:
            return make_prompts(tokens, workload)
        self.notes.append("The server does not tokenize: prompts were cut by characters, four for a token.")
        return make_texts(corpus, workload)

    async def warm_up(self, prompt: list[int] | str) -> None:
        """Asks once, and finds out whether the server knows vLLM's `ignore_eos`."""
        try:
            await self._ask(prompt, 2)
        except BenchmarkError as refusal:
            self._options = {}
            try:
                await self._ask(prompt, 2)
            except BenchmarkError:
                raise refusal from None
            self.notes.append("The server does not know ignore_eos: answers may have ended early.")

    async def ask(self, prompt: list[int] | str, output_len: int) -> Sample | None:
        """Returns one request's sample; None where it failed, which `those_answered` tells."""
        try:
            return await self._ask(prompt, output_len)
        except BenchmarkError as error:
            self._failures.append(error.message)
            return None

    def those_answered(self, samples: list[Sample]) -> list[Sample]:
        """Returns the samples. Raises `BenchmarkError` if there is none."""
        if not samples:
            raise BenchmarkError(f"every request failed; the first: {self._failures[0]}")
        if self._failures:
            self.notes.append(f"{len(self._failures)} requests failed; the first: {self._failures[0]}")
        return samples

    async def _ask(self, prompt: list[int] | str, output_len: int) -> Sample:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        started, first, chunks = time.perf_counter(), 0.0, 0
        usage: dict[str, Any] = {}
        try:
            async with self._http.stream("POST", "/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise BenchmarkError(_refusal(response.status_code, await response.aread()))
                async for line in event_lines(response):
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise BenchmarkError(f"the answer broke off: {chunk['error']}")
                    usage = chunk.get("usage") or usage
                    if chunk.get("choices"):
                        first, chunks = first or time.perf_counter(), chunks + 1
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise BenchmarkError(f"{self._url} does not answer as OpenAI's API does: {_words(error)}") from error
        ended = time.perf_counter()
        tokens = usage.get("completion_tokens", chunks)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        later = (ended - first) / max(tokens - 1, 1)
        return Sample(ended - started, first - started, later, usage.get("prompt_tokens", 0), tokens, cached)


def _refusal(status: int, body: bytes) -> str:
    """Returns what a refusal says, in one line."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError):
        said = body[:200].decode(errors="replace")
    return f"the server refuses with {status}: {said}"


class _Tokenized(msgspec.Struct):
    tokens: list[int]


def _tokens_in(answer: httpx.Response) -> list[int]:
    """Returns the tokens of an answer to /tokenize; none if it has another form, as llama.cpp's has."""
    try:
        return msgspec.json.decode(answer.content, type=_Tokenized).tokens if answer.is_success else []
    except msgspec.DecodeError:
        return []


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
