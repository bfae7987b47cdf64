"""Whose sessions and pins a request is about: the caller's own, or, for an admin, those of any namespace."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request

from pagemill.errors import InvalidRequestError, PermissionDeniedError
from pagemill.namespace import Namespace
from pagemill.server.logs.audit import audit

All = Annotated[
    bool, Query(alias="all", description="Every namespace of every tenant, or of `tenant`; needs an admin key.")
]
Tenant = Annotated[str | None, Query(description="Another tenant than the caller's; needs an admin key.")]


def named(request: Request, tenant: str | None, cache_salt: str) -> Namespace:
    """Returns the namespace that a request names. Raises PermissionDeniedError for another tenant's without an admin's
    key, InvalidRequestError for what is no namespace."""
    if tenant is not None and tenant != request.state.tenant:
        _require_admin(request, "the sessions and pins of another tenant")
    return Namespace(request.state.tenant if tenant is None else tenant, cache_salt)


def require_all(request: Request, cache_salt: str) -> None:
    """Raises PermissionDeniedError unless the caller may see every namespace, InvalidRequestError if it names one."""
    _require_admin(request, "all namespaces")
    if cache_salt:
        raise InvalidRequestError("all lists every cache_salt; leave one of the two out", param="cache_salt")


def removed(request: Request, what: str, name: str, space: Namespace) -> None:
    """Logs the end of a session or a pin, if an admin has ended another tenant's."""
    if space.tenant != request.state.tenant:
        audit(request, f"{what} removed", tenant=space.tenant, name=name)


def _require_admin(request: Request, what: str) -> None:
    if not request.state.is_admin:
        raise PermissionDeniedError(f"{what} may be seen and changed by admins only; send an admin key")
