"""`pagemill chat`: a conversation in the terminal, answers streamed, history kept."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagemill.cli.options import ModelArgument, engine_options, sampling_options
from pagemill.errors import InvalidRequestError, PromptTooLongError, StepFailedError
from pagemill.sampling.params import SamplingParams

if TYPE_CHECKING:
    from pagemill.engine.async_llm import AsyncLLM


@sampling_options(temperature=0.7, top_p=0.9)
@engine_options
def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    *,
    settings: dict[str, Any],
    params: SamplingParams,
) -> None:
    """Talk to a model in the terminal."""
    try:
        asyncio.run(_load_and_talk(model, system, settings, params))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


async def _load_and_talk(model: str, system: str | None, settings: dict[str, Any], params: SamplingParams) -> None:
    from pagemill.cli.loading import loaded_engine, messages

    async with loaded_engine(model, settings) as llm:
        messages.print("/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer", style="dim")
        conversation = Conversation(llm, system, params)
        while (line := _read_line()) is not None:
            if line == "/reset":
                conversation.reset()
                messages.print("forgotten", style="dim")
            elif line:
                try:
                    await conversation.say(line)
                except PromptTooLongError as error:
                    messages.print(f"{error}\n/reset forgets the conversation", style="red")
                except (InvalidRequestError, StepFailedError) as error:
                    messages.print(str(error), style="red")


class Conversation:
    """The turns so far. A turn that failed leaves no trace; an answer that was stopped stays as far as it came."""

    def __init__(self, llm: AsyncLLM, system: str | None, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        self._turns = []

    async def say(self, text: str) -> None:
        """Writes the answer to stdout as it comes."""
        question = {"role": "user", "content": text}
        prompt = await self._llm.render_chat([*self._opening, *self._turns, question])
        stream = await self._llm.submit(prompt, self._params)
        pieces: list[str] = []

        async def write() -> None:
            async for output in stream:
                for new in output.outputs:
                    pieces.append(new.text)
                    sys.stdout.write(new.text)
                    sys.stdout.flush()

        writing = asyncio.ensure_future(write())
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, writing.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await writing
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            stream.close()
            sys.stdout.write("\n")
        self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]


def _read_line() -> str | None:
    """What the user types, stripped; None to leave. Nothing else happens meanwhile: it may hold the event loop up."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() its line editing)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return ""
    finally:
        signal.signal(signal.SIGINT, previous)
    return None if line == "/exit" else line
