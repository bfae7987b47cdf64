"""BlockServer: gives the blocks that an engine holds to its peers, over TCP, beside the engine's steps.

A thread for each connection reads, checks and sends; the engine's own thread does nothing for it. The bounds are: so
many connections, blocks of a question, a piece of blocks in memory for each connection, and seconds for everything.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
from numpy.typing import NDArray

from pagemill.kvcache import peer_wire
from pagemill.kvcache.peer_wire import PeerError, Welcome
from pagemill.kvcache.store_format import StoreFormat, head_of
from pagemill.memory.work import BlockName

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Connections at once. For one more, the one goes that has waited longest to say who it is; where all have, the new."""
HELLO_S = 2.0
"""The longest time until a client has said who it is."""
IDLE_S = 60.0
"""Seconds without a question after which a connection is closed; clients close theirs before."""
SEND_S = 5.0
"""The longest time in which a client takes nothing."""
PIECE_BYTES = 1 << 20
"""Blocks are read and sent in pieces of this size, which lie in a core's cache between the two."""
MOST_OF_PIECE = 256
"""The most blocks of a piece: a system call takes 1024 parts."""

Found = Sequence[tuple[BlockName, NDArray[np.uint8]] | None]
"""By block that was asked for, its name and its record [record_bytes]; None for one that is not there."""


@dataclass(frozen=True, slots=True)
class ServedStats:
    """Counts what peers were given since the start, and the connections of who did not know the secret."""

    blocks: int = 0
    bytes: int = 0
    refused: int = 0


class BlockServer:
    """Listens from its construction until `close`. Raises OSError where it cannot.

    find: returns what is asked for; called by several threads at once. num_groups: of layers. secret: known to peers.
    address: host and port, as peers reach it.
    """

    def __init__(
        self,
        find: Callable[[Sequence[tuple[bytes, int]]], Found],
        format: StoreFormat,
        num_groups: int,
        secret: bytes,
        host: str,
    ) -> None:
        self._find = find
        self._format = format
        self._num_groups = num_groups
        self._secret = secret
        self._piece = max(1, min(PIECE_BYTES // format.record_bytes, MOST_OF_PIECE))
        self._lock = threading.Lock()
        self._stats = ServedStats()
        self._connections: dict[socket.socket, bool] = {}
        """Says of each open connection whether it has said who it is; the oldest comes first."""
        self._closed = False
        family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._sock = socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
        self.address = f"[{host}]" if family is socket.AF_INET6 else host
        self.address += f":{self._sock.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="kv-serve", daemon=True)
        self._thread.start()

    def stats(self) -> ServedStats:
        with self._lock:
            return self._stats

    def close(self) -> None:
        """Ends all connections, and returns once nobody reads blocks any more."""
        with self._lock:
            self._closed = True
            open_now = [*self._connections]
        for sock in (self._sock, *open_now):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._sock.close()
        while True:
            with self._lock:
                if not self._connections:
                    return
            time.sleep(0.001)

    def _accept(self) -> None:
        for number in count(1):
            try:
                sock, peer = self._sock.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors, maybe
                continue
            where = f"{peer[0]}:{peer[1]}"
            if (why := self._begin(sock, where, number)) is not None:
                logger.warning("a connection from %s was closed: %s", where, why)
                sock.close()

    def _begin(self, sock: socket.socket, peer: str, number: int) -> str | None:
        """Begins to serve a connection. Returns why it is not served; None if it is."""
        with self._lock:
            if self._closed or (len(self._connections) >= MAX_CONNECTIONS and not self._close_a_stranger()):
                return f"{MAX_CONNECTIONS} are open"
            self._connections[sock] = False
        try:
            threading.Thread(target=self._serve, args=(sock, peer), name=f"kv-serve-{number}", daemon=True).start()
        except RuntimeError as error:  # the system gives no more threads
            with self._lock:
                del self._connections[sock]
            return str(error)
        return None

    def _close_a_stranger(self) -> bool:
        """Ends the oldest connection that has not said who it is, if there is one. The caller holds the lock."""
        stranger = next((sock for sock, is_known in self._connections.items() if not is_known), None)
        if stranger is None:
            return False
        del self._connections[stranger]
        with suppress(OSError):
            stranger.shutdown(socket.SHUT_RDWR)
        return True

    def _keep(self, sock: socket.socket) -> bool:
        """Keeps a connection that has said who it is. Returns False where it had to go just before."""
        with self._lock:
            is_open = sock in self._connections
            if is_open:
                self._connections[sock] = True
            return is_open

    def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer_wire.set_timeouts(sock, HELLO_S, SEND_S)
            if self._welcome(sock) and self._keep(sock):
                peer_wire.set_timeouts(sock, IDLE_S, SEND_S)
                while not self._closed:
                    self._answer(sock, peer_wire.receive_question(sock, self._num_groups))
        except PeerError as error:
            if error.reason == "refused":
                self._refuse(peer)
            elif error.reason == "broken":
                logger.warning("a connection from %s was closed: %s", peer, error)
        except OSError:
            pass  # it is gone
        finally:
            with self._lock:
                self._connections.pop(sock, None)
            sock.close()

    def _welcome(self, sock: socket.socket) -> bool:
        """Lets a client say who it is, and returns whether it is served. Raises PeerError and OSError."""
        deadline_s, nonce = time.monotonic() + HELLO_S, peer_wire.new_nonce()
        sock.sendall(peer_wire.GREETING + nonce)
        hello = peer_wire.receive_hello(sock, deadline_s)
        if not peer_wire.is_mac(self._secret, hello.mac, b"client", nonce, hello.nonce, hello.format):
            raise PeerError("refused", "it does not know the secret")
        format = peer_wire.format_in(hello.format)
        accepted, mine = format is not None and format.key == self._format.key, self._format.to_json().encode()
        mac = peer_wire.mac_of(self._secret, b"server", nonce, hello.nonce, bytes([accepted]), mine)
        sock.sendall(peer_wire.pack_welcome(Welcome(accepted, mac, mine)))
        return accepted

    def _answer(self, sock: socket.socket, blocks: Sequence[tuple[bytes, int]]) -> None:
        for first in range(0, len(blocks), self._piece):
            parts: list[bytes | memoryview] = []
            sent = 0
            for found in self._find(blocks[first : first + self._piece]):
                if found is None:
                    parts.append(peer_wire.ABSENT)
                else:
                    name, record = found
                    parts += [head_of(name, record), record.data]
                    sent += 1
            self._send(sock, parts)
            with self._lock:
                more = sum(map(len, parts))
                self._stats = replace(self._stats, blocks=self._stats.blocks + sent, bytes=self._stats.bytes + more)

    def _send(self, sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
        """Sends all parts. Raises OSError, also where the client takes nothing for too long."""
        left = [memoryview(part) for part in parts]
        while left:
            taken = sock.sendmsg(left)
            while left and taken >= len(left[0]):
                taken -= len(left.pop(0))
            if taken:
                left[0] = left[0][taken:]

    def _refuse(self, peer: str) -> None:
        with self._lock:
            self._stats = replace(self._stats, refused=self._stats.refused + 1)
            first = self._stats.refused == 1
        if first:
            logger.warning("a connection from %s was refused, which does not know the fleet's secret", peer)
