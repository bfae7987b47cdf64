"""Every benchmark finds what it imports, those that no test runs too."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATHS = [path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py")]
# Adapters run in their engines' own environments.
MODULES = sorted(".".join(path.with_suffix("").parts) for path in PATHS if "adapters" not in path.parts)


@pytest.mark.parametrize("module", MODULES)
def test_a_benchmark_can_be_imported(module):
    if module == "benchmarks.grammar_libraries":
        pytest.importorskip("xgrammar", reason="compared with, not used: `pip install xgrammar`")
    if module == "benchmarks.ray_prefix_affinity":
        pytest.importorskip("ray", reason="an extra of its own: `pip install pagemill[ray]`")
    importlib.import_module(module)
