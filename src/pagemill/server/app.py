"""The HTTP application: routes, and the models they serve. It owns no engine: `AsyncLLM` is given to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from starlette.middleware.cors import CORSMiddleware

import pagemill
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.lora_request import LoRARequest
from pagemill.server.access.api_keys import HEADERS, ApiKeys
from pagemill.server.access.gate import Gate
from pagemill.server.access.hosts import AllowedHosts
from pagemill.server.access.limits import ServerLimits
from pagemill.server.access.rate_headers import RATE_HEADERS
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.access.turnover import Turnover
from pagemill.server.bodies.reader import BodyReader, BodyRoute
from pagemill.server.logs.access_log import ANTHROPICS_ID, REQUEST_ID
from pagemill.server.protocol.body import ErrorResponse
from pagemill.server.protocol.chat import ChatCompletion, ChatCompletionRequest
from pagemill.server.protocol.completions import Completion, CompletionRequest
from pagemill.server.protocol.errors import SHOULD_RETRY, install_error_handlers
from pagemill.server.routes.api_docs import Api, docs_routes
from pagemill.server.routes.call import respond
from pagemill.server.routes.chat import ChatCall
from pagemill.server.routes.completions import CompletionCall
from pagemill.server.routes.embeddings import embedding_routes
from pagemill.server.routes.engine import engine_routes
from pagemill.server.routes.health import health_routes
from pagemill.server.routes.kv_map import Feed, kv_map_routes
from pagemill.server.routes.messages import message_routes
from pagemill.server.routes.metrics import CONTENT_TYPE, Metrics
from pagemill.server.routes.models import ServedModels, model_routes
from pagemill.server.routes.page import page_routes
from pagemill.server.routes.pins import pin_routes
from pagemill.server.routes.responses import response_routes
from pagemill.server.routes.sessions import session_routes
from pagemill.server.routes.tokens import token_routes

EXPOSED_HEADERS = ["Retry-After", SHOULD_RETRY, REQUEST_ID, ANTHROPICS_ID, *RATE_HEADERS]
"""Headers of answers that pages of other sites may read, beside those that browsers always show."""


def create_app(
    llm: AsyncLLM,
    served_model_name: str | Sequence[str],
    keys: ApiKeys | None = None,
    limits: ServerLimits | None = None,
    access: ServerAccess | None = None,
    hosts: AllowedHosts | None = None,
    adapters: Sequence[LoRARequest] = (),
) -> FastAPI:
    """Returns the application. It answers while the model still loads: generation waits, `/health` says 503.

    served_model_name: one, or several for the same model. keys: None asks for none. limits, access: None for the
    defaults. hosts: None lets it be asked under any name. adapters: those that are served under their own names.
    """
    app = Api(
        title="pagemill",
        version=pagemill.__version__,
        description=(
            f"Where the server has API keys, send one as {HEADERS}. A field that is not named here is refused."
        ),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    limits = limits or ServerLimits()
    keys = keys or ApiKeys()
    app.add_middleware(Gate, keys=keys, limits=limits, hosts=hosts, rates=llm.rates)
    if access is not None and access.allowed_origins:
        app.add_middleware(  # around the gate: a page can read a refusal, and asks without a key whether it may ask
            CORSMiddleware,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            allow_credentials=access.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    turnover = Turnover()
    llm.on_request_end.append(turnover.note)
    install_error_handlers(app, turnover.wait_s)
    app.router.route_class = BodyRoute
    app.state.body_reader = BodyReader(lambda: llm.facts)
    app.state.tenants_reload = None
    served = ServedModels(llm, served_model_name, adapters)

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continues a prompt, or each of several: text or token ids."""
        return await respond(CompletionCall, llm, served, body, request)

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """Answers a conversation through the model's chat template."""
        return await respond(ChatCall, llm, served, body, request)

    app.include_router(response_routes(llm, served))
    app.include_router(message_routes(llm, served))
    app.include_router(model_routes(served))
    app.include_router(token_routes(llm, served))
    app.include_router(embedding_routes(llm, served))
    app.include_router(engine_routes(llm, keys))
    for routes in (session_routes, pin_routes):
        app.include_router(routes(llm))
    app.include_router(health_routes(llm, limits.stuck_after_s))
    app.include_router(docs_routes(app))
    metrics = app.state.metrics = Metrics(served.names[0])
    llm.on_request_end.append(metrics.observe)
    app.state.feed = Feed(llm, metrics)
    app.include_router(kv_map_routes(app.state.feed))
    app.include_router(page_routes())

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Gives counters and times in Prometheus' text format."""
        stats = await llm.stats() if llm.is_ready else None
        return Response(await asyncio.to_thread(metrics.render, stats, llm.restarts), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Names the version that runs."""
        return {"version": pagemill.__version__}

    return app
