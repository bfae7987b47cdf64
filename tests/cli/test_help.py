"""Help is whole at 80 columns, and wrong usage is one line."""

import json
import re

import pytest
import typer
from typer.testing import CliRunner

from pagemill.arguments import arguments_of
from pagemill.cli.app import app
from pagemill.cli.main import main
from pagemill.planner.plot import SUFFIXES
from pagemill.planner.workload import WORKLOADS
from pagemill.server.logs.output import ServerLogs
from pagemill.sessions.store import default_path
from pagemill.simulate.roofline import DEVICES, ITEMSIZE, SHAPES, names_in


def commands(command, path=()):
    """Yields every command and group, with the words that call it."""
    yield path, command
    if hasattr(command, "list_commands"):
        context = command.context_class(command)
        for name in command.list_commands(context):
            yield from commands(command.resolve_command(context, [name])[1], (*path, name))


HERE = "--url=x"
"""Keeps a command from starting an engine's process ahead."""
EVERY = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("path", "command"), EVERY, ids=[" ".join(path) or "pagemill" for path, _ in EVERY])
def test_help_is_whole_at_80_columns(path, command):
    shown = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [*path, "--help"]).output
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"^Usage: .*\{|<list|range>|\bmodel <|\barchive <", shown, re.MULTILINE)
    words = re.sub(r"(?<=\w)-\n\s+|\s+", lambda found: "-" if found[0][0] == "-" else " ", shown)
    for param in command.params:
        if not getattr(param, "hidden", False):
            assert all(name in words for name in param.opts if name.startswith("--"))
            assert re.sub(r"\s+", " ", param.help or "").strip() in words
            assert (param.help or "").count("Default:") < 2
    for name, one in getattr(command, "commands", {}).items():
        assert f"{name} " in words
        assert re.sub(r"\s+", " ", one.help.partition("\n\n")[0]) in words


def test_help_names_the_values_of_flags():
    plan = {param.opts[0]: param.help for path, command in EVERY if path == ("plan",) for param in command.params}
    known = {
        "model": names_in(SHAPES),
        "--device": names_in(DEVICES),
        "--workload": WORKLOADS,
        "--dtype": ITEMSIZE,
        "--plot": SUFFIXES,
    }
    for flag, values in known.items():
        assert all(value in plan[flag] for value in values)
    for argument in arguments_of(ServerLogs).values():
        assert all(value in argument.description for value in argument.choices)


@pytest.mark.parametrize("path", [("chat",), ("sessions", "ls"), ("sessions", "rm")])
def test_help_names_the_file_of_sessions(path):
    (said,) = (param.help for param in dict(EVERY)[path].params if "--session-path" in param.opts)
    assert f"Default: {default_path().name} in pagemill's cache folder." in said


def test_every_listing_is_also_json():
    listings = [command for path, command in EVERY if path[-1:] == ("ls",)]
    assert len(listings) == 3
    assert all("--json" in {flag for param in command.params for flag in param.opts} for command in listings)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["doctor", "--jsn"], "there is no flag --jsn; did you mean --json? see pagemill doctor --help"),
        (["top", "http://h:1"], "for 'http://h:1'; did you mean --url http://h:1? see pagemill top --help"),
        (["ls", "a", "b"], "there is no place for 'a'; see pagemill ls --help"),
        (
            ["bench", "m", "--max-logprobs", "5"],
            "each token has 20 log probabilities at most; leave it out; see pagemill bench --help",
        ),
        (["sessions", "ls", "--api-key", "x"], "there is no flag --api-key; see pagemill sessions ls --help"),
        (
            ["cache", "prune", "x"],
            "error: say what to drop: --keep-mib or --unused-hours; see pagemill cache prune --help",
        ),
        (["serve", "m", "--port", "many"], "see pagemill serve --help"),
        (["nothing"], "there is no command 'nothing'; see pagemill --help"),
        (["serv"], "there is no command 'serv'; did you mean 'serve'? see pagemill --help"),
        (["top", "--url"], "option '--url' requires an argument; see pagemill top --help"),
        (["top", "--interval-s", "x"], "--interval-s is 'x'; it must be a valid number; see pagemill top --help"),
        (
            ["calibrate", "m", "--clock", "sun"],
            "--clock is 'sun'; it must be one of 'wall', 'cpu'; see pagemill calibrate --help",
        ),
        (["serve", "m", "--port", "-1"], "it must be greater than or equal to 0; see pagemill serve --help"),
        (["pull", "a", "b"], "see pagemill pull --help"),
        (["run", "m"], "there is no command 'run'; did you mean 'chat'? see pagemill --help"),
        (["list"], "there is no command 'list'; did you mean 'ls'? see pagemill --help"),
        (["ps"], "there is no command 'ps'; did you mean 'top'? see pagemill --help"),
        (["cache", "list"], "there is no command 'list'; did you mean 'ls'? see pagemill cache --help"),
        (
            ["serve", "--model", "m", HERE],
            "there is no flag --model; MODEL is given without a flag: pagemill serve MODEL; see pagemill serve --help",
        ),
        (
            ["serve", "m", "--ctx-size", "9", HERE],
            "--ctx-size; did you mean --max-model-len? see pagemill serve --help",
        ),
        (["generate", "m", "--n-ctx=9", HERE], "--n-ctx; did you mean --max-model-len? see pagemill generate --help"),
        (["chat", "m", "-c", "9", HERE], "no flag -c; did you mean --max-model-len? see pagemill chat --help"),
        (["serve", "m", "-tp", "2", HERE], "-tp; did you mean --tensor-parallel-size? see pagemill serve --help"),
        (["serve", "m", "-tp=2", HERE], "-tp; did you mean --tensor-parallel-size? see pagemill serve --help"),
        (["bench", "m", "--num-requests=4"], "--num-requests; did you mean --num-prompts? see pagemill bench --help"),
        (["ls", "-tp", "2"], "error: there is no flag -tp; see pagemill ls --help"),
        (
            ["serve", "m", "--no-enable-lor", HERE],
            "did you mean --no-enable-lora or --enable-lora? see pagemill serve --help",
        ),
        (["serve", "m", "--model-imp", "x", HERE], "error: there is no flag --model-imp; see pagemill serve --help"),
    ],
)
def test_wrong_usage_is_one_line(args, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("error: ")
    assert not said.startswith("error: invalid value: ")
    assert said.endswith(f"{words}\n")
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-seqs", "0"],
        ["--enable-lora", "--tensor-parallel-size", "2"],
        ["--reading-timeout-s", "0"],
        ["--config", "nowhere.yaml"],
    ],
)
def test_what_a_setting_refuses_has_another_status(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "m", *args, "--show-config"])
    said = capsys.readouterr().err
    assert (ended.value.code, said.count("\n")) == (1, 1), said


@pytest.mark.parametrize("args", [[], ["cache"]])
def test_without_a_command_there_is_help(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert not ended.value.code
    assert "Commands:" in capsys.readouterr().out


def test_listings_of_nothing_are_empty_json(tmp_path, capsys):
    for args in (["sessions", "ls", "--session-path"], ["cache", "ls", "--root"]):
        with pytest.raises(SystemExit):
            main([*args, str(tmp_path / "none"), "--json"])
        assert json.loads(capsys.readouterr().out) == []
