"""The bounds of KV formats, and who is told that one misses its own."""

import pytest
from benchmarks.quality import gate_of, settings_of, verdict

from pagemill.kvcache.kv_format import kv_format
from pagemill.kvcache.kv_quality import GATES, label_of


def test_labels_name_the_loss_and_the_way_out():
    labelled = {name for name, gate in GATES.items() if gate.labelled is not None}
    assert labelled == {"fp8_e4m3", "fp8_e5m2", "int8/int4", "int4"}
    assert all(GATES[name].labelled > GATES[name].within for name in labelled)
    assert "rises by 4.9 %, where 1 % is the goal" in label_of("int4")
    assert "take int8 or int4_mixed" in label_of("int4")
    assert [label_of(name) for name in ("int8", "int4_mixed", "bfloat16")] == [None] * 3


@pytest.mark.parametrize(
    ("settings", "base", "against", "expected"),
    [
        ("bfloat16+kv=int8", "bfloat16", 0.0019, "within"),
        ("bfloat16+kv=int8", "bfloat16", -0.0021, "missed"),
        ("bfloat16+kv=int4_mixed", "bfloat16", 0.0099, "within"),
        ("bfloat16+kv=int4_mixed", "bfloat16", 0.011, "missed"),
        ("kv=fp8", "float32", 0.02, "missed: labelled, not a default"),
        ("kv=int4", "float32", 0.002, "within"),
        ("bfloat16+gguf+kv=int8", "bfloat16+gguf", 0.003, "missed"),
        ("bfloat16+kv=int8", "float32", 0.01, None),
        ("gguf", "float32", 0.01, None),
        ("bfloat16+kv=float32", "bfloat16", 0.0, None),
    ],
)
def test_each_format_has_its_own_bound(settings, base, against, expected):
    gate = gate_of(settings_of(settings), settings_of(base))
    assert (gate and verdict(gate, against)) == expected
    assert gate is None or gate is GATES[kv_format(settings.rpartition("kv=")[2]).name]
