"""A few seconds of random clients, with one of each thing that happens to a server; `make soak-server` takes ten
minutes."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_no_client_gets_a_wrong_answer_or_keeps_a_block():
    options = ["--seconds=1", "--seed=1", "--clients=4", "--pause=0.7"]
    command = [sys.executable, "-m", "tests.soak.clients", *options]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert {"kill_engine", "restart", "edit_tenants", "resize", "shrink"} <= found["happened"].keys()
    assert {"known", "turn", "respond", "hang_up"} <= found["done"].keys()
