"""The front end starts quickly: it imports neither torch nor transformers, and `import pagemill` next to nothing."""

import os
import subprocess
import sys

import pytest

FRONT_END = (
    "pagemill.frontend.async_llm, pagemill.server.run, pagemill.cli.main, pagemill.cli.app, pagemill.cli.serve, "
    "pagemill.cli.generate, pagemill.cli.chat, pagemill.cli.bench, pagemill.cli.loading, pagemill.frontend.llm"
)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("pagemill", ["torch", "transformers", "numpy", "msgspec", "asyncio"]),
        ("pagemill.cli.main, pagemill.frontend.spawn", ["typer", "numpy", "msgspec", "asyncio"]),
        (FRONT_END, ["torch", "transformers"]),
    ],
)
def test_imports_nothing_heavy(modules, heavy):
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_public_names_are_shown_before_they_are_used():
    code = "import pagemill; print(set(pagemill.__all__) <= set(dir(pagemill)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


def test_every_public_name_is_there():
    import pagemill

    assert [name for name in pagemill.__all__ if not hasattr(pagemill, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pagemill.Nothing


@pytest.mark.parametrize("policy", ["PASSIVE", "ACTIVE"])
def test_idle_threads_of_torch_sleep_unless_told_otherwise(policy):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": policy} if policy == "ACTIVE" else {})
    code = "import pagemill, torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert f"OMP_WAIT_POLICY='{policy}'" in result.stderr.replace(" ", "")
