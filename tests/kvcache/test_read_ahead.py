"""Streamed blocks are read ahead of the layers that attend to them, and a read that fails is tried anew later."""

from types import SimpleNamespace

import numpy as np
import pytest

from pagemill.errors import KVStoreError
from pagemill.kvcache import read_ahead
from pagemill.kvcache.layer_groups import group_layers
from pagemill.kvcache.read_ahead import ReadAhead
from pagemill.kvcache.streamed_file import Region
from waiting import wait_until

LAYERS = 6


def reader(monkeypatch, failing: list[int]) -> tuple[ReadAhead, list[int]]:
    """Reads layers of which some are `failing`, each of those as often as it is among them. With the layers that were
    read."""
    read: list[int] = []

    def read_runs(region, runs):
        read.append(region.begin)
        if region.begin in failing:
            failing.remove(region.begin)
            return False
        return True

    monkeypatch.setattr(read_ahead, "read_runs", read_runs)
    monkeypatch.setattr(read_ahead, "advise", lambda *call: True)
    file = SimpleNamespace(regions=[Region(layer, 1) for layer in range(LAYERS)], piece_bytes=4096)
    return ReadAhead(file, group_layers([None] * LAYERS)), read


def test_a_step_that_failed_leaves_no_failed_reads_to_the_next(monkeypatch):
    """The first reads of layers 2 and 4 fail, and both are under way when layer 2 ends the step."""
    (ahead, _), frames = reader(monkeypatch, [2, 4]), [np.array([0], np.int32)]
    begin = ahead.step(frames)
    begin(0)
    begin(1)
    with pytest.raises(KVStoreError, match="of layer 2;"):
        begin(2)
    begin = ahead.step(frames)
    for layer in range(LAYERS):
        begin(layer)
    ahead.close()


def test_a_read_that_failed_at_the_end_of_a_step_is_tried_anew_by_the_next(monkeypatch):
    """However many steps without streamed blocks lie between them."""
    failing: list[int] = []
    (ahead, read), frames = reader(monkeypatch, failing), [np.array([0], np.int32)]
    begin = ahead.step(frames)
    for layer in range(LAYERS):
        if layer == LAYERS - 2:
            failing.append(0)
        begin(layer)
    wait_until(lambda: read[-2:] == [0, 1], "layer 1 is read behind layer 0")
    assert not failing
    begin = ahead.step(frames)
    for layer in range(LAYERS):
        begin(layer)
    failing.append(3)
    begin = ahead.step(frames)
    for layer in range(3):
        begin(layer)
    with pytest.raises(KVStoreError, match="of layer 3;"):
        begin(3)
    ahead.close()
