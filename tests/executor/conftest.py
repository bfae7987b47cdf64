"""Executors on a device that checks, of a tiny random model. What needs more than torch is imported by its fixture."""

from __future__ import annotations

import pytest

import interpreter  # noqa: F401, before triton


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    from models.small_llama import save_llama

    return str(save_llama(tmp_path_factory.mktemp("small")))


@pytest.fixture
def device():
    from checked_device import CheckedDevice

    with CheckedDevice() as device:
        yield device
        device.synchronize()
