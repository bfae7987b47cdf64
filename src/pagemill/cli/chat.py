"""`pagemill chat`: a conversation in the terminal, answers streamed, history kept, over restarts if it has a name."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagemill.cli.keys import keys_kept
from pagemill.cli.options import ModelArgument, engine_options, refuse_settings, run, sampling_options
from pagemill.cli.remote import ApiKey, Remote
from pagemill.errors import (
    ConfigError,
    InvalidRequestError,
    PromptTooLongError,
    RemoteServerError,
    StepFailedError,
)
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.record import check_name
from pagemill.sessions.store import default_path

if TYPE_CHECKING:
    from pagemill.cli.chat_conversation import Conversation
    from pagemill.cli.chat_input import Turns
    from pagemill.cli.chat_screen import Screen

FAILED = 1
"""The exit status of a chat in a pipe with a turn that failed."""


@sampling_options(temperature=0.7, top_p=0.9)
@partial(
    engine_options,
    session_path="File in which --session is kept. Default: sessions.sqlite in pagemill's cache folder.",
    kv_disk_memory='Disk space for KV blocks, which are found again after a restart: bytes or "20GiB". Default with '
    "--session: 4GiB.",
)
def chat(
    model: ModelArgument = "",
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help="Talk to the server at this URL, not to an engine of its own; MODEL may then be left out."
        ),
    ] = None,
    api_key: ApiKey = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    session: Annotated[
        str | None,
        typer.Option("--session", help="Name of the conversation: it is kept, and goes on the next time."),
    ] = None,
    *,
    settings: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Talk to a model in the terminal.

    With --session, the conversation's KV cache is kept on disk too, so that going on computes only what is new. The
    same command line goes on with it.

    With --url, any server with OpenAI's API is talked to; sessions are kept there, if it is pagemill.

    Without a terminal, each line of stdin is a turn, and answers are plain text.
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed, so that nobody can say anything; leave it open", param="stdin")
    if session is not None:
        check_name(session)
    if url is not None:
        refuse_settings(settings, url)
        talk = _talk_to_server(url, model, api_key, session, system, params)
    elif not model:
        raise ConfigError(
            "no model is named; give one, such as smollm2-135m, or --url of a server that has one", param="model"
        )
    elif session is None and "session_path" in settings:
        raise ConfigError(
            f"session_path is {settings['session_path']!r}, and the conversation has no name under which to keep it; "
            f"give --session NAME too, or leave --session-path out",
            param="session_path",
        )
    else:
        kept = {} if session is None else {"session_path": str(default_path()), "kv_disk_memory": "4GiB"}
        talk = _talk_to_engine(model, session, system, kept | settings, params)
    with keys_kept() if _has_person() else nullcontext():
        run(talk)


async def _talk_to_engine(
    model: str, name: str | None, system: str | None, settings: dict[str, Any], params: SamplingParams
) -> None:
    from pagemill.cli.chat_engine import EngineConversation
    from pagemill.cli.loading import loaded_engine

    async with loaded_engine(model, settings) as llm:
        await _talk(EngineConversation(llm, name, system, params))


async def _talk_to_server(
    url: str, model: str, api_key: str | None, name: str | None, system: str | None, params: SamplingParams
) -> None:
    from pagemill.cli.chat_server import ServerConversation, first_model

    async with Remote(url, api_key) as remote:
        await _talk(ServerConversation(remote, model or await first_model(remote), name, system, params))


async def _talk(conversation: Conversation) -> None:
    """Takes turns until the user leaves."""
    from pagemill.cli.chat_commands import run_command

    turns, screen = _terminal() if _has_person() else _pipe()
    failed = False
    if conversation.name is not None:
        screen.note(await conversation.resume())
        screen.show_turns(conversation.messages)
    if _has_person():
        screen.note("/help lists commands and keys, Ctrl-C stops an answer, Ctrl-D leaves")
    while (text := await turns.read()) is not None:
        try:
            if text.startswith("/"):
                said = await run_command(text.rstrip(), conversation)
                if said is None:
                    break
                screen.note(said)
            elif text.strip():
                await _answer(conversation, text.strip(), screen)
        except PromptTooLongError as error:
            screen.error(f"{error}; /reset forgets the conversation")
            failed = True
        except (InvalidRequestError, StepFailedError, RemoteServerError) as error:
            screen.error(str(error))
            failed = True
    if failed and not sys.stdin.isatty():
        raise typer.Exit(FAILED)


async def _answer(conversation: Conversation, text: str, screen: Screen) -> None:
    ended = None
    async with _stopped_by_ctrl_c(conversation), aclosing(conversation.say(text)) as pieces:
        with screen.answer():
            async for piece in pieces:
                screen.add(piece)
                ended = piece.finish_reason or ended
    if ended == "length":
        screen.note("(cut short: --max-tokens, or the longest sequence, is reached)")
    elif ended == "abort":
        screen.note("(stopped)")


@asynccontextmanager
async def _stopped_by_ctrl_c(conversation: Conversation) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, conversation.stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _has_person() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _terminal() -> tuple[Turns, Screen]:
    from pagemill.cli.chat_input import EditedTurns
    from pagemill.cli.chat_screen import TerminalScreen

    return EditedTurns(), TerminalScreen()


def _pipe() -> tuple[Turns, Screen]:
    from pagemill.cli.chat_input import LineTurns
    from pagemill.cli.chat_screen import PlainScreen

    return LineTurns(), PlainScreen()
