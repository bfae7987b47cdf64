"""The command line as a user meets it: in a process of its own."""

import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import pagemill
from pagemill.cli import app
from pagemill.cli.serve_checks import require_free_port
from pagemill.errors import ConfigError, PagemillError
from pagemill.hub.registry import REGISTRY


def run(*args, **env):
    return subprocess.run(
        [sys.executable, "-m", "pagemill", *args],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "120", **env},
    )


def test_version():
    assert run("--version").stdout == f"pagemill {pagemill.__version__}\n"


def test_help_lists_every_command():
    shown = run("--help").stdout
    for name, line in app.COMMANDS.items():
        assert re.search(rf"{name} +{re.escape(line)}", shown)


@pytest.mark.parametrize("name", app.COMMANDS)
def test_help_of_a_command_begins_as_in_the_list(name):
    """The list is written by hand so that it imports no command."""
    command = app.load_command(name)
    assert inspect.cleandoc(command.help).startswith(app.COMMANDS[name])


def test_bare_command_shows_help():
    assert "pull" in run().stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pul"], "did you mean 'pull'"),
        (["doctor", "--jsn"], "--json"),
        (["pull"], "no model is named; to begin with, a small one: pagemill pull smollm2-135m"),
        (["serve"], "no model is named; to begin with, a small one: pagemill serve smollm2-135m"),
    ],
)
def test_wrong_usage_exits_with_2_and_suggests(args, message):
    done = run(*args)
    assert done.returncode == 2
    assert message in re.sub(r"\s+", " ", done.stderr)
    assert "Traceback" not in done.stderr


def test_error_is_one_line_on_stderr():
    done = run("pull", "smolm2-135m")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no model 'smolm2-135m'; did you mean 'smollm2-135m'?")
    assert done.stderr.count("\n") == 1


def test_pull_of_a_path_has_nothing_to_do(tmp_path):
    assert "nothing to fetch" in run("pull", str(tmp_path)).stdout


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["doctor"], ["pull", "nothing"], ["pull", "--help"]])
def test_torch_is_not_loaded(args, monkeypatch, tmp_path):
    """A torch that cannot be imported stands in for one that takes two seconds."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run(*args, PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert "torch was imported" not in done.stdout + done.stderr


def test_doctor_json_holds_what_a_bug_report_needs(tmp_path):
    report = json.loads(run("doctor", "--json", PAGEMILL_HOME=str(tmp_path), PAGEMILL_API_KEY="secret").stdout)
    assert report["pagemill"]["version"] == pagemill.__version__
    assert report["pagemill"]["kernels"]
    assert report["machine"]["cores"] == os.cpu_count()
    assert report["machine"]["memory"] > 2**28
    assert report["software"]["python"].startswith(sys.version.split()[0])
    assert report["settings"]["PAGEMILL_HOME"] == str(tmp_path)
    assert report["models"] == {"cache": str(tmp_path)}
    assert "secret" not in json.dumps(report)


def test_doctor_prints_markdown_with_the_pulled_models(tmp_path):
    model = REGISTRY["smollm2-135m"]
    file = tmp_path / "models" / model.name / model.file.name
    file.parent.mkdir(parents=True)
    with file.open("wb") as sparse:
        sparse.truncate(model.size)
    shown = run("doctor", PAGEMILL_HOME=str(tmp_path)).stdout
    assert "### machine" in shown
    assert re.search(r"^- memory: \d+\.\d GiB$", shown, re.MULTILINE)
    assert f"- smollm2-135m: {file} (98,362,432 bytes)" in shown


def test_a_taken_port_is_refused_with_a_free_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use; .*--port \d+") as raised:
            require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", int(str(raised.value).split()[-1]))


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match="choose another --host"):
        require_free_port("192.0.2.1", 8000)


@pytest.mark.parametrize("more", [[], ["--admin-api-key", "sk-a"]])
def test_a_server_that_others_reach_does_not_start_without_keys(more):
    given = ["serve", "no-such-model", "--host", "0.0.0.0", "--port", "0", *more]
    refused = CliRunner(env={"PAGEMILL_API_KEY": ""}).invoke(app.app, given).exception
    assert isinstance(refused, ConfigError)
    assert "there is no API key; give one (--api-key, PAGEMILL_API_KEY, or --tenants)" in refused.message


def test_a_port_that_can_not_be_is_wrong_usage():
    result = run("serve", "smollm2-135m", "--port", "70000")
    assert result.returncode == 2
    assert "65535" in result.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_disk_is_an_error_in_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pagemill", "doctor"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_closed_stdout_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m pagemill --version >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("flag", "args"),
    [
        ("--out", ["calibrate", "no-such-model", "--out", "device.json"]),
        ("--plot", ["plan", "no-such-model", "--device", "h100", "--plot", "plan.svg"]),
        ("ARCHIVE", ["cache", "export", "no-such-store", "blocks"]),
    ],
)
def test_where_no_file_can_be_written_nothing_is_begun(flag, args, tmp_path):
    *before, name = args
    (tmp_path / "file").touch()
    (tmp_path / name).mkdir()
    for path in (tmp_path / "file" / name, tmp_path / name):
        refused = CliRunner().invoke(app.app, [*before, str(path)]).exception
        assert isinstance(refused, ConfigError)
        assert refused.message.startswith(f"{flag} is {str(path)!r}, where no file can be written: ")
    missing = str(tmp_path / "folder" / name)
    assert "no-such-" in str(CliRunner().invoke(app.app, [*before, missing]).exception)  # its folder is made
    assert os.listdir(tmp_path / "folder") == []


@pytest.mark.parametrize(("command", "said"), [("pull", "there is no model ''"), ("serve", "model is ''; it must be")])
def test_no_name_is_no_model(command, said):
    refused = CliRunner().invoke(app.app, [command, ""]).exception
    assert isinstance(refused, PagemillError)
    assert refused.message.startswith(said)


@pytest.mark.parametrize("args", ["generate smollm2-135m -", "chat smollm2-135m"])
def test_a_closed_stdin_is_an_error_in_one_line(args):
    command = f"{shlex.quote(sys.executable)} -m pagemill {args} <&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard input is closed")
    assert done.stderr.count("\n") == 1
