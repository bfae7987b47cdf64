"""What a stranger meets first: scripts/install on a machine that lacks something, and what the package declares."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagemill

ROOT = Path(__file__).parents[1]

TOOLS = ("sh", "env", "uname", "timeout", "grep", "sed", "rm")
COMPILER = ("c++", "as", "ld")
OLD = "import sys; sys.version_info = (3, 9, 18, 'final', 0)"
WITHOUT_VENV = "import sys; sys.modules['ensurepip'] = None"
WITHOUT_HEADERS = "import os; real = os.path.exists; os.path.exists = lambda p: not p.endswith('Python.h') and real(p)"
DISTRIBUTION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def machine(tmp_path):
    """A PATH that holds little, and a way to run scripts/install on it."""
    tools = tmp_path / "bin"
    tools.mkdir()

    def which(name):
        return subprocess.run(["sh", "-c", f"command -v {name}"], capture_output=True, text=True).stdout.strip()

    class Machine:
        def add(self, *names):
            for name in names:
                if target := which(name):
                    (tools / name).symlink_to(target)

        def add_python(self, preamble):
            """A python3 that differs from the real one in what `preamble` changes before the script."""
            start = f"{preamble}; import sys; sys.argv = sys.argv[1:]; exec(sys.stdin.read())"
            script = tools / "python3"
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{start}" "$@"\n')
            script.chmod(0o755)

        def install(self, **settings):
            env = {"PATH": os.fspath(tools), "VENV": os.fspath(tmp_path / "venv"), **settings}
            done = subprocess.run(
                ["scripts/install"],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert not (tmp_path / "venv").exists()
            return done

    machine = Machine()
    machine.add(*TOOLS)
    return machine


def refused_in_one_line(done):
    assert done.returncode == 1
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr), done.stderr
    assert done.stdout == ""
    return done.stderr


def test_install_without_a_compiler_names_the_package(machine):
    assert "apt install g++" in refused_in_one_line(machine.install())


def test_install_with_a_wrong_cxx_names_it(machine):
    machine.add(*COMPILER)
    assert "CXX=g++-99" in refused_in_one_line(machine.install(CXX="g++-99"))


def test_install_with_a_compiler_of_an_older_language_says_which_version_is_needed(machine):
    machine.add("false")
    assert "false cannot compile C++20" in refused_in_one_line(machine.install(CXX="false"))


def test_install_without_python(machine):
    machine.add(*COMPILER)
    assert "install Python 3.10 or newer" in refused_in_one_line(machine.install())


@pytest.mark.parametrize(
    ("preamble", "way_out"),
    [
        (OLD, "python3 is Python 3.9, and pagemill needs 3.10 to 3.14"),
        (WITHOUT_VENV, f"apt install {DISTRIBUTION}-venv"),
        (WITHOUT_HEADERS, f"apt install {DISTRIBUTION}-dev"),
    ],
    ids=["old", "no venv", "no headers"],
)
def test_install_with_an_unfit_python_says_what_to_do(machine, preamble, way_out):
    machine.add(*COMPILER)
    machine.add_python(preamble)
    assert way_out in refused_in_one_line(machine.install())


def test_install_with_a_named_python_takes_no_other(machine):
    machine.add(*COMPILER)
    machine.add_python("pass")
    assert "python3.9 does not run" in refused_in_one_line(machine.install(PYTHON="python3.9"))


def test_versions_agree():
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert pagemill.__version__ == declared
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()


def test_locked_versions_lie_in_the_declared_ranges():
    from packaging.requirements import Requirement

    locked = {}
    for line in (ROOT / "requirements/lock.txt").read_text().splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            pin = next(iter(requirement.specifier)).version
            locked.setdefault(requirement.name.lower(), []).append(pin)
    names = ("dependencies", "dev", "docs", "gpu", "otel", "plot", "ray")
    declared = [text for name in names for text in _declared(name)]
    assert len(declared) > 20
    for requirement in map(Requirement, declared):
        for pin in locked[requirement.name]:
            assert requirement.specifier.contains(pin), f"{requirement} excludes the locked {pin}"


@pytest.mark.parametrize(
    ("folders", "lists"),
    [
        (["src"], ["dependencies", "gpu", "otel", "plot", "ray"]),
        (["tests", "benchmarks"], ["dependencies", "dev", "ray"]),
    ],
    ids=["package", "development"],
)
def test_what_is_imported_is_declared(folders, lists):
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    declared = {canonicalize_name(Requirement(text).name) for name in lists for text in _declared(name)}
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    own = {"pagemill", "benchmarks", *(file.stem for file in files), *(file.parent.name for file in files)}
    providers = importlib.metadata.packages_distributions()
    # Adapters of other engines, suites of clients, and what compares with another library, run in other environments.
    elsewhere = {ROOT / "benchmarks/peers/adapters", ROOT / "tests/clients", ROOT / "benchmarks/grammar_libraries.py"}
    for file in (file for file in files if not elsewhere & {file, file.parent}):
        for module in _imported(file) - sys.stdlib_module_names - own:
            assert declared & set(map(canonicalize_name, providers.get(module, [module]))), (
                f"{file} imports {module}: not declared"
            )


def _imported(file):
    modules = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.add(node.module.partition(".")[0])
    return modules


def _declared(name):
    text = re.search(rf"^{name} = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)[1]
    return re.findall(r'^  "(.*)",$', text, re.MULTILINE)


FRONT_END = (
    "arguments",
    "cli",
    "config",
    "doctor",
    "engine.messages",
    "errors",
    "hub",
    "sampling.params",
    "server",
    "text",
)

IMPORT_ALL = """
import importlib, pkgutil, sys
for name in sys.argv[1:]:
    module = importlib.import_module("pagemill." + name)
    for inner in pkgutil.walk_packages(getattr(module, "__path__", []), module.__name__ + "."):
        importlib.import_module(inner.name)
    assert "torch" not in sys.modules, f"importing pagemill.{name} loads torch"
"""


def test_the_front_end_loads_no_torch():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL, *FRONT_END], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
