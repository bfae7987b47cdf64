"""`/v1/requests`: what is running, and in which tiers its KV blocks lie."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from pagemill.frontend.async_llm import AsyncLLM


class SequenceCard(BaseModel):
    index: int
    status: Literal["running", "waiting"]
    num_tokens: int
    kv_blocks: dict[str, int]
    """By tier. One that waits holds none."""


class RequestCard(BaseModel):
    id: str
    object: Literal["request"] = "request"
    num_prompt_tokens: int
    sequences: list[SequenceCard]


class RequestList(BaseModel):
    object: Literal["list"] = "list"
    data: list[RequestCard]


def request_routes(llm: AsyncLLM) -> APIRouter:
    """Those of the tenant with this `cache_salt`, in the order in which they came."""
    routes = APIRouter(prefix="/v1/requests")

    @routes.get("")
    async def requests(request: Request, cache_salt: str = "") -> RequestList:
        return RequestList(
            data=[
                RequestCard(
                    id=one.request_id,
                    num_prompt_tokens=len(one.prompt_token_ids),
                    sequences=[
                        SequenceCard(
                            index=sequence.index,
                            status="running" if sequence.running else "waiting",
                            num_tokens=sequence.num_tokens,
                            kv_blocks=sequence.kv_blocks,
                        )
                        for sequence in one.sequences
                    ],
                )
                for one in await llm.requests(cache_salt=cache_salt, tenant=request.state.tenant)
            ]
        )

    return routes
