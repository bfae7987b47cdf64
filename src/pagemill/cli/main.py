"""The `pagemill` command: starts an engine's process at once where one is needed, and turns errors into one line."""

from __future__ import annotations

import contextlib
import os
import re
import sys

START_AN_ENGINE = ("generate", "chat", "serve", "bench")
NEEDS_NONE = re.compile(r"(-h|--help|--show-config|--(url|replicas)(=.*)?)$")
"""A flag with which none of them does."""


def main(args: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 1 an error of pagemill's own (one line on stderr), 2 wrong usage."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who has started this
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, until the end
    given = sys.argv[1:] if args is None else args
    if given and given[0] in START_AN_ENGINE and given[1:] and not any(map(NEEDS_NONE.match, given)):
        from pagemill.frontend.spawn import spawn_ahead

        spawn_ahead()

    from typer import Abort

    from pagemill.cli.app import COMMANDS, app
    from pagemill.cli.usage import WrongUsage, words_of
    from pagemill.cli.wording import one_line
    from pagemill.errors import PagemillError

    try:
        status = app(args=args, prog_name="pagemill", standalone_mode=False)
        sys.stdout.flush()
        sys.exit(status)
    except PagemillError as error:
        sys.stderr.write(f"error: {one_line(str(error))}\n")
        sys.exit(1)
    except WrongUsage as error:
        command = " ".join(["pagemill", *(word for word in given[:1] if word in COMMANDS)])
        sys.stderr.write(f"error: {one_line(words_of(error, command, given))}\n")
        sys.exit(2)
    except Abort:
        sys.exit(1)
    except OSError as error:
        _leave_stdout()
        sys.stderr.write(f"error: {one_line(str(error) or type(error).__name__)}\n")
        sys.exit(1)


def _leave_stdout() -> None:
    """Lets what stdout still holds go nowhere: the interpreter would fail with it once more, and say so."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
