"""Connections in simulated time: asyncio's own streams over a network that is simulated.

What is written takes its time on the way, and comes in order. A partition holds it up; a process that is gone takes
nothing, and its system ends its connections.
"""

import asyncio
from types import SimpleNamespace


class Transport(asyncio.Transport):
    """One end of a connection. peer: the replica of the two. is_front_end: whether this is the other's end."""

    def __init__(self, network, peer, is_front_end):
        super().__init__({"socket": SimpleNamespace(setsockopt=lambda *_: None)})
        self.network, self.peer, self.is_front_end = network, peer, is_front_end
        self.reader = asyncio.StreamReader()
        self.protocol = asyncio.StreamReaderProtocol(self.reader)
        self.writer = asyncio.StreamWriter(self, self.protocol, self.reader, asyncio.get_running_loop())
        self.other, self.closed, self.way = None, False, asyncio.Queue()
        self.bringing = asyncio.create_task(self._bring())

    def write(self, data):
        if not self.closed:
            self.way.put_nowait(data)

    def is_closing(self):
        return self.closed

    def close(self):
        self._end(None)

    def abort(self):
        self._end(ConnectionResetError())

    def lose(self, error):
        """Ends it for this end alone, which sees it."""
        if not self.closed:
            self.closed = True
            self.protocol.connection_lost(error)

    def _end(self, seen):
        """Ends it, behind what has been written. seen: by the other end."""
        if not self.closed:
            self.closed = True
            self.way.put_nowait(seen)
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    async def _bring(self):
        while True:
            data = await self.way.get()
            await self.network.take_time(self.peer)
            if self.is_front_end and self.peer.gone.is_set():
                continue
            if isinstance(data, bytes):
                self.other.protocol.data_received(data)
            elif data is None:
                self.other.protocol.eof_received()
            else:
                self.other.lose(data)


class Network:
    """Is asyncio's way to connections. peers: the replicas, by the hosts at which they listen."""

    def __init__(self, draw, peers):
        self.draw, self.peers = draw, peers
        self._takes, self._ends = {}, []
        self.made = 0

    async def start_server(self, take, host, port):
        self._takes[host] = take
        return SimpleNamespace(
            sockets=[SimpleNamespace(getsockname=lambda: (host, 1))], close=lambda: self._takes.pop(host, None)
        )

    async def open_connection(self, host, port):
        peer = self.peers[host]
        await self.take_time(peer)
        if peer.gone.is_set() or not peer.reached or host not in self._takes:
            raise ConnectionRefusedError
        here, there = Transport(self, peer, True), Transport(self, peer, False)
        here.other, there.other = there, here
        self._ends += [here, there]
        self.made += 1
        there.task = asyncio.create_task(self._takes[host](there.reader, there.writer))
        return here.reader, here.writer

    async def take_time(self, peer):
        await asyncio.sleep(self.draw.uniform(0.5, 1.5) * peer.delay_s)
        await peer.whole.wait()
        await peer.flowing.wait()

    def break_off(self, peer):
        """Ends a replica's connections for both sides, as something between them may."""
        for end in self._ends:
            if end.peer is peer:
                end.lose(ConnectionResetError())

    def end_process(self, peer=None):
        """Ends the connections of a replica's process; of the front end's, where none is given."""
        for end in self._ends:
            if end.is_front_end if peer is None else (end.peer is peer and not end.is_front_end):
                end.abort()
