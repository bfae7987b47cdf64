"""One real server with the default model for the whole run: tests use it over HTTP, or its AsyncLLM underneath.

What only some tests need is imported by their fixtures: `--skip-missing` runs the others where it is not installed.
"""

import os
import signal
import sys
from importlib.util import find_spec

import pytest

# On a GPU, each of several processes compiles most of the time, on one core, where another's threads would spin.
if "PAGEMILL_TESTS_ON_ONE_CORE_EACH" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["PYTEST_XDIST_WORKER"][2:]) % len(cores)]})

import pagemill  # noqa: F401  # before torch, whose idle threads would spin on the cores that other workers need

import torch  # isort: skip

import interpreter  # noqa: F401  # before anything imports triton, as some of transformers does
from pagemill.ops.prepare import settle_vector_math

# A shell that runs the tests in the background has Ctrl-C ignored, here and in what is started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)

settle_vector_math()  # references are computed with torch too
torch.set_num_threads(1)  # others would wait in barriers, at operations as small as these or for cores of other workers

LONG = frozenset({
    "soak", "attack", "test_replay_commands.py", "test_engine_same_bits.py", "test_offloading.py", "browser",
})  # fmt: skip
"""Files and folders that take longest."""


def pytest_addoption(parser):
    parser.addoption("--skip-missing", action="store_true", help="skip test files that import what is not installed")


def pytest_configure(config):
    if config.getoption("--skip-missing") and find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    # How fast examples are made says something of the machine, not of the code.
    settings.register_profile("busy machines", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy machines")


def pytest_make_collect_report(collector):
    """Skips, if asked to, a file that imports a package which is not installed, and names the package."""
    if not (isinstance(collector, pytest.Module) and collector.config.getoption("--skip-missing")):
        return None
    try:
        collector.obj  # noqa: B018, imports the file
    except pytest.Collector.CollectError as error:
        missing = error.__cause__
        if isinstance(missing, ModuleNotFoundError) and not is_here(missing.name):
            where = (str(collector.path), 0, f"{missing.name} is not installed")
            return pytest.CollectReport(collector.nodeid, "skipped", where, [])
    return None


def is_here(module):
    """Returns whether a module is the checkout's own, or Python's, so that nothing to install would bring it."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("pagemill", "benchmarks", "tests")


def pytest_collection_modifyitems(items):
    """Begins with what takes longest, so that no worker of several is left alone with it in the end."""
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """made_once(name, write) -> path of a file that write(path) makes for all workers."""
    import filelock

    own = tmp_path_factory.getbasetemp()
    folder = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def made(name, write):
        path = folder / name
        with filelock.FileLock(f"{path}.lock"):
            if not path.is_file():
                begun = path.with_suffix(".begun")
                write(begun)
                begun.rename(path)
        return path

    return made


@pytest.fixture(scope="session")
def reference(made_once):
    """transformers' model, dense and in fp32. It reads its GGUF file for half a minute."""

    def write(path):
        from transformers import AutoModelForCausalLM

        from pagemill.hub import resolve_model
        from served import MODEL

        file, kinds = resolve_model(MODEL), {"dtype": torch.float32, "attn_implementation": "eager"}
        made = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **kinds)
        torch.save(made.eval(), path)

    return torch.load(made_once("reference.pt", write), weights_only=False, mmap=True)


@pytest.fixture(scope="session")
def shallow_path(made_once):
    """The real model's first layers, as a GGUF file: for tests of memory and plans, which are alike for all layers."""
    from pagemill.hub import resolve_model
    from served import MODEL
    from shallow import LAYERS, write_layers

    return made_once("shallow.gguf", lambda path: write_layers(resolve_model(MODEL), path, range(LAYERS)))


@pytest.fixture(scope="session")
def served():
    from served import serving

    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def serving():
    """Another server, with other settings: `with serving(max_num_seqs=4) as server`."""
    from served import serving

    return serving
