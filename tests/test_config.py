"""Every setting of the wrong type or out of its range is an error that names it, before anything is loaded."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagemill
from pagemill import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, SamplingParams, fixed_arguments
from pagemill.config import EngineConfig, config_for
from pagemill.errors import ConfigError, InvalidRequestError, SamplingParamsError, UnknownArgumentError
from pagemill.fixed_arguments import OF_CALLS, OF_ENGINES, OF_SAMPLING
from pagemill.kvcache.sizing import check_sizes
from pagemill.names_elsewhere import PYTHON_NAMES
from pagemill.speculative_config import SpeculativeConfig


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
        ("attention_backend", "xformers"),
        ("attention_backend", None),
        ("kv_cache_dtype", None),
        ("kv_cache_dtype", "int3"),
        ("device", 0),
        ("hf_overrides", "{}"),
        ("default_chat_template_kwargs", "{}"),
        ("enable_prefix_caching", "yes"),
        ("eviction_policy", "fifo"),
        ("kv_compaction", "on"),
        ("kv_host_compression", "gzip"),
        ("preemption_mode", "drop"),
        ("target_tpot_ms", 0),
        ("target_tpot_ms", float("inf")),
        ("target_tpot_ms", None),
        ("target_tpot_ms", "none"),
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


@pytest.mark.parametrize("nothing", [0, "0", 0.0])
def test_no_host_memory_may_be_asked_for(nothing):
    config = EngineConfig(model="m", kv_host_memory=nothing)
    check_sizes(config)
    assert not config.asks_for_host_memory
    with pytest.raises(ConfigError, match="set kv_host_memory"):
        EngineConfig(model="m", preemption_mode="swap", kv_host_memory=nothing)


def test_only_a_host_tier_can_be_compressed():
    with pytest.raises(ConfigError, match="set kv_host_memory") as caught:
        EngineConfig(model="m", kv_disk_memory="1GiB", kv_host_compression="zstd")
    assert caught.value.param == "kv_host_compression"


def test_a_folder_for_blocks_on_disk_needs_room_on_disk():
    with pytest.raises(ConfigError, match=r"kv_disk_path is 'kv', .* set kv_disk_memory") as caught:
        EngineConfig(model="m", kv_disk_path="kv", kv_host_memory="1GiB")
    assert caught.value.param == "kv_disk_path"
    with pytest.raises(ConfigError, match=r"weights_disk_path is 'w', .* set weights_disk_memory too") as caught:
        EngineConfig(model="m", weights_disk_path="w")
    assert caught.value.param == "weights_disk_path"


@pytest.mark.parametrize(
    ("settings", "way_out"),
    [
        ({"kv_disk_memory": "1GiB"}, "set kv_disk_path to it"),
        ({"kv_host_memory": "1GiB"}, "kv_disk_memory to the room"),
        ({"kv_disk_memory": "50%", "kv_disk_path": "kv"}, "is '50%', .* give bytes"),
    ],
)
def test_a_shared_folder_has_a_place_and_a_size(settings, way_out):
    with pytest.raises(ConfigError, match=way_out):
        EngineConfig(model="m", kv_disk_shared=True, **settings)


@pytest.mark.parametrize(("name", "value"), [("max_loras", 3), ("max_lora_rank", 128)])
def test_limits_of_adapters_are_refused_where_none_are_loaded(name, value):
    with pytest.raises(ConfigError, match=rf"^{name} is {value}, but enable_lora is off.*\(--enable-lora\), or leave"):
        EngineConfig(model="m", **{name: value})
    assert getattr(EngineConfig(model="m", enable_lora=True, **{name: value}), name) == value


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e5m2", "int8", "int4_mixed"])
def test_the_cache_may_have_a_dtype_of_its_own(dtype):
    assert EngineConfig(model="m", kv_cache_dtype=dtype).kv_cache_dtype == dtype


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "is 3; it must be 'auto', 'off' or a dict with method='ngram', 'suffix', 'draft_model' or 'medusa'"),
        ({}, "is {}; it must be 'auto', 'off' or a dict with method='ngram'"),
        ({"method": "eagle"}, "method is 'eagle'; it must be one of ngram, suffix, draft_model, medusa; no other way"),
        ({"method": "ngram", "draft": "m"}, "it has no 'draft'; known: method, model, num_speculative_tokens"),
        ({"method": "draft_model"}, "method is 'draft_model', but there is no model; name"),
        ({"method": "medusa"}, "method is 'medusa', but there is no model; name the folder of the heads"),
        ({"method": "draft_model", "model": ""}, "model is ''; "),
        ({"method": "ngram", "model": "m"}, "model is 'm', but method 'ngram' has none"),
        ({"method": "draft_model", "model": "m", "prompt_lookup_max": 3}, "prompt_lookup_max is for method 'ngram'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens is 0; .* from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens is 65; .* from 1 to 64"),
        ({"method": "ngram", "prompt_lookup_max": 17}, "prompt_lookup_max is 17; .* from 1 to 16"),
        ({"method": "ngram", "prompt_lookup_min": 5}, r"prompt_lookup_min is 5, above prompt_lookup_max \(4\); raise"),
        ({"method": "suffix", "prompt_lookup_min": 3}, "prompt_lookup_min is for method 'ngram'"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 24}, "suffix_decoding_max_tree_depth is not supported"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 0}, "suffix_decoding_max_cached_requests is 0"),
        ({"method": "ngram", "suffix_decoding_max_cached_tokens": 2000}, ".*_tokens is for method 'suffix'"),
        ({"method": "ngram", 3: 4}, "it has no 3"),
    ],
)
def test_a_wrong_speculative_config_is_refused_in_words(value, words):
    with pytest.raises(ConfigError, match=f"^speculative_config:? {words}") as caught:
        EngineConfig(model="m", speculative_config=value)
    assert caught.value.param == "speculative_config"


def test_a_speculative_config_may_be_a_dict_or_off_and_is_chosen_by_default():
    given = EngineConfig(model="m", speculative_config={"method": "ngram", "num_speculative_tokens": 5})
    assert given.speculative_config == SpeculativeConfig(method="ngram", num_speculative_tokens=5)
    assert EngineConfig(model="m").speculative_config == "auto"
    assert {EngineConfig(model="m", speculative_config=off).speculative_config for off in ("off", None)} == {"off"}
    drafts = EngineConfig(model="m", speculative_config={"method": "draft_model", "model": Path("d")})
    assert drafts.speculative_config == SpeculativeConfig(method="draft_model", model="d")


def test_no_overrides_may_be_said_with_none():
    assert EngineConfig(model="m", hf_overrides=None).hf_overrides == {}
    assert EngineConfig(model="m", default_chat_template_kwargs=None).default_chat_template_kwargs == {}


@pytest.mark.parametrize("name", OF_ENGINES)
def test_an_argument_without_a_choice_is_accepted_as_it_is_and_refused_otherwise(name, caplog):
    fixed = OF_ENGINES[name]
    for value in fixed.accepted:
        assert config_for("LLM", "m", {name: value, "seed": 3}) == EngineConfig(model="m", seed=3)
    assert not caplog.records
    for value in ("yes", 2, "other", object(), ["x"]):
        with pytest.raises(
            ConfigError, match=f"^{name} is .*pagemill {re.escape(fixed.what)}.*leave it out$"
        ) as caught:
            config_for("LLM", "m", {name: value})
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"), [("swap_space", 4), ("trust_remote_code", True), ("generation_config", "auto")]
)
def test_what_could_be_expected_to_do_something_is_accepted_with_one_warning(name, value, caplog):
    fixed_arguments.warn_once.cache_clear()
    for _ in range(3):
        assert config_for("LLM", "m", {name: value}) == EngineConfig(model="m")
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}={value!r} changes nothing: pagemill ")


def test_other_calls_take_vllms_arguments_without_a_choice_too():
    plain = SamplingParams(max_tokens=3)
    taken = SamplingParams(
        max_tokens=3, spaces_between_special_tokens=True, truncate_prompt_tokens=None, extra_args=None
    )
    assert taken == plain
    with pytest.raises(SamplingParamsError, match="truncate_prompt_tokens is 5; pagemill shortens no prompt") as caught:
        SamplingParams(truncate_prompt_tokens=5)
    assert caught.value.param == "truncate_prompt_tokens"
    assert not OF_SAMPLING.keys() & {argument.name for argument in dataclasses.fields(SamplingParams)}
    for name in OF_CALLS:
        assert name not in inspect.signature(LLM.generate).parameters


def test_engine_args_are_settings():
    args = EngineArgs("m", max_num_seqs=4, swap_space=0)
    assert EngineConfig(**dataclasses.asdict(args)) == EngineConfig("m", max_num_seqs=4)
    assert (args.model, AsyncEngineArgs(model="m").max_num_seqs) == ("m", EngineConfig("m").max_num_seqs)
    with pytest.raises(UnknownArgumentError, match="AsyncEngineArgs has no argument 'max_seqs'"):
        AsyncEngineArgs("m", max_seqs=4)
    with pytest.raises(ConfigError, match="max_num_seqs is 0"):
        EngineArgs("m", max_num_seqs=0)


@pytest.mark.parametrize("name", ["score", "classify", "reward", "encode"])
def test_methods_that_are_not_served_say_what_to_do(name):
    with pytest.raises(InvalidRequestError, match=f"LLM.{name} is not served: .*[,;] "):
        getattr(LLM, name)(None, "a", b=1)


def test_all_that_is_exported_shows():
    assert set(pagemill.__all__) <= set(dir(pagemill))
    for name in pagemill.__all__:
        assert getattr(pagemill, name) is not None


def test_no_setting_is_also_fixed():
    assert not OF_ENGINES.keys() & {setting.name for setting in dataclasses.fields(EngineConfig)}


@pytest.mark.parametrize("name", ["dtype", "eviction_policy", "max_num_seqs"])
def test_half_of_a_surrogate_pair_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"^{name} is .*; it must be"):
        EngineConfig(model="m", **{name: "\ud800"})


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("seed", 10**30, f"an integer, and at most {2**63 - 1}"),
        ("seed", -(2**63) - 1, f"an integer, and at least {-(2**63)}"),
        ("max_model_len", 2**63, f"an integer of at least 1 or None, and at most {2**63 - 1}"),
        ("num_threads", 2**63, "an integer from 1 to 1024 or None"),
        ("ageing_s", float("inf"), "a number of at least 0, and finite"),
        pytest.param("ageing_s", 10**400, "a number of at least 0, and at most 1.7976931348623157e+308", id="digits"),
    ],
)
def test_integers_fit_into_64_bits_and_numbers_are_finite(name, value, limit):
    with pytest.raises(ConfigError, match=f"^{name} is .*; it must be {re.escape(limit)}$"):
        EngineConfig(model="m", **{name: value})


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("temprature", ["temperature", "top_p"], "did you mean 'temperature'?"),
        ("zzz", ["temperature", "top_p"], "known arguments: temperature, top_p"),
        ("zzz", [f"name_{i}" for i in range(40)], "leave it out"),
        ("max_logprobs", ["max_loras"], "each token has 20 log probabilities at most; leave it out"),
        ("grammar", ["grammar_", "grammar"], "did you mean 'grammar'?"),
    ],
)
def test_an_unknown_argument_is_told_the_way_out(name, known, said):
    assert str(UnknownArgumentError.of("a", name, known)) == f"a has no argument {name!r}; {said}"


def test_names_of_vllm_are_told_what_they_are_here():
    with pytest.raises(ImportError, match="pagemill has no GuidedDecodingParams; import StructuredOutputsParams"):
        from pagemill import GuidedDecodingParams  # noqa: F401
    for names in PYTHON_NAMES.values():
        assert all(hasattr(pagemill, name) for name in re.findall(r"[A-Z]\w+", names))


def test_what_is_known_twice_is_named_once():
    assert str(UnknownArgumentError.of("a", "x", ["b", "c", "b"])).endswith("known arguments: b, c")


OF_ASYNC = {"on_progress", "max_engine_restarts", "engine_restart_window_s"}


@pytest.mark.parametrize(("entry", "own"), [(LLM, set()), (AsyncLLM, OF_ASYNC)])
def test_an_entry_point_has_the_signature_of_the_settings(entry, own):
    parameters = inspect.signature(entry).parameters
    assert parameters.keys() - own == inspect.signature(EngineConfig).parameters.keys()
    assert parameters["max_num_seqs"].default == 256


AT_ONCE = """import dataclasses, sys, threading
from typing import Annotated
from pagemill.arguments import about, check_fields
from pagemill.errors import ConfigError
sys.setswitchinterval(1e-6)
fields = [(f"f{number}", Annotated[int | None, about("x")], 1) for number in range(40)]
for _ in range(60):
    made, together = dataclasses.make_dataclass("Made", fields)(), threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (together.wait(), check_fields(made, ConfigError))) for _ in "abcd"]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
"""


def test_threads_may_check_the_first_arguments_of_a_kind_at_once():
    """In a process of its own: where they may not, it crashes."""
    result = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


TYPED = """from pathlib import Path
from pagemill import LLM, AsyncLLM, TenantLimits
LLM("m", max_num_seqs=3)
AsyncLLM("m", seed=3, on_progress=print)
LLM("m", max_num_sequences=3)
LLM("m", max_num_seqs="3")
AsyncLLM("m", sed=3)
LLM("m", tenants=Path("t"), tokenizer=Path("t"), kv_disk_path=Path("k"), session_path=Path("s"))
AsyncLLM("m", tenants={"a": {"max_running": 2}}, dtype="half", hf_overrides=None, weights_disk_path=Path("w"))
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
