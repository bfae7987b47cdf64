"""SessionRecord and SessionInfo: one session, what is listed of it, and the row of a table that it is written as."""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from pagemill import errors
from pagemill.namespace import Namespace

RESPONSE = "resp_"
"""How the names of responses begin: answers that are kept one by one, and give way where there is no room."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_ADAPTER_MARK = " adapter "
_BESIDE = ("tools", "instructions", "response")
"""What is written beside messages where a session has it."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """One session as it was when it was read. Times are seconds since 1970.

    token_ids: prompts and answers of all turns, as the engine saw and produced them.
    messages:  the same as messages; None for a session of plain prompts.
    tools:     those that the conversation was rendered with; None for none.
    space:     its namespace: sessions of another one have names of their own, and cannot be seen.
    tokenizer: fingerprint of the tokenizer that gives the ids their meaning, and the digest of its LoRA adapter, if it
               has one; model: the model's or the adapter's name, for people.
    state:     changes with every turn; "" for a session that has none yet.
    instructions: the system message that it was rendered with before `messages`; None for none.
    response:  what is kept with an answer that is a session of its own; None for a session that was named.
    """

    name: str
    space: Namespace
    model: str
    tokenizer: str
    token_ids: list[int]
    messages: list[dict[str, Any]] | None
    num_turns: int
    created_s: float
    used_s: float
    state: str
    tools: list[dict[str, Any]] | None = None
    instructions: str | None = None
    response: dict[str, Any] | None = None

    @property
    def adapter(self) -> bytes:
        """The digest of its LoRA adapter; empty for none."""
        return bytes.fromhex(self.tokenizer.partition(_ADAPTER_MARK)[2])

    @property
    def info(self) -> SessionInfo:
        """The session as it is listed."""
        num_messages = None if self.messages is None else len(self.messages)
        return SessionInfo(
            *(self.name, self.space, self.model, self.num_turns, num_messages, len(self.token_ids)),
            *(self.created_s, self.used_s),
        )


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Holds what is listed of a session: all but what was said in it. Times are seconds since 1970.

    num_messages: None for a session of plain prompts.
    damaged:      what is listed is lost, but for the name: it can be deleted. What was said is checked where it is
                  used.
    """

    name: str
    space: Namespace
    model: str
    num_turns: int
    num_messages: int | None
    num_tokens: int
    created_s: float
    used_s: float
    damaged: bool = False


def fingerprint_of(tokenizer: str, adapter: bytes) -> str:
    """Returns what a session keeps of its tokenizer, and of its LoRA adapter, if it has one."""
    return tokenizer + _ADAPTER_MARK + adapter.hex() if adapter else tokenizer


def is_response(name: object) -> bool:
    """Returns whether a session of this name is a response."""
    return isinstance(name, str) and name.startswith(RESPONSE)


def check_name(name: str) -> None:
    """Raises InvalidRequestError unless the name can stand in a URL and on a command line, and is no response's."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise errors.InvalidRequestError(
            f"the session name {name!r:.140} is not 1 to 128 letters, digits and . _ : @ - that begin with a letter or "
            f"digit; choose another",
            param="session_id",
        )
    if is_response(name):
        raise errors.InvalidRequestError(
            f"the session name {name!r} begins like a response's; choose another, or go on from the response by "
            f"previous_response_id",
            param="session_id",
        )


def row_of(record: SessionRecord) -> tuple[Any, ...]:
    """Returns a session as the table has it, but for the checksum."""
    return (
        *(*record.space, record.name, record.state, record.model, record.tokenizer),
        struct.pack(f"<{len(record.token_ids)}I", *record.token_ids),
        _written(record),
        *(record.num_turns, record.created_s, record.used_s),
    )


def _written(record: SessionRecord) -> str | None:
    """Returns a session's messages as JSON: a list, or an object that has also what stands beside them."""
    if record.messages is None:
        return None
    beside = {name: value for name in _BESIDE if (value := getattr(record, name)) is not None}
    return json.dumps({"messages": record.messages, **beside} if beside else record.messages, default=dict)


def checksum_of(row: tuple[Any, ...]) -> bytes:
    """Returns the checksum of a row as `row_of` returns it, or of what is listed of it."""
    return xxhash.xxh3_128_digest(msgspec.msgpack.encode(row))


def record_of(row: tuple[Any, ...]) -> SessionRecord:
    """Returns a row of the table as a session. Raises SessionStoreError for one that was not written like this."""
    *values, checksum = row
    tenant, cache_salt, name, state, model, tokenizer, packed, written, num_turns, created_s, used_s = values
    if checksum != checksum_of(tuple(values)):
        raise errors.SessionStoreError(
            f"session {name!r:.140} is damaged: its checksum is not that of its content; delete it, and begin another"
        )
    space, token_ids = Namespace(tenant, cache_salt), list(struct.unpack(f"<{len(packed) // 4}I", packed))
    kept = None if written is None else json.loads(written)
    messages, beside = (kept["messages"], kept) if isinstance(kept, dict) else (kept, {})
    beside_messages: dict[str, Any] = {key: beside.get(key) for key in _BESIDE}
    return SessionRecord(
        *(name, space, model, tokenizer, token_ids, messages, num_turns, created_s, used_s, state), **beside_messages
    )


def card_checksum_of(row: tuple[Any, ...], num_messages: int | None) -> bytes:
    """Returns the checksum of what is listed of a row as `row_of` returns it."""
    tenant, cache_salt, name, _, model, _, packed, _, num_turns, created_s, used_s = row
    card = (tenant, cache_salt, name, model, num_turns, num_messages, len(packed) // 4, created_s, used_s)
    return checksum_of(card)


def info_of(card: tuple[Any, ...]) -> SessionInfo:
    """Returns a session as it is listed; by name only if what is listed is damaged."""
    *values, checksum = card
    tenant, cache_salt, name, model, num_turns, num_messages, num_tokens, created_s, used_s = values
    space = Namespace(tenant, cache_salt)
    if checksum != checksum_of(tuple(values)):
        return SessionInfo(name, space, "", 0, None, 0, 0.0, 0.0, damaged=True)
    return SessionInfo(name, space, model, num_turns, num_messages, num_tokens, created_s, used_s)
