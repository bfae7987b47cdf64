"""Streamed blocks are read ahead of the layers that attend to them, and a read that fails is tried anew later."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagemill.errors import KVStoreError
from pagemill.kvcache import read_ahead
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.read_ahead import ReadAhead
from pagemill.kvcache.streamed_file import Region

LAYERS = 6


def test_a_step_that_failed_leaves_no_failed_reads_to_the_next(monkeypatch):
    """The first reads of layers 2 and 4 fail, and both are under way when layer 2 ends the step."""
    failing, frames = [2, 4], [np.array([0], np.int32)]

    def read_runs(region, runs):
        if region.begin in failing:
            failing.remove(region.begin)
            return False
        return True

    monkeypatch.setattr(read_ahead, "read_runs", read_runs)
    monkeypatch.setattr(read_ahead, "advise", lambda *call: True)
    file = SimpleNamespace(regions=[Region(layer, 1) for layer in range(LAYERS)], piece_bytes=4096)
    ahead = ReadAhead(file, group_layers([None] * LAYERS))
    begin = ahead.step(frames)
    begin(0)
    begin(1)
    with pytest.raises(KVStoreError, match="of layer 2;"):
        begin(2)
    begin = ahead.step(frames)
    for layer in range(LAYERS):
        begin(layer)
    ahead.close()
