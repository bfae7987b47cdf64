"""`pagemill chat`: a conversation in the terminal, answers streamed, history kept, over restarts if it has a name."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagemill.cli.options import ModelArgument, engine_options, run, sampling_options
from pagemill.cli.wording import counted
from pagemill.errors import InvalidRequestError, PromptTooLongError, SessionNotFoundError, StepFailedError
from pagemill.sampling.params import SamplingParams
from pagemill.sessions.store import check_name, default_path

if TYPE_CHECKING:
    from pagemill.frontend.session import AsyncSession


@sampling_options(temperature=0.7, top_p=0.9)
@engine_options
def chat(
    model: ModelArgument,
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

    With --session, the conversation's KV cache is kept on disk too (--kv-disk-memory, 4GiB unless given), so that going
    on computes only what is new.
    """
    if session is not None:
        check_name(session)
        settings = {"session_path": str(default_path()), "kv_disk_memory": "4GiB"} | settings
    run(_load_and_talk(model, session, system, settings, params))


async def _load_and_talk(
    model: str, name: str | None, system: str | None, settings: dict[str, Any], params: SamplingParams
) -> None:
    from pagemill.cli.loading import loaded_engine, messages

    async with loaded_engine(model, settings) as llm:
        messages.print("/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer", style="dim")
        conversation = Conversation(llm.session(name or "chat"), system, params)
        if name is not None:
            messages.print(await conversation.resume(), style="dim")
        while (line := _read_line()) is not None:
            if line == "/reset":
                await conversation.reset()
                messages.print("forgotten", style="dim")
            elif line:
                try:
                    await conversation.say(line)
                except PromptTooLongError as error:
                    messages.print(f"{error}\n/reset forgets the conversation", style="red")
                except (InvalidRequestError, StepFailedError) as error:
                    messages.print(str(error), style="red")


class Conversation:
    """The session's turns. A turn that failed leaves no trace; an answer that was stopped stays as far as it came."""

    def __init__(self, session: AsyncSession, system: str | None, params: SamplingParams) -> None:
        self._session = session
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._begun = False

    async def resume(self) -> str:
        """Returns what there is to go on from, in words.

        Raises `InvalidRequestError` if there is something, and a system message too.
        """
        try:
            record = await self._session.record()
        except SessionNotFoundError:
            return f"session {self._session.name!r} begins"
        turns, tokens = counted(record.num_turns, "turn"), counted(len(record.token_ids), "token")
        if self._opening:
            raise InvalidRequestError(
                f"session {record.name!r} goes on after {turns}, where a system message (--system) has no place; "
                f"leave it out, or begin another session",
                param="system",
            )
        self._begun = True
        return f"session {record.name!r} goes on after {turns}, {tokens}"

    async def reset(self) -> None:
        if self._begun:
            await self._session.delete()
        self._begun = False

    async def say(self, text: str) -> None:
        """Writes the answer to stdout as it comes."""
        messages = [*([] if self._begun else self._opening), {"role": "user", "content": text}]
        stream = await self._session.submit_chat(messages, self._params)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, stream.abort)
        try:
            async for output in stream:
                for new in output.outputs:
                    sys.stdout.write(new.text)
                    sys.stdout.flush()
            self._begun = True
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            stream.close()
            sys.stdout.write("\n")


def _read_line() -> str | None:
    """Returns what the user types, stripped; None to leave. Nothing else happens meanwhile: it may hold up the event
    loop."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its line editing)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():  # Ctrl-D writes none, and the shell's prompt would follow on the same line
            sys.stdout.write("\n")
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    finally:
        signal.signal(signal.SIGINT, previous)
    return None if line == "/exit" else line
