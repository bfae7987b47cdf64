"""Executors on a device that checks, of a tiny random model."""

from __future__ import annotations

import pytest
from checked_device import CheckedDevice

from models.small_llama import save_llama


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return str(save_llama(tmp_path_factory.mktemp("small")))


@pytest.fixture
def device():
    with CheckedDevice() as device:
        yield device
        device.synchronize()
