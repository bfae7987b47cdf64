"""Reads what pytest wrote by `--junit-xml`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MESSAGE = 300
"""Characters of a failure that are kept."""


def read_outcome(files: Iterable[Path]) -> dict[str, Any]:
    """Returns counts of "passed", "failed" and "skipped" tests; the failed ones' "failures", as names and messages; and
    "reasons", how many were skipped for each; of all files together."""
    failures, skips, passed = {}, {}, 0
    for case in (case for file in files for case in ElementTree.parse(file).getroot().iter("testcase")):
        name = f"{case.get('classname', '')}::{case.get('name', '')}"
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            failures[name] = (wrong.get("message") or wrong.text or "").strip()[:MESSAGE]
        elif (skipped := case.find("skipped")) is not None:
            skips[name] = _reason(skipped)  # a file that lacks something is skipped in each run
        else:
            passed += 1
    return {
        "passed": passed, "failed": len(failures), "skipped": len(skips),
        "failures": failures, "reasons": dict(Counter(skips.values())),
    }  # fmt: skip


def _reason(skipped: ElementTree.Element) -> str:
    """Returns why a test was skipped; of a whole file, pytest tells that as a tuple's last part, in the text."""
    whole = re.search(r"""(['"])(?:Skipped: )?((?:(?!\1).)*)\1\)$""", (skipped.text or "").strip())
    message = skipped.get("message") or "no reason given"
    return whole[2] if whole and message == "collection skipped" else message
