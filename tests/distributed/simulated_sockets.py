"""Sockets among replicas in simulated time, for code that waits in a thread (`simulated_threads.py`).

What is sent takes its time on the way, and comes in order. A partition holds it up, between two replicas or around one;
a process that is gone takes nothing, and its system ends its connections. What a replica sends may meet a fault at one
of its bytes: the connection is cut there, or nothing comes any more, or drops fall, or the byte is another one.
"""

import socket
import struct
from collections import deque
from types import SimpleNamespace

from simulated_threads import Process, Thread

PART_BYTES = 1200
"""What comes at once."""
DROP_S = 0.05
FIRST_RETRY_S, LAST_RETRY_S = 0.2, 6.4
"""How soon what a partition holds up is sent again."""
TIMEVAL = struct.Struct("@ll")
END = object()


class Socket:
    """One end of a connection. serves: whether it is the end of who listens."""

    def __init__(self, links, process, serves):
        self.links, self.process, self.serves, self.other = links, process, serves, None
        self.closed = False
        self._receive_s = None
        self._come, self._ended, self._error, self._reader = bytearray(), False, None, None
        self._way, self._is_bringing, self._fault = deque(), False, None

    def settimeout(self, seconds):
        assert seconds is None

    def setsockopt(self, level, option, value):
        if option == socket.SO_RCVTIMEO:
            seconds, microseconds = TIMEVAL.unpack(value)
            self._receive_s = seconds + microseconds / 1e6

    def recvmsg_into(self, buffers, ancillary, flags):
        assert flags == socket.MSG_WAITALL
        wanted, loop = sum(map(len, buffers)), self.process.loop
        until_s = loop.time() + self._receive_s
        while len(self._come) < wanted and not self._ended and (left_s := until_s - loop.time()) > 0:
            self._reader = Thread.running
            Thread.running.wait(left_s)
            self._reader = None
        if not self._come:
            if self._error is not None:
                raise self._error
            if not self._ended:
                raise BlockingIOError
        count = 0
        for buffer in buffers:
            part = self._come[: len(buffer)]
            buffer[: len(part)] = part
            del self._come[: len(part)]
            count += len(part)
        return count, [], 0, None

    def sendall(self, data):
        self.sendmsg([data])

    def sendmsg(self, parts):
        if self.closed or self._error is not None:
            raise BrokenPipeError
        data = b"".join(parts)
        for first in range(0, len(data), PART_BYTES):
            part = data[first : first + PART_BYTES]
            self._way.extend(self._meet_fault(part) if self.serves else [part])
        self._bring()
        return len(data)

    def shutdown(self, how):
        self.close()

    def close(self):
        if not self.closed:
            self.closed = True
            self._way.append(END)
            self._bring()
            self.lose(None)

    def reset(self):
        """Ends it from without: its own side sees it now, the other when it hears of it."""
        if not self.closed:
            self.closed = True
            self._way.append(ConnectionResetError())
            self._bring()
            self.lose(ConnectionResetError())

    def take(self, data):
        """Takes what has come."""
        self._come += data
        self._wake()

    def lose(self, error):
        """Ends what comes here. error: what who reads is told; None for the end of the stream."""
        self._ended, self._error = True, self._error or error
        self._wake()

    def _wake(self):
        if self._reader is not None:
            self._reader.wake()

    def _meet_fault(self, part):
        """Returns what becomes of a part that a replica sends."""
        if self._fault is None and (at := self.links.fault_in(self.process.host, len(part))) is not None:
            kind, place = at
            if kind == "change":
                return [part[:place] + bytes([part[place] ^ 1]) + part[place + 1 :]]
            self._fault = kind
            return [part[:place], *self._meet_fault(part[place:])]
        if self._fault == "cut":
            return [ConnectionResetError()]
        if self._fault == "stop":
            return []
        return [bytes([each]) for each in part] if self._fault == "drip" else [part]

    def _bring(self):
        if not self._is_bringing and self._way:
            self._is_bringing = True
            size = len(self._way[0]) if isinstance(self._way[0], bytes) else 0
            takes_s = DROP_S if self._fault == "drip" else self.links.takes_s(self.process.host, self._to, size)
            self.process.loop.call_later(takes_s, self._arrive, FIRST_RETRY_S)

    @property
    def _to(self):
        return self.other.process.host

    def _arrive(self, retry_s):
        if self.links.are_apart(self.process.host, self._to):
            self.process.loop.call_later(retry_s, self._arrive, min(2 * retry_s, LAST_RETRY_S))
            return
        self._is_bringing = False
        what, other = self._way.popleft(), self.other
        if other.closed:
            if isinstance(what, bytes):  # its system says that nobody is there
                self.closed = True
                self.lose(ConnectionResetError())
            self._way.clear()
        elif isinstance(what, bytes):
            other.take(what)
        else:
            other.lose(None if what is END else what)
        self._bring()


