"""Modelled devices are as quick as what was timed on them, in this project and by others."""

from __future__ import annotations

import json

import pytest
from benchmarks.replay.devices import MEASURED, OWN, cases_of, roofline_of

OWN_WITHIN = 0.06
OTHERS_WITHIN = 0.12
"""Other engines have other kernels."""


@pytest.mark.parametrize("table", json.loads(MEASURED.read_text()), ids=lambda table: table["device"])
def test_modelled_devices_are_as_quick_as_what_was_timed_on_them(table):
    within = OWN_WITHIN if table["by"] == OWN else OTHERS_WITHIN
    cases = [case for case in cases_of(table, roofline_of(table)) if not case.name.startswith("first token")]
    assert cases
    for case in cases:
        assert abs(case.difference) < within, case
    assert table["source"]
