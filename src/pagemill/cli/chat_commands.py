"""The commands of `pagemill chat`, which begin with a slash."""

from __future__ import annotations

import difflib
import json
import os
from pathlib import Path

from pagemill.cli.chat_conversation import Conversation, text_of
from pagemill.errors import InvalidRequestError

COMMANDS = {
    "/help": "shows this",
    "/reset": "forgets what was said",
    "/system": "shows the system message; /system TEXT sets it, before the first turn",
    "/save": "/save FILE writes the conversation: as JSON if FILE ends with .json, else as Markdown",
    "/fork": "/fork NAME leaves the session as it is, and goes on in a copy of this name",
    "/exit": "leaves, as Ctrl-D does",
}
KEYS = "Enter sends, Alt-Enter or Ctrl-J begins another line, Ctrl-C stops an answer, Ctrl-D leaves."
LEAVE = None


async def run_command(line: str, conversation: Conversation) -> str | None:
    """Returns what a command has to say; `LEAVE` if it ends the chat. Raises `InvalidRequestError` for what is none."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {near[0]}?" if near else "/help lists them;"
        raise InvalidRequestError(f"there is no command {name}; {meant} a space before the / says it to the model")
    if rest and name in ("/help", "/reset", "/exit"):
        raise InvalidRequestError(f"{name} takes nothing behind it, and was given {rest!r}")
    if not rest and name in ("/save", "/fork"):
        raise InvalidRequestError(f"{name} needs something behind it: {COMMANDS[name]}")
    if name == "/exit":
        return LEAVE
    if name == "/help":
        width = max(map(len, COMMANDS))
        return "\n".join([*(f"{one:{width}}  {about}" for one, about in COMMANDS.items()), KEYS])
    if name == "/reset":
        await conversation.reset()
        return "forgotten"
    if name == "/save":
        return _save(conversation, Path(os.path.expanduser(rest)))
    if name == "/fork":
        before = conversation.name
        await conversation.fork(rest)
        return f"session {rest!r} goes on from here; {before!r} stays as it is"
    if rest:
        conversation.system = rest
    return "there is no system message" if conversation.system is None else f"system: {conversation.system}"


def _save(conversation: Conversation, file: Path) -> str:
    if file.suffix == ".json":
        text = json.dumps(conversation.messages, indent=2, ensure_ascii=False) + "\n"
    else:
        text = "\n".join(f"## {one['role']}\n\n{text_of(one)}\n" for one in conversation.messages)
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        raise InvalidRequestError(f"{file} is there already; name another file") from None
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be written: {error.strerror}; name another file") from error
    return f"{len(conversation.messages)} messages written to {file}"
