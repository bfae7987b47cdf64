"""pagemill ls and rm, and the words of listings."""

import json
import shutil

import pytest

from pagemill.cli.loading import LoadingBar, invite
from pagemill.cli.ls import ls
from pagemill.cli.rm import rm
from pagemill.cli.wording import ago, counted
from pagemill.errors import ModelNotFoundError
from pagemill.hub import huggingface, local_models, registry


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A home of pagemill with its model, and Hugging Face's cache with a whole repository and one of two GGUF files."""
    from huggingface_hub import constants

    monkeypatch.setenv("PAGEMILL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = registry.REGISTRY["smollm2-135m"]
    model.file.parent.mkdir(parents=True)
    with model.file.open("wb") as file:
        file.truncate(model.size)
    for repo, files in {"org/whole": ["config.json", "model.safetensors"], "org/two": ["a.gguf", "b.gguf"]}.items():
        root, commit = tmp_path / "hub" / f"models--{repo.replace('/', '--')}", repo[-1] * 40
        for folder in ("refs", f"snapshots/{commit}", "blobs"):
            (root / folder).mkdir(parents=True)
        (root / "refs/main").write_text(commit)
        for name in files:
            (root / "blobs" / name).write_bytes(b"{}" * 500_000)
            (root / "snapshots" / commit / name).symlink_to(root / "blobs" / name)
    return tmp_path


def test_models_are_listed_and_deleted(hub, capsys):
    def printed(command, *args, **options):
        command(*args, **options)
        return capsys.readouterr().out

    listed = json.loads(printed(ls, as_json=True))
    names = [row["name"] for row in listed]
    assert names == ["org/two:a.gguf", "org/two:b.gguf", "org/whole", "smollm2-135m"]
    assert listed[3]["bytes"] == registry.REGISTRY["smollm2-135m"].size
    assert listed[2]["bytes"] == 2_000_000
    assert huggingface.cached("org/two:a.gguf").samefile(listed[0]["path"])
    shown = printed(ls)
    assert all(name in shown for name in names)
    assert "org/whole deleted, 2 MiB came free" in printed(rm, ["smollm2-135m", "org/whole", "org/two"])
    assert json.loads(printed(ls, as_json=True)) == []
    assert "pagemill pull" in printed(ls)
    assert not registry.REGISTRY["smollm2-135m"].file.parent.exists()


@pytest.mark.parametrize("name", ["smollm2", "org/other", "org/two:a.gguf", ".", "/etc", "", "x" * 5000])
def test_what_was_not_fetched_is_not_deleted(hub, name):
    with pytest.raises(ModelNotFoundError, match="has been fetched; those that have: org/two:a"):
        local_models.remove_model(name)
    shutil.rmtree(hub / "hub")
    assert [model.name for model in local_models.local_models()] == ["smollm2-135m"]


def test_words_of_counts_and_times():
    assert [counted(number, "turn") for number in (0, 1, 2000)] == ["0 turns", "1 turn", "2,000 turns"]
    times = (-5, 0.4, 59, 90, 7300, 90_000, 3e7, 8e7)
    assert [ago(seconds) for seconds in times] == [
        *("0 s ago", "0 s ago", "59 s ago", "2 min ago", "2 h ago", "1 d ago", "347 d ago", "2.5 years ago")
    ]


def test_a_models_name_is_printed_as_it_is(capsys):
    name = "models/[bold]one[/other]"
    invite("engine [x]", name, "http://127.0.0.1:8000", has_keys=False)
    printed = capsys.readouterr().err
    assert "engine [x]" in printed
    assert f"{name} is served at http://127.0.0.1:8000/v1" in printed
    bar = LoadingBar(name)
    bar(1, 2)
    assert bar.columns[0].render(bar.tasks[0]).plain == f"loading {name}"
