"""Batches of messages between a front end and a replica: Ray costs time for each call, not for each byte.

Each batch says when it was sent, in seconds of its sender's `time.monotonic()`: machines' clocks begin at different
times, and what is in a batch is moved to the receiver's.
"""

from __future__ import annotations

import msgspec

from pagemill.engine.messages import (
    AbortRequests,
    EngineReady,
    EngineRequest,
    Failure,
    FinishSequences,
    Held,
    StepOutputs,
)
from pagemill.engine.queries import Answer, Question


class Offer(msgspec.Struct, tag=True):
    """Says where a replica can be reached past Ray. token: what it knows the front end by, once."""

    host: str
    port: int
    token: bytes


ToReplica = EngineRequest | AbortRequests | FinishSequences | Question
FromReplica = StepOutputs | Held | Answer | EngineReady | Failure | Offer


class Inbound(msgspec.Struct):
    """Messages to a replica."""

    sent_s: float
    messages: list[ToReplica]


class Outbound(msgspec.Struct):
    """Messages from a replica. The first of a connection are its facts, and all blocks that it holds; an offer of
    another way may come before them."""

    sent_s: float
    messages: list[FromReplica]


class Batch(msgspec.Struct):
    """Encodes as either: its messages are encoded already."""

    sent_s: float
    messages: list[msgspec.Raw]


INBOUND = msgspec.msgpack.Decoder(Inbound)
OUTBOUND = msgspec.msgpack.Decoder(Outbound)
