"""`/openapi.json`, and `/docs`, which shows the same to people: one page without scripts that loads nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment

from pagemill.server.access.api_keys import is_open

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


SCHEME = "ApiKey"


class Api(FastAPI):
    """An application whose description says which paths take a key, those of servers that have any."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        schema["components"]["securitySchemes"] = {SCHEME: {"type": "http", "scheme": "bearer"}}
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["security"] = [{}] if is_open(path) else [{SCHEME: []}, {}]
        return schema


class Field(NamedTuple):
    """A field of a body or a parameter of a path, in words. kinds: names of schemas stand beside their texts."""

    name: str
    kinds: list[tuple[str, str]]
    description: str
    default: str
    required: bool


def docs_routes(app: FastAPI) -> APIRouter:
    """Returns the routes. Both answers are made once, beside the event loop: that takes a while."""
    routes = APIRouter(include_in_schema=False)
    page = cache(lambda: _page(app.openapi()))

    @routes.get("/openapi.json")
    async def openapi() -> JSONResponse:
        return JSONResponse(await asyncio.to_thread(app.openapi))

    @routes.get("/docs")
    async def docs() -> HTMLResponse:
        return HTMLResponse(await asyncio.to_thread(page), headers=HEADERS)

    return routes


def _page(schema: dict[str, Any]) -> str:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(Path(__file__).with_name("api_docs.html").read_text(encoding="utf-8"))
    schemas = schema["components"]["schemas"]
    return template.render(
        title=schema["info"]["title"],
        version=schema["info"]["version"],
        description=schema["info"].get("description", ""),
        operations=[
            _operation(path, method, operation)
            for path, methods in schema["paths"].items()
            for method, operation in methods.items()
        ],
        schemas=[(name, one.get("description", ""), _fields(one)) for name, one in sorted(schemas.items())],
    )


def _operation(path: str, method: str, operation: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": operation["operationId"],
        "method": method.upper(),
        "path": path,
        "description": operation.get("description", ""),
        "parameters": [
            Field(
                one["name"],
                list(_kinds(one["schema"])),
                one.get("description", f"In the {one['in']}."),
                _default(one["schema"]),
                one.get("required", False),
            )
            for one in operation.get("parameters", [])
        ],
        "body": _content(operation.get("requestBody", {})),
        "answer": _content(operation["responses"].get("200", {})),
    }


def _content(holder: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the kinds of a body, or of an answer, of which each has one media type."""
    return [kind for media in holder.get("content", {}).values() for kind in _kinds(media.get("schema", {}))]


def _fields(schema: dict[str, Any]) -> list[Field]:
    required = schema.get("required", [])
    return [
        Field(name, list(_kinds(one)), one.get("description", ""), _default(one), name in required)
        for name, one in schema.get("properties", {}).items()
    ]


def _default(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default is None else str(default)


def _kinds(schema: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields what a value may be, as pairs of a text and the name of a schema, or "" where it has none."""
    for one in schema.get("anyOf", schema.get("oneOf", [schema])):
        if "$ref" in one:
            name = one["$ref"].rpartition("/")[2]
            yield name, name
        elif one.get("type") == "array":
            for text, name in _kinds(one.get("items", {})):
                yield f"list of {text}", name
        elif "enum" in one or "const" in one:
            yield " or ".join(map(repr, one.get("enum", [one.get("const")]))), ""
        else:
            yield one.get("type", "any"), ""
