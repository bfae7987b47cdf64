"""A few seconds of the attack: the long one is `make attack`, which judges times too."""

import subprocess
import sys
from pathlib import Path


def test_a_server_withstands_an_attack():
    numbers = {"seconds": 4, "seed": 1, "threads": 4, "connections": 700, "examples": 2, "kills": 0, "damages": 1}
    options = ["--times-stated", *(f"--{name}={number}" for name, number in numbers.items())]
    command = [sys.executable, Path(__file__).with_name("attack.py"), *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
