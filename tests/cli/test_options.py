"""Every engine setting is a flag of every command that starts an engine, and what is given arrives as it was meant."""

import dataclasses
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pagemill.cli.options import SAMPLING_FLAGS, engine_options, log_options, sampling_options
from pagemill.cli.several_values import one_by_one
from pagemill.config import EngineConfig
from pagemill.errors import ConfigError, SamplingParamsError
from pagemill.sampling.params import RequestOutputKind, SamplingParams
from pagemill.server.logs.output import ServerLogs

received: dict[str, Any] = {}


@sampling_options(temperature=0.25, max_tokens=9)
@engine_options
def command(word: str, *, settings: dict[str, Any], params: SamplingParams) -> None:
    received.update(word=word, settings=settings, params=params)


def call(*args):
    received.clear()
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    result = CliRunner().invoke(app, ["hello", *args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_every_setting_has_a_flag():
    settings = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    help_text = CliRunner(env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).invoke(_app(), ["--help"]).output
    for name in [*settings, *SAMPLING_FLAGS]:
        assert f"--{name.replace('_', '-')}" in help_text


def _app():
    app = typer.Typer()
    app.command()(command)
    return app


def test_only_what_was_given_is_passed_on():
    call()
    assert received["settings"] == {}
    assert received["params"] == SamplingParams(temperature=0.25, max_tokens=9, output_kind=RequestOutputKind.DELTA)


def test_values_arrive_with_their_types():
    call(
        *[
            "--max-model-len",
            "64",
            "--kv-memory",
            "1MiB",
            "--no-enable-prefix-caching",
            "--gpu-memory-utilization",
            "0.5",
        ],
        *["--hf-overrides", '{"a": {"b": 1}}', "--ageing-s", "2", "--check-invariants", "--seed", "0"],
        *["--speculative-config", '{"method": "ngram"}'],
        *["--temperature", "0", "--stop", "x", "--stop", "y", "--top-k", "3"],
    )
    assert received["settings"] == {
        "max_model_len": 64,
        "kv_memory": "1MiB",
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.5,
        "hf_overrides": {"a": {"b": 1}},
        "speculative_config": {"method": "ngram"},
        "ageing_s": 2.0,
        "check_invariants": True,
        "seed": 0,
    }
    assert received["params"] == SamplingParams(
        temperature=0.0, max_tokens=9, stop=["x", "y"], top_k=3, output_kind=RequestOutputKind.DELTA
    )


@pytest.mark.parametrize(("text", "value"), [("60", 60.0), ("1e2", 100.0), ("auto", "auto"), ("off", "off")])
def test_a_number_or_a_word(text, value):
    call("--target-tpot-ms", text)
    assert received["settings"] == {"target_tpot_ms": value}
    assert EngineConfig(model="m", **received["settings"]).target_tpot_ms == value


@pytest.mark.parametrize("text", ["1073741824", "1", "40%", "0.5", "64MiB"])
def test_sizes_stay_texts_whose_words_are_their_own(text):
    call("--kv-memory", text, "--kv-host-memory", text)
    assert received["settings"] == {"kv_memory": text, "kv_host_memory": text}


@pytest.mark.parametrize("text", ["fast", "-1", "nan", "inf"])
def test_neither_a_number_nor_a_word(text):
    call("--target-tpot-ms", text)
    with pytest.raises(ConfigError, match="must be a number above 0 or one of auto, off"):
        EngineConfig(model="m", **received["settings"])


@pytest.mark.parametrize("word", ["auto", "off"])
def test_drafts_may_be_a_word(word):
    call("--speculative-config", word)
    assert received["settings"] == {"speculative_config": word}


@pytest.mark.parametrize(
    ("args", "error"),
    [
        (["--hf-overrides", "{half"], ConfigError),
        (["--hf-overrides", "[1]"], ConfigError),
        (["--speculative-config", "ngram"], ConfigError),
        (["--temperature", "-1"], SamplingParamsError),
    ],
)
def test_wrong_values_are_errors_of_their_own(args, error):
    with pytest.raises(error):
        call(*args)


def test_a_wrong_speculative_config_is_told_how_it_is_written():
    with pytest.raises(ConfigError, match=re.escape("""auto, off or a JSON object such as '{"method": "ngram"}'""")):
        call("--speculative-config", "ngram")


def test_what_is_no_number_is_wrong_usage():
    assert call("--max-model-len", "many").exit_code == 2


def test_flags_without_a_choice_are_passed_on_and_not_shown():
    call("--pipeline-parallel-size", "1", "--enable-sleep-mode", "--no-trust-remote-code", "--load-format", "auto")
    assert received["settings"] == {
        "pipeline_parallel_size": 1,
        "enable_sleep_mode": True,
        "trust_remote_code": False,
        "load_format": "auto",
    }
    assert "enable-sleep-mode" not in CliRunner(env={"COLUMNS": "300"}).invoke(_app(), ["--help"]).output


def test_vllms_flags_of_servers_are_taken_where_they_change_nothing():
    made = []

    @log_options
    def serve(*, logs: ServerLogs) -> None:
        made.append(logs)

    app = typer.Typer()
    app.command()(serve)
    flags = ["--disable-log-requests", "--enable-prompt-tokens-details", "--api-server-count", "1"]
    assert CliRunner().invoke(app, [*flags, "--log-level", "error"]).exit_code == 0
    assert made == [ServerLogs(log_level="error")]
    refused = CliRunner().invoke(app, ["--api-server-count", "2"])
    assert str(refused.exception) == (
        "api_server_count is 2; pagemill serves HTTP by one process, so it can only be 1; leave it out"
    )


def test_adapters_are_named_one_by_one():
    call("--enable-lora", "--lora-modules", "a=x", "--lora-modules", "b=y=z")
    assert received["settings"] == {"enable_lora": True, "lora_modules": {"a": "x", "b": "y=z"}}
    spread = one_by_one(["m", "--lora-modules", "a=x", "b=y"])
    assert spread == ["m", "--lora-modules", "a=x", "--lora-modules", "b=y"]
    for wrong, words in ((["a"], "NAME=PATH"), (["=x"], "NAME=PATH"), (["a=x", "a=y"], "'a' twice")):
        with pytest.raises(ConfigError, match=words):
            call(*(part for text in wrong for part in ("--lora-modules", text)))


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1.5m", 1_500_000), ("2M", 2 << 20), ("-1", -1)],
)
def test_large_numbers_may_be_written_as_for_vllm(text, number):
    call(f"--max-model-len={text}", f"--max-num-batched-tokens={text}", f"--kv-cache-memory-bytes={text}")
    assert [*received["settings"].values()] == [number] * 3
    assert {*received["settings"]} == {"max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"}


@pytest.mark.parametrize(
    ("text", "number"),
    [("1MiB", 1 << 20), ("1 mib", 1 << 20), ("1.5MB", 1_500_000), ("64KiB", 1 << 16), ("9b", 9), ("2M", 2 << 20)],
)
def test_bytes_may_be_written_as_sizes(text, number):
    call(f"--kv-cache-memory-bytes={text}")
    assert received["settings"] == {"kv_cache_memory_bytes": number}


@pytest.mark.parametrize("text", ["1QiB", "1iB", "50%", "-1MiB", "1.2345kB.", "MiB"])
def test_what_is_no_number_of_bytes_is_refused(text):
    result = call(f"--kv-cache-memory-bytes={text}")
    assert result.exit_code == 2
    assert f"{text!r} is no number of bytes; write it as 8388608 or 8MiB" in " ".join(
        result.output.replace("│", " ").split()
    )


@pytest.mark.parametrize("text", ["", "many", "4q", "1.5", "1.5K", "1.2345k", "4 k", "0x10", "1e3"])
def test_what_is_no_large_number_is_refused(text):
    result = call(f"--max-model-len={text}")
    assert result.exit_code == 2
    assert f"{text!r} is not an integer; write it" in " ".join(result.output.split())
