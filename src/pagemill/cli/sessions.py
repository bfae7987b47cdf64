"""`pagemill sessions`: the conversations that are kept in a file."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from pagemill.cli.app import command_group
from pagemill.cli.help import HelpInSections
from pagemill.cli.listing import AsJson, print_listing
from pagemill.cli.wording import ago, printable
from pagemill.errors import SessionNotFoundError
from pagemill.namespace import Namespace
from pagemill.sessions.store import SessionStore, default_path
from pagemill.tenant_limits import DEFAULT_TENANT

sessions = command_group("List and delete the conversations that are kept in a file.")
SessionPath = Annotated[
    Path | None,
    typer.Option("--session-path", help="File of the sessions. Default: sessions.sqlite in pagemill's cache folder."),
]


@sessions.command(cls=HelpInSections)
def ls(session_path: SessionPath = None, as_json: AsJson = False) -> None:
    """List the sessions: model, length, last use."""
    path = session_path or default_path()
    kept = _open(path).list(None) if path.exists() else []
    table = Table("session", "model", "turns", "tokens", "last used", "tenant", "cache_salt", box=None)
    rows: list[dict[str, Any]] = []
    for info in kept:
        age = "damaged" if info.damaged else ago(time.time() - info.used_s)
        table.add_row(info.name, printable(info.model), str(info.num_turns), f"{info.num_tokens:,}", age,
                      *map(printable, info.space))  # fmt: skip
        rows.append(
            {"session": info.name, "model": info.model, "turns": info.num_turns,
             "tokens": info.num_tokens, "used_s": info.used_s, "damaged": info.damaged,
             **info.space._asdict()}
        )  # fmt: skip
    print_listing(rows, table, f"no sessions are kept in {path}", as_json)


@sessions.command(cls=HelpInSections)
def rm(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Sessions to delete.")],
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="The namespace that they are in.")] = "",
    tenant: Annotated[str, typer.Option("--tenant", help="Their tenant.")] = DEFAULT_TENANT,
    session_path: SessionPath = None,
) -> None:
    """Delete sessions. Their KV blocks are evicted like any others that nobody asks for."""
    path = session_path or default_path()
    if not path.exists():
        raise SessionNotFoundError(f"there is no session {names[0]!r}: no sessions are kept in {path}")
    store = _open(path)
    for name in names:
        store.delete(name, Namespace(tenant, cache_salt))
        sys.stdout.write(f"{name} deleted\n")


def _open(path: Path) -> SessionStore:
    return SessionStore(path, max_sessions=0, timeout_s=None)
