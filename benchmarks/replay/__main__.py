"""Replays real traces: `python -m benchmarks.replay COMMAND --help`."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from pagemill.errors import PagemillError

COMMANDS = {
    "eviction": "prompt tokens that each eviction policy finds again, beside the best possible",
    "allocators": "paged and contiguous KV memory of equal size",
    "capacity": "requests per second within limits on latency",
    "load": "throughput against load, contiguous and paged, until each saturates; modelled",
    "lengths": "paged and contiguous memory over the spread of lengths; modelled",
    "gains": "when paged memory has 2, 4 and 24 times the throughput; modelled",
    "context": "sequences and tokens per second over the length of the context; modelled",
    "sharing": "KV blocks that samples and beams share; modelled",
    "links": "blocks that travel between replicas, and prompts computed apart, beside chunked prefill; modelled",
    "swap": "swapping to host memory against computing again, over the link's speed and the block size; modelled",
    "control": "the controller against fixed settings",
    "foresight": "admission by foresight: preemptions of a 13B model, modelled",
    "waste": "KV memory that is reserved and holds nothing, by block size",
    "calibrate": "fit the step-time model to steps of the real engine on this machine",
    "devices": "hold the modelled devices against steps and requests that were timed on them",
    "validate": "hold a roofline of this machine against steps of its real engine",
    "confirm": "serve a slice of a trace for real, and hold the simulation against it",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name == chosen:  # the others' imports, torch among them, are not needed
            module = import_module(f"benchmarks.replay.{name}")
            command.description, command.formatter_class = module.__doc__, argparse.RawDescriptionHelpFormatter
            module.add_arguments(command)
            command.set_defaults(run=module.main)
    arguments = parser.parse_args()
    try:
        arguments.run(arguments)
    except PagemillError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
