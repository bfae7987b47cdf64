"""Blocks over TCP: what arrives is what was held, and every fault of a peer ends in a bounded time with a reason."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from disk_blocks import FORMAT, RECORD, content, digest_of, name_of
from hypothesis import given
from hypothesis import strategies as st

from pagemill.kvcache import block_server, peer_store, peer_wire, tcp_peer
from pagemill.kvcache.block_server import BlockServer
from pagemill.kvcache.peer_store import PeerStore
from pagemill.kvcache.peer_wire import PeerError
from pagemill.kvcache.store_format import HEAD_BYTES, StoreFormat
from pagemill.kvcache.tcp_peer import TcpPeer
from peer_proxy import Proxy
from waiting import wait_until

SECRET = b"of all replicas of this fleet..."
GREETED = 40 + 1 + 32 + 2 + len(FORMAT.to_json())
"""Bytes that a server sends before the first block."""
HELD = 300


def find(blocks):
    numbers = {digest_of(i): i for i in range(HELD)}
    return [
        (name_of(numbers[digest], group), content(numbers[digest], group)) if digest in numbers else None
        for digest, group in blocks
    ]


@pytest.fixture
def server():
    server = BlockServer(find, FORMAT, 2, SECRET, "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def short(monkeypatch):
    """Makes waits short."""
    monkeypatch.setattr(tcp_peer, "SILENT_S", 0.2)
    monkeypatch.setattr(tcp_peer, "CONNECT_S", 0.5)
    monkeypatch.setattr(block_server, "HELLO_S", 0.3)


def asked(*numbers, group=0):
    return [(digest_of(i), group) for i in numbers]


def out(count):
    return np.full((count, RECORD), 0xA5, dtype=np.uint8)


def store_of(format=FORMAT, secret=SECRET):
    return PeerStore(lambda address: TcpPeer(address, format, secret), RECORD)


@pytest.mark.parametrize("group", [0, 1])
def test_blocks_arrive_as_they_are_held(server, group):
    peer, numbers = TcpPeer(server.address, FORMAT, SECRET), [3, 299, 999, 0, 3]
    places = out(5)
    assert peer.read(asked(*numbers, group=group), places) == [True, True, False, True, True]
    for row, number in enumerate(numbers):
        if number < HELD:
            np.testing.assert_array_equal(places[row], content(number, group))
    assert (places[2] == 0xA5).all()
    many = out(HELD)
    assert all(peer.read(asked(*range(HELD)), many))
    assert all((many[i] == content(i)).all() for i in range(HELD))
    wait_until(lambda: server.stats().blocks == 4 + HELD, server.stats)
    peer.close()


def test_several_threads_read_at_once_over_few_connections(server):
    peer, results = TcpPeer(server.address, FORMAT, SECRET), []

    def read(first):
        for at in range(first, HELD, 8):
            place = out(1)
            assert peer.read(asked(at), place) == [True]
            results.append((at, (place[0] == content(at)).all()))

    threads = [threading.Thread(target=read, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [(at, True) for at in range(HELD)]
    peer.close()


FAULTS = {
    "cut at the greeting": ({"cut": 20}, "cut"),
    "cut in a head": ({"cut": GREETED + 10}, "cut"),
    "cut in a record": ({"cut": GREETED + HEAD_BYTES + 1000}, "cut"),
    "silent before it": ({"stop": 0}, "slow"),
    "silent in a record": ({"stop": GREETED + HEAD_BYTES + 1000}, "slow"),
    "another server": ({"change": 3}, "broken"),
    "its mac differs": ({"change": 45}, "refused"),
    "another digest": ({"change": GREETED + 20}, "broken"),
    "another group": ({"change": GREETED + 72}, "broken"),
    "another magic": ({"change": GREETED}, "broken"),
    "another checksum": ({"change": GREETED + HEAD_BYTES - 1}, "broken"),
    "another byte of the record": ({"change": GREETED + HEAD_BYTES + 4321}, "broken"),
    "drops fall": ({"drip": (GREETED + HEAD_BYTES, 0.01)}, "slow"),
}


def test_parts_that_come_whole_but_late_are_too_slow():
    ours, theirs = socket.socketpair()

    def send():
        with suppress(OSError):
            for _ in range(20):
                theirs.sendall(bytes(8))
                time.sleep(0.05)

    received = []

    def receive_all(deadline_s):
        for _ in range(20):
            peer_wire.receive(ours, [memoryview(bytearray(8))], deadline_s)
            received.append(8)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(PeerError, match="sends too slowly") as caught:
        receive_all(time.monotonic() + 0.2)
    assert caught.value.reason == "slow"
    assert len(received) < 10
    ours.close()
    sender.join()
    theirs.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_a_bounded_time_and_brings_no_block(server, short, fault, caplog):
    how, reason = FAULTS[fault]
    proxy, store = Proxy(server.address, **how), store_of()
    store.note_held(proxy.address, [digest_of(i) for i in range(3)])
    assert store.where(asked(1, 5)) == [0, None]
    begin = time.monotonic()
    assert store.read(asked(0, 1, 2), out(3)) == [None] * 3
    assert time.monotonic() - begin < 5  # drops fall for 40 s and more, and silence has no end
    assert dict(store.stats().failed) == {reason: 3}
    assert [record.levelname for record in caplog.records if record.name == peer_store.__name__] == ["WARNING"]
    assert store.where(asked(1)) == [None], "it is left alone for a while"
    store.close()
    proxy.close()


def test_a_peer_is_asked_again_after_a_pause_that_doubles_and_logged_once(server, short, caplog, monkeypatch):
    monkeypatch.setattr(peer_store, "FIRST_PAUSE_S", 0.05)
    proxy, store = Proxy(server.address, cut=GREETED + 10), store_of()
    store.note_held(proxy.address, [digest_of(0)])
    for pause_s in (0.05, 0.1):
        assert store.read(asked(0), out(1)) == [None]
        assert store.where(asked(0)) == [None]
        time.sleep(pause_s / 2)
        assert store.where(asked(0)) == [None]
        time.sleep(pause_s)
        assert store.where(asked(0)) == [0]
    proxy.cut = None
    assert store.read(asked(0), out(1)) == [0]
    assert store.stats().failed == {"cut": 2}
    assert store.stats().blocks == 1
    assert len([record for record in caplog.records if record.name == peer_store.__name__]) == 1
    store.close()
    proxy.close()


def test_a_peer_that_is_gone_cannot_be_reached(short):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    store = store_of()
    store.note_held(address, [digest_of(0)])
    assert store.read(asked(0), out(1)) == [None]
    assert store.stats().failed == {"unreachable": 1}


@pytest.mark.parametrize("other", [{"secret": b"another"}, {"format": replace(FORMAT, numerics="another")}])
def test_only_peers_of_the_same_secret_and_format_get_blocks(server, short, other, caplog):
    store = store_of(**other)
    store.note_held(server.address, [digest_of(0)])
    assert store.read(asked(0), out(1)) == [None]
    assert store.stats().failed == {"refused" if "secret" in other else "other_format": 1}
    assert server.stats().blocks == 0
    assert server.stats().refused == ("secret" in other)
    assert "secret" in other or "by another" in caplog.text, "it says what differs"
    store.close()


def test_what_a_peer_has_no_more_is_forgotten(server):
    store = store_of()
    store.note_held(server.address, [digest_of(0), digest_of(999)])
    assert store.read(asked(0, 999), out(2)) == [0, None]
    assert store.where(asked(0, 999)) == [0, None]
    assert store.stats().failed == {"missing": 1}
    store.close()


def greet(server, hello=None):
    sock = socket.create_connection(server.address.rsplit(":", 1), 5)
    nonce = sock.recv(40, socket.MSG_WAITALL)[8:]
    mine, format = peer_wire.new_nonce(), FORMAT.to_json().encode()
    mac = peer_wire.mac_of(SECRET, b"client", nonce, mine, format)
    sock.sendall(peer_wire.pack_hello(peer_wire.Hello(mine, mac, format)) if hello is None else hello)
    return sock


def ends(sock):
    with sock:
        sock.settimeout(5)
        with suppress(ConnectionError):
            while sock.recv(1 << 16):
                pass
    return True


def test_a_server_bounds_what_clients_may_do(server, short, monkeypatch):
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    waiting = [socket.create_connection(server.address.rsplit(":", 1)) for _ in range(2)]
    assert all(ends(sock) for sock in waiting), "they never said who they are"
    assert ends(greet(server, bytes(64) + b"\xff\xff")), "its format is too long"
    assert ends(greet(server, bytes(64) + b"\x02\x00{}")), "its mac is wrong"
    sock = greet(server)
    sock.sendall((peer_wire.MAX_BLOCKS + 1).to_bytes(4, "little"))
    assert ends(sock), "it asks for too much"
    sock = greet(server)
    sock.sendall(peer_wire.pack_question([(digest_of(0), 2)]))
    assert ends(sock), "there is no such group"
    peer = TcpPeer(server.address, FORMAT, SECRET)
    assert peer.read(asked(0), out(1)) == [True], "others are served"
    peer.close()
    assert server.stats().refused == 1


def test_strangers_keep_no_peer_out(server, monkeypatch):
    """They make room for who knows the secret, the oldest first; those who have said it make room for nobody."""
    monkeypatch.setattr(block_server, "MAX_CONNECTIONS", 2)
    peers = [TcpPeer(server.address, FORMAT, SECRET) for _ in range(3)]
    strangers = [greet(server, b"") for _ in range(2)]
    for peer, stranger in zip(peers[:2], strangers, strict=True):
        assert peer.read(asked(0), out(1)) == [True]
        assert ends(stranger)
    with pytest.raises(PeerError, match="closed the connection"):
        peers[2].read(asked(0), out(1))
    assert peers[0].read(asked(0), out(1)) == [True]
    for peer in peers:
        peer.close()


def test_the_secret_is_never_sent(server):
    proxy = Proxy(server.address)
    peer = TcpPeer(proxy.address, FORMAT, SECRET)
    assert peer.read(asked(0), out(1)) == [True]
    assert GREETED < len(proxy.passed) < GREETED + 2 * RECORD
    assert SECRET not in bytes(proxy.passed)
    peer.close()
    proxy.close()


class Pair:
    """Two ends, of which one has been given bytes and ended."""

    def __init__(self, data):
        self.mine, theirs = socket.socketpair()
        self.mine.settimeout(5)
        threading.Thread(target=self._write, args=(theirs, data), daemon=True).start()

    @staticmethod
    def _write(sock, data):
        with sock, suppress(OSError):
            sock.sendall(data)


def parse(data, how):
    pair = Pair(data)
    with pair.mine:
        try:
            return how(pair.mine)
        except PeerError as error:
            return None if error.reason in peer_wire.REASONS else error


DEADLINE = float("inf")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_an_error(data):
    hello = parse(data, lambda sock: peer_wire.receive_hello(sock, DEADLINE))
    assert hello is None or data.startswith(peer_wire.pack_hello(hello))
    welcome = parse(data, lambda sock: peer_wire.receive_welcome(sock, DEADLINE))
    assert welcome is None or data[1:].startswith(peer_wire.pack_welcome(welcome)[1:])
    question = parse(data, lambda sock: peer_wire.receive_question(sock, 1 << 31))
    assert question is None or data.startswith(peer_wire.pack_question(question))
    peer_wire.format_in(data)


@given(st.lists(st.tuples(st.binary(min_size=32, max_size=32), st.integers(0, 3)), max_size=20), st.booleans())
def test_messages_come_back(blocks, accepted):
    pack = peer_wire.pack_question(blocks)
    assert parse(pack, lambda sock: peer_wire.receive_question(sock, 4)) == blocks
    assert parse(pack[:-1], lambda sock: peer_wire.receive_question(sock, 4)) is None
    format = FORMAT.to_json().encode()
    hello = peer_wire.Hello(bytes(32), bytes(range(32)), format)
    assert parse(peer_wire.pack_hello(hello), lambda sock: peer_wire.receive_hello(sock, DEADLINE)) == hello
    welcome = peer_wire.Welcome(accepted, bytes(range(32)), format)
    assert parse(peer_wire.pack_welcome(welcome), lambda sock: peer_wire.receive_welcome(sock, DEADLINE)) == welcome
    assert peer_wire.format_in(format) == FORMAT
    assert isinstance(FORMAT, StoreFormat)
