"""`pagemill serve` takes settings from flags, the environment and a file, in this order, and shows where from."""

import re
import shutil
import socket
import sys

import pytest
import yaml
from typer.testing import CliRunner

from pagemill.cli.app import app
from pagemill.errors import ConfigError

FILE = """
model: a-model
port: 9001
max_model_len: 4096     # as in Python
kv-compaction: off      # a word, not false
kv-memory: 0.5
served-model-name: [big, small]
allowed-origins: "*"
enable-prefix-caching: false
speculative-config: {method: ngram, num_speculative_tokens: 3}
seed:
"""


@pytest.fixture
def show(tmp_path):
    """Returns what `pagemill serve ... --show-config` prints, with a file of this text."""

    def show(text=None, *args, **environment):
        file = tmp_path / "serve.yaml"
        if text is not None:
            file.write_text(text)
            args = (*args, "--config", str(file))
        result = CliRunner().invoke(app, ["serve", *args, "--show-config"], env=environment)
        if isinstance(result.exception, ConfigError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output.replace(f"{tmp_path}/", "")

    return show


def test_a_file_says_what_flags_say(show):
    shown = show(FILE)
    settings = yaml.safe_load(shown)
    expected = {
        "model": "a-model",
        "port": 9001,
        "max-model-len": 4096,
        "kv-compaction": "off",
        "kv-memory": "0.5",
        "served-model-name": ["big", "small"],
        "allowed-origins": ["*"],
        "enable-prefix-caching": False,
        "speculative-config": '{"method":"ngram","num_speculative_tokens":3}',
        "seed": 0,
        "max-connections": 8192,
    }
    assert {name: settings[name] for name in expected} == expected
    assert "port: 9001  # serve.yaml, line 3\n" in shown
    assert "seed: 0  # default\n" in shown
    assert "pipeline-parallel-size" not in shown


def test_adapters_may_be_a_mapping(show):
    settings = yaml.safe_load(show("model: m\nenable-lora: true\nlora-modules: {a: /x, b: y=z}"))
    assert settings["lora-modules"] == ["a=/x", "b=y=z"]


def test_what_is_shown_is_a_file_with_the_same_settings(show, tmp_path):
    first = show(FILE)
    again = show(first)
    assert yaml.safe_load(again) == yaml.safe_load(first)
    assert "seed: 0  # serve.yaml, line" in again


def test_flags_come_before_the_environment_and_that_before_the_file(show):
    environment = {"PAGEMILL_SERVE_PORT": "9002", "PAGEMILL_SERVE_MAX_NUM_SEQS": "7", "PAGEMILL_SERVE_DTYPE": ""}
    shown = show(FILE, "--max-num-seqs", "8", **environment)
    assert "port: 9002  # PAGEMILL_SERVE_PORT\n" in shown
    assert "max-num-seqs: 8  # command line\n" in shown
    assert 'model: "a-model"  # serve.yaml, line 2\n' in shown
    assert 'dtype: "auto"  # default\n' in shown


def test_everything_may_be_in_the_environment(show, tmp_path):
    (tmp_path / "other.yaml").write_text("port: 1")
    names = '["a", "b"]'
    shown = show(
        PAGEMILL_SERVE_MODEL="m",
        PAGEMILL_SERVE_SERVED_MODEL_NAME=names,
        PAGEMILL_SERVE_LOG_FORMAT="json",
        PAGEMILL_SERVE_CONFIG=str(tmp_path / "other.yaml"),
    )
    settings = yaml.safe_load(shown)
    assert (settings["model"], settings["served-model-name"], settings["port"]) == ("m", ["a", "b"], 1)
    assert 'log-format: "json"  # PAGEMILL_SERVE_LOG_FORMAT\n' in shown


def test_keys_are_taken_and_never_shown(show):
    shown = show("model: m\napi-key: xyzzy-file\nadmin-api-key: [xyzzy-a, xyzzy-b]", PAGEMILL_API_KEY="xyzzy-variable")
    assert "xyzzy" not in shown
    assert "# api-key: not shown (PAGEMILL_API_KEY)\n" in shown
    assert "# admin-api-key: not shown (serve.yaml, line 3)\n" in shown
    assert "# api-key: none (default)\n" in show("model: m")


def test_the_variable_of_a_key_comes_before_the_file(tmp_path, monkeypatch):
    from pagemill.cli import serve

    taken = {}

    async def start(*arguments):
        taken["access"] = arguments[8]

    monkeypatch.setattr(serve, "_serve", start)
    (tmp_path / "serve.yaml").write_text("model: m\nport: 0\napi-key: xyzzy-file\nadmin-api-key: xyzzy-admin")
    environment = {"PAGEMILL_API_KEY": "xyzzy-variable"}
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "serve.yaml")], env=environment)
    assert result.exit_code == 0, result.output
    assert (taken["access"].api_key, taken["access"].admin_api_key) == (["xyzzy-variable"], ["xyzzy-admin"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: m\nmax-model-length: 1", "serve.yaml, line 2: there is no setting 'max-model-length'; did you mean "),
        ("zzz: 1", "serve.yaml, line 1: there is no setting 'zzz'; 'pagemill serve --help' lists all"),
        ("config: other.yaml", "line 1: there is no setting 'config'; give --config on the command line"),
        ("n-ctx: 1", "line 1: there is no setting 'n-ctx'; did you mean 'max-model-len'?"),
        ("model: m\nport: many", "serve.yaml, line 2: port is 'many': "),
        ("model: m\nport: [1, 2]", "serve.yaml, line 2: port is a list; it must be a single value"),
        ("model: m\ntenants: {a: {}}", "serve.yaml, line 2: tenants is a mapping; it must be a single value"),
        ("model: m\nlora-modules: {a: {b: c}}", "lora-modules has {'b': 'c'} for 'a'; it must be a path"),
        ("model: m\nlora-modules: {a=b: c}", "lora-modules has 'a=b'; a name must be without '='"),
        ("port: 1\nport: 2", "line 2: 'port' is given twice; give it once"),
        ("max-model-len: 1\nmax_model_len: 2", "line 2: 'max_model_len' is given twice; give it once"),
        ("hf-overrides: {a: {b: 1, b: 2}}", "line 1: 'b' is given twice; give it once"),
        ("hf-overrides: [[1]]", "line 1: hf-overrides is a list of more than words and numbers"),
        ("? [a]\n: 1", "line 1: a name is a list or a mapping; it must be a word"),
        ("- port", "line 1: the file must have one 'name: value' for each setting"),
        ("a: {", "line 1: expected the node content, but found"),
        ("port: 1\na: b: c", "line 2: mapping values are not allowed here; correct it"),
        ("hf-overrides: &a {b: *a}", "cannot be read"),
        ("seed: {a: 1}", "line 1: seed is a mapping; it must be a single value"),
        ("model: m\nmax-num-seqs: 0", "max_num_seqs is 0; it must be an integer of at least 1"),
        ("model: m\nkv-memory: lots", "kv_memory is 'lots'; it must be bytes"),
        ("model: m\nkv-host-memory: -1GiB", "kv_host_memory is '-1GiB'; it must be bytes"),
        ("model: m\nkv-disk-memory: 150%", "kv_disk_memory is '150%'; as a share"),
        ("model: m\ngpu-memory-utilization: 5", "gpu_memory_utilization is 5.0; it must be a number above 0"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(show, text, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        show(text)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PAGEMILL_SERVE_PROT": "1"}, "the variable PAGEMILL_SERVE_PROT is no setting; did you mean "),
        ({"PAGEMILL_SERVE_API_KEY": "sk"}, "did you mean 'PAGEMILL_API_KEY'?"),
        ({"PAGEMILL_SERVE_ADMIN_API_KEYS": "sk"}, "did you mean 'PAGEMILL_ADMIN_API_KEY'?"),
        ({"PAGEMILL_SERVE_SHOW_CONFIG": "1"}, "SHOW_CONFIG is no setting; give --show-config on the command line"),
        ({"PAGEMILL_SERVE_LOAD_FORMATS": "1"}, "is no setting; did you mean 'PAGEMILL_SERVE_LOG_FORMAT'?"),
        ({"PAGEMILL_SERVE_REVISIONS": "1"}, "is no setting; 'pagemill serve --help' lists all"),
        ({"PAGEMILL_SERVE_PORT": "tcp://10.0.0.1"}, "PAGEMILL_SERVE_PORT: port is 'tcp://10.0.0.1': "),
        ({"PAGEMILL_SERVE_ALLOWED_ORIGINS": "[1"}, "the variable PAGEMILL_SERVE_ALLOWED_ORIGINS is no JSON list"),
    ],
)
def test_wrong_variables_are_refused(show, environment, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        show("model: m", **environment)


def test_a_file_that_is_not_there_is_named(show, tmp_path):
    with pytest.raises(ConfigError, match=r"'nowhere\.yaml' cannot be read"):
        show(None, "m", "--config", "nowhere.yaml")
    shutil.copyfile("/bin/sh", tmp_path / "binary")
    with pytest.raises(ConfigError, match="cannot be read"):
        show(None, "m", "--config", str(tmp_path / "binary"))


@pytest.mark.parametrize("shows", [True, False])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "0.0.0.0"], "there is no API key; give one"),
        (["--host", "192.0.2.1"], "choose another --host"),
        (["--ssl-certfile", "nowhere.pem"], "the certificate 'nowhere.pem' with the key 'nowhere.pem' cannot be used"),
        (
            ["--chat-template", "nowhere.jinja"],
            "chat_template is 'nowhere.jinja', which is no Jinja source",
        ),
        (["--pin-file", __file__], "cannot be read as pins"),
        (["--kv-memory", "lots"], "kv_memory is 'lots'; it must be bytes"),
        (["--replicas", "2"], "replicas needs Ray, which is not installed"),
        (["--otlp-traces-endpoint", "http://x"], "otlp_traces_endpoint needs OpenTelemetry, which is not installed"),
    ],
)
def test_what_a_start_refuses_is_shown_as_little(args, message, shows, monkeypatch):
    for module in ("ray", "pagemill.server.logs.traces"):
        monkeypatch.setitem(sys.modules, module, None)
    given = ["serve", "no-such-model", "--port", "0", *args, *["--show-config"] * shows]
    refused = CliRunner(env={"PAGEMILL_API_KEY": ""}).invoke(app, given).exception
    assert isinstance(refused, ConfigError)
    assert message in refused.message


def test_a_device_that_is_not_there_is_not_shown(show):
    with pytest.raises(ConfigError, match="device is 'tpu'; it must be 'auto', 'cpu' or 'cuda'"):
        show("model: m\ndevice: tpu")


def test_settings_of_a_running_server_are_shown(show):
    with socket.create_server(("127.0.0.1", 0)) as running:
        port = running.getsockname()[1]
        assert f"port: {port}  # command line\n" in show(None, "m", "--port", str(port))


def test_a_chat_template_may_be_one_of_the_models_own(show):
    assert 'chat-template: "tool_use"' in show("model: m\nchat-template: tool_use")
