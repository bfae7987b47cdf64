"""A short soak; `make soak` runs one of ten minutes."""

import logging

from chaos import Soak


def test_no_chaos_changes_a_bit_or_keeps_a_block(tmp_path, caplog):
    caplog.set_level(logging.ERROR)  # each fault of the disk is said
    soak = Soak(tmp_path, seed=1)
    soak.run(steps=200)
    soak.settle()
    assert soak.differences() == []
    done = soak.counts
    assert min(done[what] for what in ("ask", "talk", "fork", "search", "pin", "abort", "resize", "limit")) > 0, done
    assert min(done["streamed"], soak.faults.ended) > 0, (done, soak.faults.counts)
    assert min(soak.faults.counts["full"], soak.stats.blocks_loaded, soak.stats.preemptions, soak.stats.copies) > 0
