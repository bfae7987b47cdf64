"""A peer's faults: a proxy before a block server that cuts, slows or changes what it sends."""

import socket
import threading
import time
from contextlib import suppress


class Proxy:
    """Passes on bytes between clients and a server. The n-th byte that the server sends on a connection, from 0 on,
    meets the fault.

    cut: it and all later ones are not sent, and the connection ends. stop: they are not sent, and nothing ends.
    change: it is another one. drip: it and all later ones come one by one, each after so many seconds. pause_s: before
    each piece of 64 KiB.
    """

    def __init__(self, address, *, cut=None, stop=None, change=None, drip=None, pause_s=0.0):
        host, _, port = address.rpartition(":")
        self._to = host, int(port)
        self.cut, self.stop, self.change, self.drip = cut, stop, change, drip
        self.pause_s = pause_s
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self.passed = bytearray()
        self._open = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for sock in (self._sock, *self._open):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            self._open += [client, server]
            threading.Thread(target=self._pass, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, True), daemon=True).start()

    def _pass(self, source, target, faulty):
        sent = 0
        try:
            while data := source.recv(1 << 16):
                end = sent + len(data)
                self.passed += data
                if faulty:
                    if self.change is not None and sent <= self.change < end:
                        data = bytearray(data)
                        data[self.change - sent] ^= 1
                    for limit in (self.cut, self.stop, self.drip and self.drip[0]):
                        if limit is not None and limit < end:
                            target.sendall(data[: max(0, limit - sent)])
                            data = data[max(0, limit - sent) :]
                    if self.cut is not None and self.cut < end:
                        break
                    if self.stop is not None and self.stop < end:
                        time.sleep(60)
                    if self.drip is not None and self.drip[0] < end:
                        for at in range(len(data)):
                            target.sendall(data[at : at + 1])
                            time.sleep(self.drip[1])
                        data = b""
                time.sleep(self.pause_s if faulty else 0.0)
                target.sendall(data)
                sent = end
            target.shutdown(socket.SHUT_WR)
            if faulty:
                target.close()
        except OSError:
            pass
