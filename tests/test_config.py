"""Every setting of the wrong type or out of its range is an error that names it, before anything is loaded."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pagemill import LLM, AsyncLLM
from pagemill.config import FIXED, EngineConfig, config_for
from pagemill.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 17),
        ("block_size", "16"),
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("max_num_seqs", None),
        ("max_num_batched_tokens", 5),
        ("max_model_len", True),
        ("num_threads", 0),
        ("num_threads", 100_000),
        ("seed", 2**63),
        ("seed", 1.5),
        ("ageing_s", -1),
        ("ageing_s", float("nan")),
        ("ageing_s", float("inf")),
        ("gpu_memory_utilization", "0.9"),
        ("kv_memory", [1]),
        ("dtype", "float8"),
        ("dtype", "int8"),
        ("kv_cache_dtype", None),
        ("kv_cache_dtype", "int4"),
        ("device", 0),
        ("hf_overrides", "{}"),
        ("enable_prefix_caching", "yes"),
        ("eviction_policy", "fifo"),
        ("kv_compaction", "on"),
        ("kv_host_compression", "gzip"),
        ("preemption_mode", "drop"),
        ("target_tpot_ms", 0),
        ("target_tpot_ms", float("inf")),
        ("tenants", [1]),
        ("quantization", "int4"),
        ("quantization", 8),
    ],
)
def test_a_wrong_setting_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name} is ") as caught:
        EngineConfig(model="m", **{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("settings", [{}, {"kv_host_memory": "1GiB", "enable_prefix_caching": False}])
def test_swapping_needs_a_place_and_names(settings):
    with pytest.raises(ConfigError, match="set kv_host_memory or kv_disk_memory"):
        EngineConfig(model="m", preemption_mode="swap", **settings)


def test_only_a_host_tier_can_be_compressed():
    with pytest.raises(ConfigError, match="set kv_host_memory") as caught:
        EngineConfig(model="m", kv_disk_memory="1GiB", kv_host_compression="zstd")
    assert caught.value.param == "kv_host_compression"


def test_a_folder_for_blocks_on_disk_needs_room_on_disk():
    with pytest.raises(ConfigError, match=r"kv_disk_path is 'kv', .* set kv_disk_memory") as caught:
        EngineConfig(model="m", kv_disk_path="kv", kv_host_memory="1GiB")
    assert caught.value.param == "kv_disk_path"


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", "int8"])
def test_the_cache_may_have_a_dtype_of_its_own(dtype):
    assert EngineConfig(model="m", kv_cache_dtype=dtype).kv_cache_dtype == dtype


def test_no_overrides_may_be_said_with_none():
    assert EngineConfig(model="m", hf_overrides=None).hf_overrides == {}


@pytest.mark.parametrize("name", FIXED)
def test_an_argument_without_a_choice_is_accepted_as_it_is_and_refused_otherwise(name):
    accepted, _ = FIXED[name]
    for value in accepted:
        assert config_for("LLM", "m", {name: value, "seed": 3}) == EngineConfig(model="m", seed=3)
    other = {bool: "yes", int: 2, str: "other"}[type(accepted[0])]
    for value in (other, None, not accepted[0]):
        if value not in accepted or type(value) is not type(accepted[0]):
            with pytest.raises(ConfigError, match=f"^{name} is {value!r}; .*leave it out$") as caught:
                config_for("LLM", "m", {name: value})
            assert caught.value.param == name


def test_no_setting_is_also_fixed():
    assert not FIXED.keys() & {setting.name for setting in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", ["dtype", "eviction_policy", "max_num_seqs"])
def test_half_of_a_surrogate_pair_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"^{name} is .*; it must be"):
        EngineConfig(model="m", **{name: "\ud800"})


@pytest.mark.parametrize("value", [10**30, -(2**63) - 1])
def test_integers_fit_into_64_bits(value):
    with pytest.raises(ConfigError, match=r"^seed is "):
        EngineConfig(model="m", seed=value)


@pytest.mark.parametrize(("entry", "own"), [(LLM, set()), (AsyncLLM, {"on_progress"})])
def test_an_entry_point_has_the_signature_of_the_settings(entry, own):
    parameters = inspect.signature(entry).parameters
    assert parameters.keys() - own == inspect.signature(EngineConfig).parameters.keys()
    assert parameters["max_num_seqs"].default == 256


TYPED = """from pathlib import Path
from pagemill import LLM, AsyncLLM, TenantLimits
LLM("m", max_num_seqs=3)
AsyncLLM("m", seed=3, on_progress=print)
LLM("m", max_num_sequences=3)
LLM("m", max_num_seqs="3")
AsyncLLM("m", sed=3)
LLM("m", tenants=Path("t"), tokenizer=Path("t"), kv_disk_path=Path("k"), session_path=Path("s"))
AsyncLLM("m", tenants={"a": {"max_running": 2}}, dtype="half", hf_overrides=None)
LLM("m", tenants={"a": TenantLimits(max_running=2)}, dtype="float")
LLM("m", tenants=3)
"""


def test_a_type_checker_knows_the_settings(tmp_path):
    """Slow only where mypy has no cache of the package yet."""
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)], cwd=Path(__file__).parents[1], capture_output=True, text=True
    )
    errors = re.findall(r"program.py:(\d+): error: .*?\"(\w+)\".*\[([a-z-]+)\]", checked.stdout)
    assert errors == [
        ("5", "max_num_sequences", "call-arg"),
        ("6", "max_num_seqs", "arg-type"),
        ("7", "sed", "call-arg"),
        ("11", "tenants", "arg-type"),
    ], checked.stdout + checked.stderr
