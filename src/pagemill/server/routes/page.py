"""The page at `/`: files of the package, sent with headers that let them run nothing else and ask nobody else."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import APIRouter, Request
from fastapi.responses import Response

from pagemill.errors import NotFoundError

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> APIRouter:
    """Returns the routes of `/` and of the files that it needs, under `/page/`, which are read now."""
    routes = APIRouter(include_in_schema=False)
    answers = {
        file.name: (file.read_bytes(), TYPES[file.name.rpartition(".")[2]])
        for file in files("pagemill.server").joinpath("page").iterdir()
    }

    def answer(name: str, request: Request) -> Response:
        if name not in answers:
            raise NotFoundError(f"the page has no file {name!r}; open /")
        content, kind = answers[name]
        headers = {**HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"'}
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    @routes.get("/")
    async def index(request: Request) -> Response:
        return answer("index.html", request)

    @routes.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return answer(name, request)

    return routes
