"""Defines, byte by byte, what two peers send when one fetches blocks from the other. Integers are little-endian.

    server  "pmillBS1" nonce[32]
    client  nonce[32] mac[32] length(u16) format[length]      mac over "client", both nonces, format
    server  accepted(u8) mac[32] length(u16) format[length]   mac over "server", both nonces, accepted, format

Macs are HMAC-SHA256 under a secret that both were given; it never travels, and a nonce is used once. A format is the
JSON of a `StoreFormat`. Where the formats differ, `accepted` is 0 and the connection ends. Else the client asks, any
number of times:

    client  count(u32), then count x (digest[32] group(u32))
    server  for each, in order: 88 bytes of zeros if it is not there; else the header and the checksum of a block in a
            disk store, 88 bytes, and its record

Every length is known before it is read, and bounded.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

from pagemill.errors import PagemillError
from pagemill.kvcache.store_format import HEAD_BYTES, StoreFormat

GREETING = b"pmillBS1"
NONCE_BYTES = MAC_BYTES = 32
MAX_FORMAT_BYTES = 4096
MAX_BLOCKS = 4096
"""The most blocks of one question."""
MAX_PARTS = 1024
"""Parts of memory that one system call fills."""
ABSENT = bytes(HEAD_BYTES)
"""Answers for a block that is not there."""

_LENGTH = struct.Struct("<H")
_COUNT = struct.Struct("<I")
_BLOCK = struct.Struct("<32sI")
_TIMEVAL = struct.Struct("@ll")


class PeerError(PagemillError):
    """A peer from which blocks cannot be had. reason: one of `REASONS`."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


REASONS = ("missing", "unreachable", "cut", "slow", "refused", "other_format", "broken")
"""Why blocks did not come: they were there no more; the peer cannot be reached; the connection was cut; it took too
long; one of both does not know the secret; weights, KV format or kernels differ; or what came was not the block."""


class Hello(NamedTuple):
    """Holds the first message of a client."""

    nonce: bytes
    mac: bytes
    format: bytes


class Welcome(NamedTuple):
    """Holds the answer of a server."""

    accepted: bool
    mac: bytes
    format: bytes


def set_timeouts(sock: socket.socket, receive_s: float, send_s: float) -> None:
    """Bounds each system call on a blocking socket; what takes longer raises BlockingIOError, or is cut short."""
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))


def receive(sock: socket.socket, into: Sequence[memoryview], deadline_s: float = float("inf")) -> None:
    """Fills the parts of `into`, at most MAX_PARTS.

    Raises PeerError: "cut" at the end of the stream, "slow" behind a deadline, in seconds of `time.monotonic()`, or
    where nothing comes for as long as the socket's timeout says.
    """
    left = [*into]
    while left:
        try:
            count = sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            raise PeerError("slow", "it sent nothing for too long") from None
        except OSError as error:
            raise PeerError("cut", f"the connection was cut: {error}") from None
        if not count:
            raise PeerError("cut", "it closed the connection")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
        if time.monotonic() > deadline_s:
            raise PeerError("slow", "it sends too slowly")


def receive_bytes(sock: socket.socket, count: int, deadline_s: float = float("inf")) -> bytes:
    """Returns the next `count` bytes. Raises as `receive` does."""
    data = bytearray(count)
    if count:
        receive(sock, [memoryview(data)], deadline_s)
    return bytes(data)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def mac_of(secret: bytes, who: bytes, *parts: bytes) -> bytes:
    """Returns the mac of parts whose lengths are fixed, but for the last."""
    return hmac.new(secret, who + b"".join(parts), hashlib.sha256).digest()


def is_mac(secret: bytes, mac: bytes, who: bytes, *parts: bytes) -> bool:
    """Returns whether a mac is that of these parts, in a time that does not tell where it differs."""
    return hmac.compare_digest(mac, mac_of(secret, who, *parts))


def pack_hello(hello: Hello) -> bytes:
    return hello.nonce + hello.mac + _LENGTH.pack(len(hello.format)) + hello.format


def receive_hello(sock: socket.socket, deadline_s: float) -> Hello:
    """Raises PeerError, also for a format that is too long."""
    nonce, mac = (receive_bytes(sock, count, deadline_s) for count in (NONCE_BYTES, MAC_BYTES))
    return Hello(nonce, mac, _receive_format(sock, deadline_s))


def pack_welcome(welcome: Welcome) -> bytes:
    return bytes([welcome.accepted]) + welcome.mac + _LENGTH.pack(len(welcome.format)) + welcome.format


def receive_welcome(sock: socket.socket, deadline_s: float) -> Welcome:
    """Raises PeerError, also for a format that is too long."""
    accepted = receive_bytes(sock, 1, deadline_s)[0] == 1
    mac = receive_bytes(sock, MAC_BYTES, deadline_s)
    return Welcome(accepted, mac, _receive_format(sock, deadline_s))


def _receive_format(sock: socket.socket, deadline_s: float) -> bytes:
    (length,) = _LENGTH.unpack(receive_bytes(sock, _LENGTH.size, deadline_s))
    if length > MAX_FORMAT_BYTES:
        raise PeerError("broken", f"its format has {length} bytes; at most {MAX_FORMAT_BYTES} are read")
    return receive_bytes(sock, length, deadline_s)


def format_in(data: bytes) -> StoreFormat | None:
    """Returns the format that bytes say; None if they say none that this version knows."""
    try:
        return StoreFormat.from_json(data.decode())
    except (ValueError, TypeError, RecursionError):
        return None


def pack_question(blocks: Sequence[tuple[bytes, int]]) -> bytes:
    return _COUNT.pack(len(blocks)) + b"".join(_BLOCK.pack(*block) for block in blocks)


def receive_question(sock: socket.socket, num_groups: int) -> list[tuple[bytes, int]]:
    """Returns the blocks (digest, group) that a client asks for. Raises PeerError, also for too many blocks, and for
    groups that there are not."""
    (count,) = _COUNT.unpack(receive_bytes(sock, _COUNT.size))
    if count > MAX_BLOCKS:
        raise PeerError("broken", f"it asks for {count} blocks at once; at most {MAX_BLOCKS} are given")
    blocks = list(_BLOCK.iter_unpack(receive_bytes(sock, count * _BLOCK.size)))
    if any(group >= num_groups for _, group in blocks):
        raise PeerError("broken", f"it asks for layer groups that there are not: there are {num_groups}")
    return blocks
