"""Executors on a device that checks, of a tiny random model."""

from __future__ import annotations

import pytest
import torch
from checked_device import CheckedDevice

import interpreter  # noqa: F401, before triton
from models.small_llama import save_llama


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    return str(save_llama(tmp_path_factory.mktemp("small")))


@pytest.fixture
def device():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # others would wait for each other at operations as small as these
    with CheckedDevice() as device:
        yield device
        device.synchronize()
    torch.set_num_threads(threads)
