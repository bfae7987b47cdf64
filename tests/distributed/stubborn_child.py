"""A child process that says that it is ready, and does not end when it is told to."""

import pickle
import socket
import time

from pagemill.distributed.driver import Said


def run(descriptor):
    """Takes what a `_Cluster` sends its process."""
    with socket.socket(fileno=descriptor) as sock, sock.makefile("rwb") as stream:
        pickle.load(stream)
        pickle.dump(Said("ready", None), stream)
        stream.flush()
        time.sleep(60)
