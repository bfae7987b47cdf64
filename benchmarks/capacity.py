"""Takes limits on latency from a command line."""

from __future__ import annotations

import argparse

from pagemill.planner.limits import Limits


def add_limit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slo-tpot-p99", type=float, default=250, help="the limit on the time per output token, milliseconds"
    )
    parser.add_argument(
        "--slo-ttft-p99", type=float, help="the limit on the time to first token, milliseconds; by default none"
    )


def chosen_limits(arguments: argparse.Namespace) -> Limits:
    """Returns the limits that were typed. Raises ConfigError for one that is not above 0."""
    ttft_ms = arguments.slo_ttft_p99
    return Limits(arguments.slo_tpot_p99 / 1000, None if ttft_ms is None else ttft_ms / 1000)
