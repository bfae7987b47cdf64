"""Logs what administrators do, with the id and the address of who asked."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from pagemill.server.logs.access_log import client_address
from pagemill.server.logs.output import AUDIT, fields


def audit(request: Request, act: str, **what: Any) -> None:
    """Writes a line of what a request has done, at every level of the log."""
    request_id, client = getattr(request.state, "request_id", None), client_address(request.scope)
    AUDIT.info(act, extra=fields(request_id=request_id, client=client, **what))
