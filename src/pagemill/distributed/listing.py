"""Keeps the names of the replicas that Ray Serve lists in this process, for its request router and for who watches.

This is a module of its own because Ray Serve sends the router's class by value: what it shares with others must be in a
module that it finds by name.
"""

from __future__ import annotations

from collections.abc import Callable

watchers: list[Callable[[set[str]], None]] = []
"""Each is called, in the router's thread, with the names of the replicas that take requests, whenever they change."""
kept: set[str] = set()
"""Names of replicas that are called although Ray Serve gives them no new requests: they end what they have begun."""
