"""kill -9 of each kind of process, while clients stream from three replicas that one command has started.

Needs pagemill[ray]: `make test-clusters` runs it, and prints the longest gap for each.
"""

import os
import signal
import time

import httpx
import pytest

pytest.importorskip("ray", reason="pagemill[ray] is not installed")

from fleet import STREAMS, Fleet, run_streams

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STREAMS_GO_ON = {
    "replica": "ray::ServeReplica:pagemill:Engine",
    "engine": "pagemill.engine.process",
    "Serve's controller": "ray::ServeController",
    "dashboard": "dashboard/dashboard.py",
    "autoscaler": "_private/monitor.py",
    "log monitor": "_private/log_monitor.py",
    "dashboard agent": "ray::DashboardAgent",
    "runtime environment agent": "ray::RuntimeEnvAgent",
    "GCS": "gcs/gcs_server ",
    "raylet": "raylet/raylet ",
    "driver": "pagemill.distributed.driver",
}
"""What processes' command lines have in them."""
FRONT_END = "pagemill.distributed.listening_front_end"


def start(port=None):
    return Fleet("--max-engine-restarts", "100", port=port)


@pytest.fixture(scope="module")
def fleet():
    fleet = start()
    yield fleet
    if fleet.command.poll() is None:  # else the last test has killed it
        fleet.stop()


@pytest.fixture(scope="module")
def expected(fleet):
    return run_streams(fleet)[0]


@pytest.mark.parametrize("kind", STREAMS_GO_ON)
def test_streams_go_on(fleet, expected, kind):
    victim = fleet.processes(STREAMS_GO_ON[kind])[0]
    texts, longest_s = run_streams(fleet, lambda: os.kill(victim, signal.SIGKILL))
    print(f"killed {kind}: longest gap {longest_s:.2f} s")
    assert texts == expected
    assert run_streams(fleet)[0] == expected
    fleet.wait_whole()


def kill_and_retry(fleet, kill):
    """Kills what breaks connections. Returns what all streams say that are sent again, and the seconds for that."""
    with pytest.raises(httpx.TransportError):
        run_streams(fleet, kill)
    began_s = time.monotonic()
    texts, _ = run_streams(fleet)
    return texts, time.monotonic() - began_s


def test_connections_that_break_with_the_front_end_can_be_made_again_at_once(fleet, expected):
    (victim,) = fleet.processes(FRONT_END)
    texts, took_s = kill_and_retry(fleet, lambda: os.kill(victim, signal.SIGKILL))
    print(f"killed front end: {STREAMS} answers {took_s:.2f} s after the connections broke")
    assert texts == expected


def test_all_ends_where_the_command_is_killed_and_another_has_its_port_and_its_answers(fleet, expected):
    left = []
    with pytest.raises(httpx.TransportError):
        run_streams(fleet, lambda: left.extend(fleet.kill()))
    assert left == []
    second = start(fleet.port)
    assert run_streams(second)[0] == expected
    second.stop()
