"""Lets a command's workload be named."""

from __future__ import annotations

import argparse

from pagemill.planner.workload import WORKLOADS


def add_workload_argument(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument("--workload", default=default, help=f"requests, of {', '.join(WORKLOADS)}, or a .json file")
