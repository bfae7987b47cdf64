"""Another host, for tests: a network namespace at the other end of a link, which only root may make."""

import contextlib
import os
import shutil
import subprocess

import pytest


def command(*words):
    subprocess.run(words, check=True, capture_output=True)


class OtherHost:
    """Exists until the `with` ends. here, there: addresses of both hosts. within: a command that runs another one on
    that host. Skips the test where there can be none."""

    def __init__(self):
        number = os.getpid() % 250
        self.here, self.there = f"10.213.{number}.1", f"10.213.{number}.2"
        self._name, self._near, self._far = f"pm-host{number}", f"pm-here{number}", f"pm-there{number}"
        self.within = ("ip", "netns", "exec", self._name)

    def __enter__(self):
        if shutil.which("ip") is None:
            pytest.skip("there is no ip command")
        try:
            command("ip", "netns", "add", self._name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
        try:
            command("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self._name)
            command("ip", "address", "add", f"{self.here}/24", "dev", self._near)
            command("ip", "link", "set", self._near, "up")
            command("ip", "-n", self._name, "address", "add", f"{self.there}/24", "dev", self._far)
            for device in ("lo", self._far):
                command("ip", "-n", self._name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        command("ip", "netns", "del", self._name)
        with contextlib.suppress(subprocess.CalledProcessError):
            command("ip", "link", "del", self._near)

    def cut(self):
        """Lets nothing through the link; neither side is told."""
        command("ip", "link", "set", self._near, "down")

    def mend(self):
        """Makes the link as it was, and as fast."""
        command("ip", "link", "set", self._near, "up")
        for at, device in (((), self._near), (self.within, self._far)):
            with contextlib.suppress(subprocess.CalledProcessError):
                command(*at, "tc", "qdisc", "del", "dev", device, "root")

    def slow_down(self, *ways):
        """Makes the link slow in both directions, by the first of these ways of tc that the kernel knows. Returns it;
        None where it knows none."""
        for way in ways:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                command("tc", "qdisc", "add", "dev", self._near, "root", *way.split())
                command(*self.within, "tc", "qdisc", "add", "dev", self._far, "root", *way.split())
                return way
        return None
