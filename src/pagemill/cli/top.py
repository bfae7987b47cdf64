"""`pagemill top`: the KV memory, the requests and the speed of a running server, live in the terminal."""

from __future__ import annotations

import asyncio
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from pagemill.cli.options import run
from pagemill.cli.remote import ApiKey, Remote
from pagemill.errors import ConfigError, NotFoundError, RemoteServerError

if TYPE_CHECKING:
    from pagemill.cli.top_screen import TopScreen

RETRY_S = 1.0


def top(
    url: Annotated[str, typer.Option("--url", help="Address of the server.")] = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    interval_s: Annotated[
        float, typer.Option("--interval-s", min=0.1, max=60, help="Seconds between two frames.")
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame, and leave.")] = False,
) -> None:
    """Watch a server's KV memory and requests in the terminal.

    q quits, p pauses, s sorts the requests. With a tenant's API key, it shows what that tenant may see.
    """
    if not once and not sys.stdout.isatty():
        raise ConfigError(
            "stdout is no terminal, where nothing can be watched; give --once for one frame", param="once"
        )
    run(_top(url, api_key, interval_s, once))


async def _top(url: str, api_key: str | None, interval_s: float, once: bool) -> None:
    from pagemill.cli.top_screen import TopScreen

    async with Remote(url, api_key) as remote:
        screen = TopScreen(f"{await _model(remote)} at {remote.url}")
        if once:
            await _follow(remote, interval_s, screen, frames=2)  # speeds need two
            if not screen.has_picture:
                raise RemoteServerError(f"{remote.url} ended the stream before its first picture; ask again")
            screen.print_once()
            return
        quit_asked = asyncio.Event()
        with screen, _keys(lambda key: quit_asked.set() if key == "q" else screen.press(key)):
            following = asyncio.ensure_future(_keep_following(remote, interval_s, screen))
            leaving = asyncio.ensure_future(quit_asked.wait())
            await asyncio.wait({following, leaving}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            if not following.done():
                following.cancel()
                return
        await following


async def _model(remote: Remote) -> str:
    return next(iter(await remote.models()), "no model")


async def _keep_following(remote: Remote, interval_s: float, screen: TopScreen) -> None:
    """Follows a server over its restarts. Raises what keeps it from beginning."""
    while True:
        try:
            await _follow(remote, interval_s, screen)
            screen.lost("the server has ended the stream")
        except RemoteServerError as error:
            if not screen.has_picture:
                raise
            screen.lost(error.message)
        await asyncio.sleep(RETRY_S)


async def _follow(remote: Remote, interval_s: float, screen: TopScreen, frames: int | None = None) -> None:
    """Shows the pictures of one stream, all or so many."""
    from pagemill.cli.top_picture import Picture

    picture, taken = Picture(), 0
    try:
        async with remote.events(f"/kv_map?interval_s={interval_s}") as stream, aclosing(stream) as events:
            async for event in events:
                picture.apply(event, time.monotonic())
                screen.show(picture)
                taken += 1
                if taken == frames:
                    return
    except NotFoundError:
        raise ConfigError(f"the server at {remote.url} has no block map, for it is not pagemill", param="url") from None


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[None]:
    """Takes keys one by one, if there is a keyboard."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, lambda: press(sys.stdin.read(1)))
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, before)
