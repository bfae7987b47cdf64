"""A short soak; `make soak` runs one of ten minutes."""

import logging

import pytest
from tests.soak.chaos import Soak
from tests.soak.drawn_engine import FORMATS, METHODS, kinds

STEPS = 100
AT_MOST = 2000


def rarest(soak: Soak) -> int:
    """How often what has happened least has, of all that must happen."""
    done, stats = soak.counts, soak.llm.stats()
    return min(
        *(
            done[what]
            for what in (
                "ask",
                "talk",
                "fork",
                "search",
                "embed",
                "pin",
                "abort",
                "resize",
                "limit",
                "streamed",
                "held to forms",
            )
        ),
        soak.faults.ended,
        soak.faults.counts["full"],
        stats.blocks_loaded,
        stats.preemptions,
        stats.copies,
    )


def test_each_soak_draws_every_kv_format_and_every_way_of_drafting():
    for first in range(36):
        formats, methods = map(set, zip(*map(kinds, range(first, first + len(FORMATS))), strict=True))
        assert (formats, methods) == ({*FORMATS}, {*METHODS})


@pytest.mark.timeout(900)
def test_no_chaos_changes_a_bit_or_keeps_a_block(tmp_path, caplog):
    caplog.set_level(logging.ERROR)  # each fault of the disk is said
    soak = Soak(tmp_path, seed=5)
    soak.run(steps=STEPS)
    while not rarest(soak) and soak.counts["steps"] < AT_MOST:  # what happens when depends on time too
        soak.run(steps=soak.counts["steps"] + 50)
    assert rarest(soak), (soak.counts, soak.faults.counts, soak.llm.stats())
    soak.settle()
    assert soak.differences() == []
