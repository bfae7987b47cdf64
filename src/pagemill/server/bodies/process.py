"""The process that reads large bodies: parses and checks one after another, and sends back what is left of each.

Started by `start_child`. It ends when the front end is gone, or a body could not be read; Ctrl-C is left to the front
end.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
from array import array
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from pagemill.engine.messages import EngineReady, Failure
from pagemill.errors import PagemillError
from pagemill.server.protocol.refusals import not_json, refusal_of

PROMPTS = ("prompt", "input")
"""Fields that hold a prompt, or several."""


def run(descriptor: int) -> NoReturn:
    """Answers until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()  # what is parsed has no cycles, and collections take most of its time
    with Connection(descriptor) as connection:
        while True:
            try:
                (kind, facts), body = pickle.loads(connection.recv_bytes()), connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)
            # Millions of small objects leave holes behind: a process of its own for each body gives all memory back.
            reading = os.fork()
            if not reading:
                connection.send_bytes(pickle.dumps(_read(kind, body, facts)))
                os._exit(0)
            if os.waitpid(reading, 0)[1]:
                os._exit(1)


def packed(value: Any) -> Any:
    """Returns lists of integers, and lists of such lists, as arrays, which take no time to send; anything else as it
    is."""
    first = value[0] if type(value) is list and value else None
    if type(first) is list:
        return [packed(entry) for entry in value]
    try:
        return array("q", value) if type(first) is int else value
    except (TypeError, OverflowError):
        return value


def _read(kind: type[BaseModel], body: bytes, facts: EngineReady | None) -> dict[str, Any] | Failure:
    """Returns the state of a checked body, packed, or why it is refused."""
    try:
        try:
            given = json.loads(body)
            state = kind.model_validate(given, from_attributes=True).__getstate__()
        except ValidationError as error:
            raise refusal_of(error.errors(), given, kind) from None
        except json.JSONDecodeError as error:
            raise not_json(error.msg) from None
        except (ValueError, RecursionError) as error:
            raise not_json(error) from None
        fields = {name: packed(value) for name, value in state["__dict__"].items()}
        if facts is not None:
            _check_prompts(fields, facts)
    except PagemillError as refused:
        return Failure.of(refused)
    return {**state, "__dict__": fields}


def _check_prompts(fields: dict[str, Any], facts: EngineReady) -> None:
    """Raises `PromptTooLongError` here, since four million token ids would hold the front end while it gets them."""
    for value in (fields.get(name) for name in PROMPTS):
        for prompt in value if isinstance(value, list) else [value]:
            if isinstance(prompt, array) and len(prompt) > facts.max_model_len:
                facts.check_prompt_length(len(prompt))
