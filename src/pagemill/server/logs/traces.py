"""Sends a span of each request that generates to OpenTelemetry, with its queue, prefill and decode as spans in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers

from pagemill.frontend.outputs import RequestMetrics
from pagemill.server.logs.access_log import EndedRequest

EXPORT_S = 3.0
"""Seconds that a collector may take for a batch, and the end of the server waits for it."""

ATTRIBUTES = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "pagemill.cached_tokens",
}
"""Names of spans' attributes, by a call's figures."""


def provider_for(endpoint: str) -> TracerProvider:
    """Returns what sends spans to a collector, from a thread. `OTEL_*` variables say more: name, sampling, headers."""
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "pagemill"}
    provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_S)))
    return provider


class Traces:
    """Makes spans of times that are known anyway, once a request has ended. One that names a trace in `traceparent`
    (W3C) becomes part of that."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pagemill")
        self._propagator = TraceContextTextMapPropagator()

    def observe(self, request: EndedRequest) -> None:
        """Sends the spans of a request, if it came as far as to generate."""
        call = request.state.get("call")
        if call is None:
            return
        since_epoch_ns = time.time_ns() - time.monotonic_ns()

        def moment(monotonic_s: float) -> int:
            return int(monotonic_s * 1e9) + since_epoch_ns

        method, figures = request.scope["method"], call.figures()
        whole = self._tracer.start_span(
            f"{method} {request.path}",
            context=self._propagator.extract(Headers(scope=request.scope)),
            kind=SpanKind.SERVER,
            start_time=moment(request.began_s),
            attributes={
                "http.request.method": method,
                "http.route": request.path,
                "http.response.status_code": request.status,
                "pagemill.request_id": request.state["request_id"],
                "pagemill.tenant": request.state.get("tenant") or "",
                **{name: figures[figure] for figure, name in ATTRIBUTES.items() if figure in figures},
            },
        )
        if request.status >= 500:
            whole.set_status(Status(StatusCode.ERROR))
        inside = set_span_in_context(whole)
        for times in call.times():
            for name, began_s, ended_s in parts_of(times):
                part = self._tracer.start_span(name, context=inside, start_time=moment(began_s))
                part.end(moment(ended_s))
        whole.end(moment(request.ended_s))

    def close(self) -> None:
        """Sends what waits."""
        self._provider.shutdown()


def parts_of(times: RequestMetrics) -> Iterator[tuple[str, float, float]]:
    """Yields the parts of a request that have begun and ended, each with its beginning and end in seconds."""
    moments = (times.arrival_time, times.first_scheduled_time, times.first_token_time, times.last_token_time)
    for name, began_s, ended_s in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if began_s is not None and ended_s is not None:
            yield name, began_s, ended_s