class Listening:
    def __init__(self, links, process, address):
        self.links, self.process, self.address = links, process, address
        self.come, self._closed, self._accepting = deque(), False, None

    def getsockname(self):
        return self.address

    def take(self, sock):
        self.come.append(sock)
        if self._accepting is not None:
            self._accepting.wake()

    def accept(self):
        while not self.come:
            if self._closed:
                raise OSError
            self._accepting = Thread.running
            Thread.running.wait()
            self._accepting = None
        sock = self.come.popleft()
        return sock, (sock.other.process.host, 0)

    def shutdown(self, how):
        self.close()

    def close(self):
        self._closed = True
        self.links.listening.pop(self.address, None)
        if self._accepting is not None:
            self._accepting.wake()


class Links:
    """Is what lies between replicas. peers: the replicas, by host. apart: pairs of hosts between which nothing goes.
    faults: what the bytes meet that a host serves, as (kind, how many bytes from now)."""

    def __init__(self, draw, peers):
        self.draw, self.peers = draw, peers
        self.listening, self.ends, self.apart, self.faults = {}, [], set(), {}
        self.made = self.num_faults = 0

    def as_module(self):
        """Returns what stands for the module `socket`."""
        names = ["SHUT_RDWR", "IPPROTO_TCP", "TCP_NODELAY", "SOCK_STREAM", "AF_INET6"]
        return SimpleNamespace(
            **{name: getattr(socket, name) for name in names},
            getaddrinfo=lambda host, port, type: [(socket.AF_INET, type, 0, "", (host, port))],
            create_server=self._create_server,
            create_connection=self._create_connection,
        )

    def takes_s(self, one, other, size):
        """Returns the seconds that a message takes from one host to another."""
        ways = [self.peers[host] for host in (one, other) if host in self.peers]
        delay_s = max((each.delay_s for each in ways), default=0.0)
        return self.draw.uniform(0.5, 1.5) * delay_s + size / min((each.bytes_per_s for each in ways), default=1e6)

    def are_apart(self, one, other):
        cut = any(host in self.peers and not self.peers[host].whole.is_set() for host in (one, other))
        return cut or frozenset({one, other}) in self.apart

    def fault_in(self, host, size):
        """Returns the kind of fault that one of the next bytes of a host meets, and which byte; None if none does."""
        if host not in self.faults:
            return None
        kind, left = self.faults.pop(host)
        if left >= size:
            self.faults[host] = kind, left - size
            return None
        self.num_faults += 1
        return kind, left

    def break_off(self, host):
        """Ends a host's connections for both sides, as something between them may."""
        for end in self._of(host):
            end.reset()
            end.other.reset()

    def end_process(self, process):
        """Ends the connections of a process that is gone."""
        self.listening = {at: each for at, each in self.listening.items() if each.process is not process}
        for end in self._of(process.host):
            end.reset()

    def _of(self, host):
        self.ends = [end for end in self.ends if not end.closed]
        return [end for end in self.ends if end.process.host == host]

    def _create_server(self, address, family, backlog):
        self.made += 1
        address = address[0], self.made
        self.listening[address] = Listening(self, Process.made_by, address)
        return self.listening[address]

    def _create_connection(self, address, timeout):
        process, host = Thread.running.process, address[0]
        until_s = process.loop.time() + timeout
        Thread.running.wait(min(timeout, 2 * self.takes_s(process.host, host, 0)))
        while self.are_apart(process.host, host):
            if (left_s := until_s - process.loop.time()) <= 0:
                raise TimeoutError
            Thread.running.wait(min(left_s, FIRST_RETRY_S))
        if address not in self.listening:
            raise ConnectionRefusedError
        listening = self.listening[address]
        here, there = Socket(self, process, False), Socket(self, listening.process, True)
        here.other, there.other = there, here
        self.ends += [here, there]
        listening.take(there)
        return here
