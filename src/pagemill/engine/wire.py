"""Frames on the socket between front end and engine process: 4 bytes of length (little endian), then msgpack."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from pagemill.errors import InvalidRequestError

T = TypeVar("T")

HEADER = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18
_LONGEST_WAIT_S = 3600.0
_encoder = msgspec.msgpack.Encoder()


def frame(message: Any) -> bytes:
    """Returns the message with its length before it, ready to be sent. Raises what `encode` raises."""
    return framed(encode(message))


def framed(payload: bytes) -> bytes:
    """Returns bytes with their length before them."""
    return HEADER.pack(len(payload)) + payload


def encode(message: Any) -> bytes:
    """Returns the message as msgpack.

    Raises `InvalidRequestError` for what the format cannot say: integers beyond 64 bits, text that is not Unicode.
    """
    try:
        return _encoder.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise InvalidRequestError(
            f"an argument cannot be sent to the engine: {error}; integers must fit 64 bits, text must be valid Unicode"
        ) from error


class Channel(Generic[T]):
    """One end of the socket, used without asyncio. Not thread-safe."""

    def __init__(self, sock: socket.socket, received: Any) -> None:
        """Takes one end of the socket. received: the type (or union) of what comes in."""
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(received)
        self._buffer = bytearray()

    def send(self, message: Any) -> None:
        """Sends a message; blocks while the other side is behind. Raises `OSError` when it is gone."""
        self._socket.sendall(frame(message))

    def receive(self, *, block: bool, timeout_s: float | None = None) -> list[T] | None:
        """Returns the messages that have come, in order; None when the other side is gone.

        block: waits for at least one, but no longer than `timeout_s`.
        """
        messages = list(self._take())
        if block and timeout_s is not None and not messages:
            block = bool(select.select([self._socket], [], [], min(timeout_s, _LONGEST_WAIT_S))[0])
        while not messages or not block:
            try:
                data = self._socket.recv(_RECEIVE_BYTES, 0 if block else socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                return None
            if not data:
                return None
            self._buffer += data
            messages.extend(self._take())
        return messages

    def _take(self) -> Iterator[T]:
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(self._buffer[HEADER.size : end])
            del self._buffer[:end]
            yield self._decoder.decode(payload)
