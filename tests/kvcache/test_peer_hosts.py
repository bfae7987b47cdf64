"""Blocks that travel between two hosts, whose link is cut, slow, or whose other end dies while they do.

Hosts are network namespaces, which only root may make.
"""

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import FORMAT, RECORD, content, digest_of

from other_host import OtherHost
from pagemill.kvcache.peer_store import PeerStore
from pagemill.kvcache.tcp_peer import TcpPeer
from waiting import wait_until

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]

SECRET = b"of all replicas of this fleet..."
HELD = 2000
"""Blocks: more bytes than the buffers of a connection hold."""
SOME = 20
BLOCKS = [(digest_of(number), 0) for number in range(HELD)]
UNDER_WAY_S = 1.6
"""About how long all blocks take over `LINK`."""
LINK = f"tbf rate {int(HELD * RECORD * 8 / UNDER_WAY_S / 1000)}kbit burst 64kbit latency 1s"
SLOW = "tbf rate 400kbit burst 64kbit latency 1s"
BOUND_S = 6.0
"""The longest time that a fetch of all may take, whatever happens."""

SERVER = """
import sys
from disk_blocks import FORMAT, content, digest_of, name_of
from pagemill.kvcache.block_server import BlockServer

numbers = {digest_of(number): number for number in range(int(sys.argv[2]))}
find = lambda blocks: [(name_of(numbers[digest]), content(numbers[digest])) for digest, _ in blocks]
print(BlockServer(find, FORMAT, 2, sys.argv[3].encode(), sys.argv[1]).address, flush=True)
sys.stdin.read()
"""


class There:
    """A host with a server of blocks, and a store here that fetches from it."""

    def __init__(self, host):
        self.host = host
        words = [*host.within, sys.executable, "-c", SERVER, host.there, str(HELD), SECRET.decode()]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.server = subprocess.Popen(words, **pipes, cwd=Path(__file__).parent)
        self.store = PeerStore(lambda address: TcpPeer(address, FORMAT, SECRET), RECORD)
        self.store.note_held(self.server.stdout.readline().strip(), [digest for digest, _ in BLOCKS])

    def fetch(self, during=None):
        """Fetches all blocks, and does something once some have come. Returns which have, after a check of them."""
        places, found = np.full((HELD, RECORD), 0xA5, dtype=np.uint8), []
        reading = threading.Thread(target=lambda: found.extend(self.store.read(BLOCKS, places)))
        began_s = time.monotonic()
        reading.start()
        if during is not None:
            wait_until(lambda: (places[SOME] != 0xA5).any(), lambda: "no block has come")
            assert reading.is_alive()
            assert (places[-1] == 0xA5).all(), "some blocks are still on their way"
            during()
        reading.join()
        assert time.monotonic() - began_s < BOUND_S
        assert all((places[at] == content(at)).all() for at, source in enumerate(found) if source is not None)
        return [source is not None for source in found]


@pytest.fixture
def there():
    with OtherHost() as host:
        there = There(host)
        yield there
        there.store.close()
        there.server.kill()
        there.server.communicate()


def throttle(there, way):
    if there.host.slow_down(way) is None:
        pytest.skip("this kernel makes no link slow by tbf")


def test_a_cut_of_the_link_costs_a_bounded_time_and_blocks_come_again_once_it_is_mended(there):
    throttle(there, LINK)
    assert not any(there.fetch(there.host.cut))
    assert there.store.stats().failed == {"slow": HELD}
    there.host.mend()
    wait_until(lambda: there.store.where(BLOCKS[:1]) == [0], there.store.peers)
    assert all(there.fetch())


def test_a_cut_that_is_short_costs_no_block(there):
    throttle(there, LINK)

    def cut_shortly():
        there.host.cut()
        time.sleep(0.1)
        there.host.mend()

    assert all(there.fetch(cut_shortly))


def test_a_link_that_is_slow_is_given_up(there):
    throttle(there, SLOW)
    assert not any(there.fetch())
    assert there.store.stats().failed == {"slow": HELD}


def test_a_host_whose_server_dies_on_the_way_cuts_the_transfer(there):
    throttle(there, LINK)
    assert not any(there.fetch(there.server.kill))
    assert there.store.stats().failed == {"cut": HELD}
