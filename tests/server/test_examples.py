"""Runs the examples as a user would, against one server; `examples/agent.py` runs where a server takes tools."""

import io
import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(served, monkeypatch, capsys):
    """Runs an example with these arguments, in this process, and returns what it prints."""

    def run(name, *arguments, said=None, url=True):
        where = ["--url", f"{served.url}/v1"] if url else []
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments), *where])
        if said is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(said))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run():
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert files == {"agent.py", "batch.py", "chat.py", "extract.py", "forks.py", "rag.py"}
    assert all(30 <= len((EXAMPLES / file).read_text(encoding="utf-8").splitlines()) <= 90 for file in files)


def test_a_chat_goes_on_where_it_was_left(example, v1):
    for turns in (2, 3):
        example("chat.py", "--session", "mine", "--max-tokens", 4, said="Hi!\n\nAnd you?\n" if turns == 2 else "Why?\n")
        assert v1.get("/sessions/mine").json()["num_turns"] == turns


def test_facts_are_taken_out_of_a_text(example):
    people = json.loads(example("extract.py", "Ada Lovelace was born in London in 1815."))["people"]
    assert all({*person} == {"name", "born", "place", "field"} for person in people)
    with pytest.raises(SystemExit, match="cut at --max-tokens"):
        example("extract.py", "Ada.", "--max-tokens", 3)


def test_questions_find_their_document_and_what_is_computed_of_it(example, v1, tmp_path):
    about = {"bridge.txt": "The old bridge over the river is closed on Mondays.", "cats.txt": "Cats sleep all day."}
    for name, text in about.items():
        (tmp_path / name).write_text(text * 5, encoding="utf-8")
    asked = ["--ask", "When is the old bridge over the river closed?", "--ask", "Do cats sleep all day?"]
    said = example("rag.py", *(tmp_path / name for name in about), *asked, "--max-tokens", 4)
    assert [name for line in said.splitlines() for name in about if f"{name};" in line] == [*about]
    assert len(v1.get("/pins").json()["data"]) == 2
    assert "; 0 of" not in said


def test_forks_share_their_beginning_and_leave_nothing(example, v1):
    said = example("forks.py", "Begin a story about a lighthouse.", "Make it sad.", "Make it funny.", "--max-tokens", 9)
    assert said.count("prompt tokens shared)") == 2
    assert "(0 of" not in said
    assert v1.get("/sessions").json()["data"] == []


def test_a_file_of_prompts_is_answered_in_order(example, tmp_path):
    tasks, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    lines = [{"id": number, "system": "Be brief. " * 9, "prompt": f"Count\u2028to {number}."} for number in range(3)]
    tasks.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), encoding="utf-8")
    arguments = (tasks, answers, "--max-tokens", 4, "--kv-memory", "64MiB")
    said = example("batch.py", *arguments, url=False)
    assert [json.loads(line)["id"] for line in answers.read_text(encoding="utf-8").splitlines()] == [0, 1, 2]
    assert "3 answers" in said
    assert "; 0 prompt" not in said
    tasks.write_text("{}\n")
    with pytest.raises(SystemExit, match="line 1 is no"):
        example("batch.py", *arguments, url=False)
    assert len(answers.read_text(encoding="utf-8").splitlines()) == 3


@pytest.mark.parametrize("paths", [["missing.jsonl", "answers.jsonl"], ["prompts.jsonl", "no/answers.jsonl"]])
def test_files_that_cannot_be_opened_cost_no_answers(example, tmp_path, paths):
    (tmp_path / "prompts.jsonl").write_text('{"id": 1, "prompt": "Hello"}\n')
    with pytest.raises(SystemExit, match=r"error: \[Errno 2\]"):
        example("batch.py", *(tmp_path / path for path in paths), url=False)


def test_what_a_server_refuses_is_one_line(example):
    with pytest.raises(SystemExit, match="chat template has no place for them"):
        example("agent.py", "What is 17 times 23?")
