"""The API's description: every route and field is in it, and the page that shows it loads nothing."""

import asyncio
import base64
import re
from types import SimpleNamespace

import httpx
import pytest
from fastapi.routing import APIRoute

from pagemill.server.access.api_keys import ApiKeys
from pagemill.server.access.server_access import ServerAccess
from pagemill.server.app import create_app

NOT_DESCRIBED = {"/docs", "/openapi.json", "/", "/page/{name}", "/v1/models/"}
"""Pages for people, what describes the rest, and a second spelling of a path."""


def got(*paths, keys=None, **headers):
    """The application without an engine, and its answers."""
    app = create_app(
        SimpleNamespace(
            facts=None, is_ready=False, restarts=(0, 0), model="m", rates=lambda tenant: {}, on_request_end=[]
        ),
        "m",
        keys,
    )

    async def ask():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers) as http:
            return [await http.get(path) for path in paths]

    return app, *asyncio.run(ask())


def test_every_route_is_described():
    app, answer = got("/openapi.json")
    schema = answer.json()
    routers = [app, *(route.original_router for route in app.routes if hasattr(route, "original_router"))]
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
    assert {route.path for route in routes if not route.include_in_schema} <= NOT_DESCRIBED
    assert {"/health", "/metrics", "/version", "/v1/pins/{name}"} <= schema["paths"].keys()
    assert list(schema["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == ["text/plain"]
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description", "").endswith("."), f"{method} {path}"
            assert operation["responses"], path


def test_paths_that_take_a_key_are_told_apart():
    schema = got("/openapi.json")[1].json()
    assert schema["components"]["securitySchemes"] == {"ApiKey": {"type": "http", "scheme": "bearer"}}
    optional = {path for path, methods in schema["paths"].items() if methods.get("get", {}).get("security") == [{}]}
    assert optional == {"/health", "/live", "/ready", "/version"}
    assert schema["paths"]["/v1/completions"]["post"]["security"] == [{"ApiKey": []}, {}]


def test_the_page_shows_all_of_it_and_loads_nothing():
    _, schema, page = got("/openapi.json", "/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["content-security-policy"].startswith("default-src 'none'; style-src 'unsafe-inline'")
    assert not re.search(r"<script|<link|<img|<iframe|\bsrc=|https?:|url\(|@import| on\w+=", page.text)
    for path, methods in schema.json()["paths"].items():
        for operation in methods.values():
            assert f'<section id="{operation["operationId"]}">' in page.text
        assert f"<code>{path}</code>" in page.text
    for name, one in schema.json()["components"]["schemas"].items():
        assert f'id="schema-{name}"' in page.text
        for field in one.get("properties", {}):
            assert f"<td><code>{field}</code>" in page.text
    targets = set(re.findall(r'href="#([^"]+)"', page.text))
    assert targets <= set(re.findall(r'id="([^"]+)"', page.text))
    assert "CompletionRequest" in page.text
    assert "&lt;function" not in page.text


def test_nothing_comes_from_other_hosts_under_other_names():
    assert [answer.status_code for answer in got("/redoc", "/docs/oauth2-redirect")[1:]] == [404, 404]


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/metrics"])
def test_a_browser_asks_for_the_key(path):
    keys = ApiKeys(None, ServerAccess(api_key=["sk-a"]))
    _, refused, plain = got(path, "/v1/models", keys=keys)
    assert refused.status_code == plain.status_code == 401
    assert refused.headers["www-authenticate"].startswith("Basic realm=")
    assert plain.headers["www-authenticate"] == "Bearer"
    sent = base64.b64encode(b"anyone:sk-a").decode()
    _, shown, plain = got(path, "/v1/models", keys=keys, Authorization=f"Basic {sent}")
    assert (shown.status_code, plain.status_code) == (200, 401)
    for wrong in ("Basic", "Basic !", "Basic " + base64.b64encode(b"anyone:sk-b").decode(), "Basic //79"):
        assert got(path, keys=keys, Authorization=wrong)[1].status_code == 401
