"""Spans of requests: the whole and its parts, in the trace that the client names; nothing without a collector."""

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from pagemill.errors import ConfigError
from pagemill.frontend.outputs import RequestMetrics
from pagemill.server.app import create_app
from pagemill.server.logs.access_log import AccessLog
from pagemill.server.logs.output import ServerLogs
from pagemill.server.logs.traces import Traces, parts_of, provider_for

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def traced(served):
    """Asks the real engine through an application that is traced; returns the spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    before = served.llm.on_request_end
    app = AccessLog(create_app(served.llm, "m"), Traces(provider).observe)

    def traced(path, body, **headers):
        async def post():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
                return await http.post(path, json=body)

        exporter.clear()
        served.run(post())
        return exporter.get_finished_spans()

    yield traced
    served.llm.on_request_end = before


def test_a_request_is_a_span_with_its_parts_in_the_trace_of_its_client(traced):
    body = {"prompt": "One two", "max_tokens": 4, "ignore_eos": True}
    *parts, whole = traced("/v1/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
    assert [part.name for part in parts] == ["queue", "prefill", "decode"]
    assert (whole.name, whole.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert f"{whole.context.trace_id:032x}" == TRACE
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes["http.response.status_code"] == 200
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert all(part.parent.span_id == whole.context.span_id for part in parts)
    moments = [whole.start_time, *(moment for part in parts for moment in (part.start_time, part.end_time))]
    assert moments == sorted(moments)
    assert parts[-1].end_time <= whole.end_time


def test_a_request_that_generates_nothing_has_no_span(traced):
    assert traced("/v1/completions", {"prompt": 1.5}) == ()
    assert traced("/tokenize", {"prompt": "One"}) == ()


def test_parts_that_have_not_come_are_left_out():
    assert list(parts_of(RequestMetrics(1.0, 2.0))) == [("queue", 1.0, 2.0)]
    assert list(parts_of(RequestMetrics(1.0))) == []


def test_the_service_has_a_name_and_may_be_given_another(monkeypatch):
    endpoint = "http://127.0.0.1:9/v1/traces"
    assert provider_for(endpoint).resource.attributes["service.name"] == "pagemill"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    assert provider_for(endpoint).resource.attributes["service.name"] == "mine"


def test_an_endpoint_is_a_url():
    with pytest.raises(ConfigError, match="otlp_traces_endpoint is 'collector:4317'; it must be a URL"):
        ServerLogs(otlp_traces_endpoint="collector:4317")
