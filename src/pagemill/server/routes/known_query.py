"""Refuses query parameters that a route does not have: with `cache-salt` for `cache_salt`, it would act on what is
without a salt."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from pagemill.errors import UnknownArgumentError


def known_query(*without_effect: str) -> Any:
    """Returns a dependency that raises `UnknownArgumentError` for a parameter that a request's route does not declare.

    without_effect: parameters that are taken all the same, since other servers of the API have them.
    """

    def check(request: Request) -> None:
        declared = [field.alias for field in request.scope["route"].dependant.query_params]
        for name in request.query_params:
            if name not in declared and name not in without_effect:
                raise UnknownArgumentError.of("the query", name, declared)

    return Depends(check)
