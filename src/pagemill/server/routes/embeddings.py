"""`/v1/embeddings`: texts or token ids in, one vector for each out, in OpenAI's shape."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from array import array
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, model_validator

from pagemill.errors import InvalidRequestError, PagemillError, PoolTooSmallError, PromptTooLongError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.frontend.input_processor import Prompt
from pagemill.frontend.outputs import RequestMetrics
from pagemill.frontend.pooling import EmbeddingRequestOutput
from pagemill.frontend.rates import Charge
from pagemill.sampling.pooling_params import PoolingParams
from pagemill.server.bodies.reader import BodyRoute
from pagemill.server.protocol.body import FIRST_ERROR, Body, Ids, Name, Salt, Timeout, check_length
from pagemill.server.protocol.errors import of_entry
from pagemill.server.protocol.events import until_disconnect, until_late
from pagemill.server.protocol.parts import JSONInParts
from pagemill.server.routes.models import ServedModels

MAX_INPUTS = 2048
"""Inputs of one request."""
AT_ONCE = 64
"""Inputs of one request that wait or run at the same time, or as many as may wait: more than a step takes."""


class EmbeddingRequest(Body):
    """`POST /v1/embeddings`. `pooling_type` and `normalize` are those of `PoolingParams`."""

    model: Name | None = None
    input: str | Ids | Annotated[list[str], FIRST_ERROR] | Annotated[list[Ids], FIRST_ERROR]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, description="Only the model's own number is taken.")
    user: str | None = Field(None, description="It has no effect.")
    pooling_type: str = PoolingParams.pooling_type
    normalize: bool = PoolingParams.normalize
    cache_salt: Salt = ""
    priority: int = 0
    timeout: Timeout | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_inputs(cls, body: Any) -> Any:
        given = body.get("input") if isinstance(body, dict) else None
        if isinstance(body, dict) and body.get("messages") is not None:
            raise InvalidRequestError(
                "this server embeds no 'messages'; give their text as input, one for each vector", param="messages"
            )
        if isinstance(given, list) and given and not isinstance(given[0], int):
            check_length("input", given, MAX_INPUTS, "; send them in several requests")
        if given in (None, []):
            raise InvalidRequestError("input is missing or empty; give at least one text", param="input")
        return body

    def prompts(self) -> list[Prompt]:
        """Returns one prompt for each input."""
        single = isinstance(self.input, str) or isinstance(self.input[0], int)
        inputs: Any = [self.input] if single else self.input
        return [
            {"prompt" if isinstance(one, str) else "prompt_token_ids": one, "cache_salt": self.cache_salt}
            for one in inputs
        ]


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str
    """Numbers, or the base64 of their float32."""


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class EmbeddingFigures:
    """What a request has come to so far."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def figures(self) -> dict[str, Any]:
        """Returns it for the log."""
        return {"prompt_tokens": self.num_tokens}

    def times(self) -> list[RequestMetrics]:
        """Returns none: an embedding's parts are not told apart."""
        return []


def embedding_routes(llm: AsyncLLM, served: ServedModels) -> APIRouter:
    """Returns the route. Vectors become JSON as they come, in threads: a step brings many, which would hold up
    everybody's events."""
    routes = APIRouter(prefix="/v1", route_class=BodyRoute)

    @routes.post("/embeddings", response_model=EmbeddingList)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Returns an embedding of each input."""
        name = served.name_for(body.model)
        request.state.call = figures = EmbeddingFigures()
        how = {"priority": body.priority, "tenant": request.state.tenant, "lora_request": served.adapter(name)}
        answer = until_late(body.timeout, time.monotonic(), _answer(llm, body, name, how, figures))
        return await until_disconnect(request.receive, answer)

    return routes


async def _answer(
    llm: AsyncLLM, body: EmbeddingRequest, model: str, how: dict[str, Any], done: EmbeddingFigures
) -> Response:
    width = (await llm.ready()).hidden_size
    if body.dimensions not in (None, width):
        raise InvalidRequestError(
            f"dimensions is {body.dimensions}; this model's embeddings have {width} numbers, and no fewer of them "
            f"would stand for the text; leave it out",
            param="dimensions",
        )
    params = PoolingParams(pooling_type=body.pooling_type, normalize=body.normalize)  # type: ignore[arg-type]
    prompts = body.prompts()
    written = [b""] * len(prompts)
    todo = iter(enumerate(prompts))

    async def work(charge: Charge | None) -> None:
        for index, prompt in todo:
            with of_entry("input", index) if len(prompts) > 1 else contextlib.nullcontext():
                found = await llm.embed(prompt, params, charge=charge, **how)
            entry = await asyncio.to_thread(_entry, found, index, body.encoding_format)
            written[index] = (b"," if index else b"") + entry
            done.num_tokens += len(found.prompt_token_ids)

    most_waiting = llm.limits(how["tenant"]).max_waiting
    at_once = min(AT_ONCE, len(prompts), AT_ONCE if most_waiting is None else max(1, most_waiting))
    workers: list[asyncio.Future[None]] = []
    try:
        counted = await llm.charge(len(prompts), tenant=how["tenant"]) if len(prompts) > 1 else contextlib.nullcontext()
        with counted as charge:
            workers += [asyncio.ensure_future(work(charge)) for _ in range(at_once)]
            await asyncio.gather(*workers)
    except PoolTooSmallError as error:
        raise PromptTooLongError(error.message, param="input") from None
    except PagemillError as error:
        error.param = "input" if error.param == "prompt" else error.param
        raise
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    answer = {
        "id": f"embd-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": model,
        "data": [],
        "usage": {"prompt_tokens": done.num_tokens, "total_tokens": done.num_tokens},
    }
    before, between, after = msgspec.json.encode(answer).partition(b'"data":[')
    return JSONInParts([before + between, *written, after])


def _entry(found: EmbeddingRequestOutput, index: int, encoding: str) -> bytes:
    numbers: Any = found.outputs.embedding
    if encoding == "base64":
        numbers = base64.b64encode(array("f", numbers).tobytes()).decode()
    return msgspec.json.encode({"object": "embedding", "index": index, "embedding": numbers})
