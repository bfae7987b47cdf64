"""Reads metrics and labels out of PromQL, as far as the project's own queries need it."""

from __future__ import annotations

import re

METRIC = re.compile(r"pagemill:\w+")
SELECTED = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
GROUPED = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def metrics_in(query: str) -> set[str]:
    """Returns the names of pagemill's metrics in a query."""
    return set(METRIC.findall(query))


def labels_in(query: str) -> set[str]:
    """Returns the labels that a query selects or groups by."""
    grouped = (name.strip() for group in GROUPED.findall(query) for name in group.split(","))
    return {*SELECTED.findall(query), *grouped}
