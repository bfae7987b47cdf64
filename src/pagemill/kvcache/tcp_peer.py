"""TcpPeer: fetches blocks from one peer over TCP."""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache import peer_wire
from pagemill.kvcache.frame_access import Places
from pagemill.kvcache.peer_wire import Hello, PeerError
from pagemill.kvcache.store_format import HEAD_BYTES, StoreFormat, is_whole

CONNECT_S = 1.0
"""The longest time until a peer has taken a connection, and until it has said who it is."""
SILENT_S = 1.0
"""The longest time in which nothing comes."""
LEAST_BYTES_PER_S = 4 << 20
"""A slower peer is given up: computing what it has takes less time."""
IDLE_S = 30.0
"""Seconds after which an unused connection is closed, before the peer does."""


class TcpPeer:
    """Implements `Peer`: as many connections as threads that read, each kept for the next read.

    address: host and port. format: what both must have in common. secret: known to both.
    """

    def __init__(self, address: str, format: StoreFormat, secret: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._to = host.strip("[]"), int(port)
        self._format = format
        self._secret = secret
        self._lock = threading.Lock()
        self._idle: list[tuple[socket.socket, float]] = []
        self._closed = False

    def read(self, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float = math.inf) -> list[bool]:
        """Reads blocks (digest, group) into `out`, a record each. Returns which of them the peer has; the other
        records are undefined. Raises PeerError, and then all are: "slow" behind a deadline by `time.monotonic()`, or
        where it sends less than LEAST_BYTES_PER_S."""
        found: list[bool] = []
        for first in range(0, len(blocks), peer_wire.MAX_BLOCKS):
            last = first + peer_wire.MAX_BLOCKS
            sock = self._take() or self._connect()
            try:
                found += self._ask(sock, blocks[first:last], out[first:last], deadline_s)
            except BaseException:
                sock.close()
                raise
            self._keep(sock)
        return found

    def close(self) -> None:
        """Closes the connections that nobody reads from; the others end with their read."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for sock, _ in idle:
            sock.close()

    def _ask(
        self, sock: socket.socket, blocks: Sequence[tuple[bytes, int]], out: Places, deadline_s: float
    ) -> list[bool]:
        nbytes = self._format.record_bytes
        deadline_s = min(deadline_s, time.monotonic() + SILENT_S + len(blocks) * nbytes / LEAST_BYTES_PER_S)
        try:
            sock.sendall(peer_wire.pack_question(blocks))
        except OSError as error:
            raise PeerError("cut", f"the connection was cut: {error}") from None
        head, record = np.empty(HEAD_BYTES, dtype=np.uint8), np.empty(nbytes, dtype=np.uint8)
        found = []
        for block, place in zip(blocks, out, strict=True):
            peer_wire.receive(sock, [head.data], deadline_s)
            there = bool(head.any())
            if there:
                direct = isinstance(place, np.ndarray) and len(place.shape) == 2 and len(place) <= peer_wire.MAX_PARTS
                pieces = cast("NDArray[np.uint8]", place) if direct else record.reshape(1, -1)
                peer_wire.receive(sock, [piece.data for piece in pieces], deadline_s)
                if not is_whole(head, pieces, *block):
                    raise PeerError("broken", "it sent something else than the block that it was asked for")
                if not direct:
                    place[:] = record.reshape(place.shape)
            found.append(there)
        return found

    def _take(self) -> socket.socket | None:
        """Returns a connection that is open and unused; None if there is none."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                sock, since_s = self._idle.pop()
            if time.monotonic() - since_s < IDLE_S:
                return sock
            sock.close()

    def _keep(self, sock: socket.socket) -> None:
        now = time.monotonic()
        with self._lock:
            old = [kept for kept, since_s in self._idle if now - since_s >= IDLE_S]
            self._idle = [each for each in self._idle if now - each[1] < IDLE_S]
            if self._closed:
                old.append(sock)
            else:
                self._idle.append((sock, now))
        for each in old:
            each.close()

    def _connect(self) -> socket.socket:
        """Returns a new connection, once both sides know that the other has the secret. Raises PeerError."""
        try:
            sock = socket.create_connection(self._to, CONNECT_S)
        except OSError as error:
            raise PeerError("unreachable", f"it cannot be reached: {error}") from None
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer_wire.set_timeouts(sock, SILENT_S, SILENT_S)
            self._greet(sock)
        except BaseException as error:
            with suppress(OSError):
                sock.close()
            if isinstance(error, OSError):
                raise PeerError("cut", f"the connection was cut: {error}") from None
            raise
        return sock

    def _greet(self, sock: socket.socket) -> None:
        deadline_s = time.monotonic() + CONNECT_S
        if peer_wire.receive_bytes(sock, len(peer_wire.GREETING), deadline_s) != peer_wire.GREETING:
            raise PeerError("broken", "what answers there is no server of blocks, or one of another version")
        theirs, mine = peer_wire.receive_bytes(sock, peer_wire.NONCE_BYTES, deadline_s), peer_wire.new_nonce()
        format = self._format.to_json().encode()
        mac = peer_wire.mac_of(self._secret, b"client", theirs, mine, format)
        sock.sendall(peer_wire.pack_hello(Hello(mine, mac, format)))
        try:
            welcome = peer_wire.receive_welcome(sock, deadline_s)
        except PeerError as error:
            if error.reason == "cut":
                raise PeerError("refused", "it closed the connection at the greeting: its secret is another") from None
            raise
        accepted = bytes([welcome.accepted])
        if not peer_wire.is_mac(self._secret, welcome.mac, b"server", theirs, mine, accepted, welcome.format):
            raise PeerError("refused", "it does not know the secret")
        if not welcome.accepted:
            other = peer_wire.format_in(welcome.format) or "blocks of an unknown format"
            raise PeerError("other_format", f"it holds {other}, and this engine {self._format}")
