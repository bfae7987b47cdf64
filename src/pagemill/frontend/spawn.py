"""Starts engine processes, on request ahead of their use. Imports little: it runs before anything else does.

An engine has its own process session: a Ctrl-C in the terminal reaches the front end alone.
"""

from __future__ import annotations

from pagemill.child_process import Child, start_child

ENGINE = "pagemill.engine.process"
ENGINE_NICENESS = 5
"""How much higher an engine's niceness is than its front end's, whose short turns all streams wait for."""


_ahead: list[Child] = []
"""At most one."""


def spawn_ahead() -> None:
    """Starts the process that the next `spawn` will return, unless one waits for that already: it imports torch while
    this one imports the rest."""
    if not _ahead:
        _ahead.append(start_child(ENGINE, ENGINE_NICENESS))


def spawn() -> Child:
    """An engine process that waits for its `Start`."""
    return _ahead.pop() if _ahead else start_child(ENGINE, ENGINE_NICENESS)
