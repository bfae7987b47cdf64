"""Whether Triton can start, where something is missing that it needs for that."""

from __future__ import annotations

import importlib.util
import sys
import types

import pytest

from pagemill.ops.triton_driver import triton_refusal


class Driver:
    """Says how its start ends."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def get_current_target(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Has Triton start with a driver, on a machine that interprets nothing."""
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setattr(knobs.runtime, "interpret", False)
    return lambda of_gpu: monkeypatch.setattr(driver, "_active", of_gpu)


def test_triton_starts_where_its_driver_does(start) -> None:
    start(Driver())
    assert triton_refusal() is None


@pytest.mark.parametrize(
    "error", [RuntimeError("Failed to find C compiler."), AssertionError("libcuda.so cannot found!")]
)
def test_what_it_lacks_to_start_is_told_with_the_way_out(start, error: Exception) -> None:
    start(Driver(error))
    refusal = triton_refusal()
    assert refusal is not None
    assert str(error) in refusal
    assert "install gcc" in refusal


def test_an_old_triton_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton.knobs", raising=False)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "too old; install triton 3.6 or newer" in str(triton_refusal())


def test_a_machine_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert triton_refusal() == "triton is missing; install triton"
