"""Three replicas by one command: equal answers, kill -9 while clients stream, and an end that leaves nothing behind.

`test_kills` kills the other kinds of processes.

Needs pagemill[ray]: `make test-ray` installs it, and `make test` leaves these out where it is missing.
"""

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest
from fleet import Fleet, run_streams
from ray_processes import MODEL, START_S, described, processes

from waiting import wait_until

pytest.importorskip("ray", reason="pagemill[ray] is not installed")

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fleet():
    fleet = Fleet()
    yield fleet
    fleet.stop()


def test_streams_go_on_where_replicas_engines_and_the_whole_cluster_are_killed(fleet):
    expected, _ = run_streams(fleet)
    for title in ("ray::ServeReplica:pagemill:Engine", "pagemill.engine.process", "raylet/raylet "):
        wait_until(lambda title=title: fleet.processes(title), f"no process is called {title}")
        victim = fleet.processes(title)[0]
        texts, longest_s = run_streams(fleet, lambda victim=victim: os.kill(victim, signal.SIGKILL))
        assert texts == expected
        print(f"killed {title}: longest gap {longest_s:.2f} s")
        fleet.wait_ready()


JOIN = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"


def test_only_who_has_the_token_of_the_cluster_may_use_it(fleet):
    (raylet,) = (pid for pid in fleet.processes("raylet/raylet "))
    address = re.search(r"gcs[-_]address=(\S+)", described(raylet)[1])[1]
    with open(f"/proc/{raylet}/environ", "rb") as file:
        its = dict(each.split(b"=", 1) for each in file.read().split(b"\0") if each.startswith(b"RAY_AUTH_"))
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    for given, joins in (({}, False), ({os.fsdecode(name): os.fsdecode(its[name]) for name in its}, True)):
        joined = subprocess.run([sys.executable, "-c", JOIN, address], env={**others, **given}, capture_output=True)
        assert (joined.returncode == 0) is joins, joined.stderr


def test_signals_of_a_single_engine_end_nothing(fleet):
    for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        fleet.command.send_signal(each)
    time.sleep(0.5)
    fleet.wait_ready()


def test_a_signal_before_it_is_ready_ends_it_at_once():
    fleet = Fleet(waits=False)
    deadline = time.monotonic() + START_S
    while not fleet.processes("raylet/raylet "):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    below = processes(fleet.command.pid)
    fleet.command.send_signal(signal.SIGTERM)
    assert fleet.command.wait(60) == 0
    assert not [pid for pid in below if os.path.exists(f"/proc/{pid}")]


def test_another_front_end_takes_the_place_of_one_that_is_killed_and_new_connections_wait_for_it(fleet):
    (front_end,) = fleet.processes("listening_front_end")
    with pytest.raises(httpx.RemoteProtocolError):
        run_streams(fleet, lambda: os.kill(front_end, signal.SIGKILL))
    assert run_streams(fleet)[0]


ORDER = (0, 1, 1, 0, 0, 1)
"""Prompts, so that round robin over two replicas brings each to both."""


def answers_of(fleet):
    """Returns the texts of two prompts, each asked for three times, and how many whole blocks the prompts have."""
    texts, blocks = [], 0
    for at, which in enumerate(ORDER):
        words = " ".join(f"The {number}th of {which} told a story of its own." for number in range(40))
        body = {"model": MODEL, "prompt": words, "max_tokens": 12, "temperature": 1, "seed": 7, "ignore_eos": True}
        answer = httpx.post(f"{fleet.url}/v1/completions", json=body, timeout=60).json()
        texts.append(answer["choices"][0]["text"])
        blocks += answer["usage"]["prompt_tokens"] // 16 if at < 2 else 0
    return texts, blocks


def test_prompts_and_sessions_that_move_take_their_blocks_along_and_get_the_same_answers():
    split = Fleet("--routing", "round-robin", "--prefill-replicas", "1")
    try:
        texts, blocks = answers_of(split)
        metrics = httpx.get(f"{split.url}/metrics", timeout=10).text
    finally:
        left = split.kill()
    assert left == []  # all of it ends with the command, also where that is killed
    assert texts == [texts[which] for which in ORDER]
    figures = {
        name: sum(float(value) for value in re.findall(rf"^pagemill:{name}(?:_total)?{{[^}}]*}} (\S+)", metrics, re.M))
        for name in ("kv_blocks_fetched", "kv_blocks_served", "kv_fetches_failed")
    }
    assert figures["kv_blocks_fetched"] == figures["kv_blocks_served"] >= 2 * blocks
    assert figures["kv_fetches_failed"] == 0
