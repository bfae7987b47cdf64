"""The HTTP application: routes, the models they serve, health. It owns no engine: `AsyncLLM` is given to it."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

import pagemill
from pagemill.errors import ModelNotServedError
from pagemill.frontend.async_llm import AsyncLLM
from pagemill.server.chat import ChatCall
from pagemill.server.completions import CompletionCall
from pagemill.server.disconnect import EventStream, until_disconnect
from pagemill.server.errors import asked_by_client, install_error_handlers
from pagemill.server.gate import MAX_BODY_BYTES, ApiKeys, Gate
from pagemill.server.metrics import CONTENT_TYPE, Metrics
from pagemill.server.pins import pin_routes
from pagemill.server.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    ErrorResponse,
    KVMemory,
    ModelCard,
    ModelList,
)
from pagemill.server.requests import request_routes
from pagemill.server.sessions import session_routes
from pagemill.server.tenants import tenant_routes
from pagemill.tenant_limits import TenantsFile


def create_app(
    llm: AsyncLLM,
    served_model_name: str,
    tenants: TenantsFile | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> FastAPI:
    """Answers while the model still loads: generation waits for it, `/health` says 503. tenants: whose each key is."""
    app = FastAPI(
        title="pagemill",
        version=pagemill.__version__,
        responses={"4XX": {"model": ErrorResponse}, "5XX": {"model": ErrorResponse}},
    )
    app.add_middleware(Gate, keys=ApiKeys(tenants), max_body_bytes=max_body_bytes)
    install_error_handlers(app)
    created = int(time.time())

    def check_model(name: str | None) -> None:
        if name is not None and name != served_model_name:
            raise ModelNotServedError(
                f"the model {name!r} is not served here; this server has {served_model_name!r}", param="model"
            )

    def card() -> ModelCard:
        return ModelCard(id=served_model_name, created=created, max_model_len=llm.max_model_len)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        check_model(name)
        return card()

    @app.post("/v1/completions", response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Completion | Response:
        check_model(body.model)
        call = CompletionCall(llm, body, served_model_name, request.state.tenant)
        if body.stream:
            return EventStream(await until_disconnect(request.receive, call.prepare_stream()))
        return await until_disconnect(request.receive, call.run())

    @app.post("/v1/chat/completions", response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> ChatCompletion | Response:
        check_model(body.model)
        call = ChatCall(llm, body, served_model_name, request.state.tenant)
        if body.stream:
            return EventStream(await until_disconnect(request.receive, call.prepare_stream()))
        return await until_disconnect(request.receive, call.run())

    @app.get("/v1/kv_memory")
    async def kv_memory() -> KVMemory:
        return KVMemory(kv_memory=(await llm.ready()).kv_bytes)

    @app.post("/v1/kv_memory")
    async def resize_kv_memory(body: KVMemory) -> KVMemory:
        with asked_by_client():
            return KVMemory(kv_memory=(await llm.resize_kv_memory(body.kv_memory)).kv_bytes)

    app.include_router(tenant_routes(llm))
    metrics = Metrics()
    llm.on_request_end = metrics.observe

    @app.get("/metrics")
    async def prometheus() -> Response:
        stats = await llm.stats() if llm.is_ready else None
        return Response(metrics.render(stats), media_type=CONTENT_TYPE)

    app.include_router(request_routes(llm))
    app.include_router(session_routes(llm))
    app.include_router(pin_routes(llm))

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 when a request would be answered now; 503 while loading, and when the engine is gone."""
        if llm.error is not None:
            return JSONResponse({"status": "dead", "error": llm.error.message}, status_code=503)
        if llm.is_ready:
            return JSONResponse({"status": "ok"})
        done, total = llm.load_progress or (0, 0)
        return JSONResponse(
            {"status": "loading", "progress": round(done / total, 3) if total else 0.0}, status_code=503
        )

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": pagemill.__version__}

    return app
