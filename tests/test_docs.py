"""Checks that what documents outside the site point to exists; `make docs` checks the site's own links."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = [
    file
    for folder in ("src", "csrc", "benchmarks", "scripts", "tests")
    for file in (ROOT / folder).rglob("*")
    if file.suffix in {".py", ".cpp", ".h"}
]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md"])
def test_relative_links_lead_somewhere(name):
    document = ROOT / name
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    for link in links:
        assert link.startswith("https://") or (document.parent / link).exists(), f"{name} links to {link}"


def test_pages_that_code_names_exist():
    for file in CODE:
        for page in re.findall(r"(?<![\w/])docs/[\w./-]+\.(?:md|svg|png)", file.read_text()):
            assert (ROOT / page).exists(), f"{file.relative_to(ROOT)} names {page}"


def test_files_that_pages_name_exist():
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "archive" not in page.parts]
    for page in pages:
        for name in re.findall(r"`((?:[a-z_]+/)+[\w.]*(?:\.(?:py|h|cpp|json)|/))`", page.read_text()):
            homes = (ROOT, ROOT / "src/pagemill")
            made = name.startswith("benchmarks/results/")
            assert made or any((home / name).exists() for home in homes), f"{page.relative_to(ROOT)} names {name}"
        for name in re.findall(r"`([a-z_]+\.(?:h|cpp))`", page.read_text()):
            assert list((ROOT / "csrc").rglob(name)), f"{page.relative_to(ROOT)} names {name}"


def test_the_index_leads_to_every_page():
    index = (ROOT / "docs/index.md").read_text()
    for folder in ("guide", "concepts", "reference"):
        for page in (ROOT / "docs" / folder).glob("*.md"):
            assert f"({folder}/{page.name})" in index, f"docs/index.md does not link to {folder}/{page.name}"


def test_pictures_are_as_the_script_draws_them(tmp_path):
    script = ROOT / "scripts/draw_docs.py"
    subprocess.run([sys.executable, script, tmp_path], check=True)
    for picture in (ROOT / "docs/images").glob("*.svg"):
        assert picture.read_text() == (tmp_path / picture.name).read_text(), f"run {script}"


def test_measured_table_of_the_readme_is_short():
    section = (ROOT / "README.md").read_text().split("## Measured")[1].split("\n## ")[0]
    assert sum(line.startswith("| ") for line in section.splitlines()) - 2 <= 10


PAGES = [ROOT / "README.md", ROOT / "docs/tutorial.md", *sorted((ROOT / "docs/guide").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_import_what_exists(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page.name}: {ast.unparse(node)}"


def test_flags_of_the_guides_exist():
    import typer

    from pagemill.cli.app import app

    known = {flag for command in _commands(typer.main.get_command(app)) for flag in _flags(command)}
    assert "--kv-memory" in known
    for page in PAGES:
        lines = [line for line in page.read_text().splitlines() if "benchmarks" not in line]
        if page.name != "replay.md":
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", "\n".join(lines)))
            assert named <= known | {"--help"}, f"{page.name} names {sorted(named - known)}"


def _commands(command):
    if not hasattr(command, "list_commands"):
        return [command]
    context = command.context_class(command)
    names = command.list_commands(context)
    return [found for name in names for found in _commands(command.resolve_command(context, [name])[1])]


def _flags(command):
    return [flag for param in command.params for flag in (*param.opts, *param.secondary_opts)]


def test_targets_that_pages_name_are_in_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "archive" not in page.parts]
    for page in [*pages, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md"]:
        for named in re.findall(r"(?:^|`)make ((?:[a-z][a-z-]* ?)+)", page.read_text(), re.MULTILINE):
            assert set(named.split()) <= targets, f"{page.relative_to(ROOT)} names make {named}"


def test_settings_of_the_gpus_targets_are_explained():
    makefile, page = (ROOT / "Makefile").read_text(), (ROOT / "CONTRIBUTING.md").read_text()
    for setting in ("CAPABILITIES", "MINUTES", "GPU_PYTHON", "GPU_PACKAGES"):
        assert re.search(rf"^{setting} \?=", makefile, re.MULTILINE)
        assert f"{setting}=" in page
