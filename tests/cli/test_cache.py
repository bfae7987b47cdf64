"""`pagemill cache export --pin-file` on the default model: chosen prefixes go to another machine, and nothing else."""

import json
import re
import shutil

import pytest
from typer.testing import CliRunner

from harness import FRAME_BYTES
from pagemill import LLM, SamplingParams
from pagemill.cli.cache import cache
from pagemill.errors import ConfigError, KVStoreError, PagemillError
from pagemill.kvcache.store_archive import open_store
from pagemill.kvcache.store_format import Slots, StoreFormat, name_in

MODEL = "smollm2-135m"
SETTINGS = {"dtype": "float32", "max_model_len": 512, "kv_memory": 60 * FRAME_BYTES, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
SYSTEM = {"role": "system", "content": "You are a patient teacher of astronomy. " * 8}
CHAT = [SYSTEM, {"role": "user", "content": "Why is the sky dark at night, and blue by day? " * 4}]
STORY = "Once upon a time there was a lighthouse at the end of the world. " * 6
SECRET = "The vault opens to whoever knows that the third stone is loose. " * 6
PINS = [
    {"name": "teacher", "messages": [SYSTEM]},
    {"name": "story", "prompt": STORY, "cache_salt": "mine", "tenant": "acme", "expires_s": 5},
    {"name": "teacher, begun", "messages": [{**SYSTEM, "content": SYSTEM["content"][:160]}]},
]


def ask(root) -> list[tuple[list[int], int]]:
    """Token ids and how many tokens were cached, of the chat, the story and the secret.
    Of one engine, which loads what it finds until it has timed two loads."""
    with LLM(MODEL, kv_disk_memory="1GiB", kv_disk_path=str(root), tenants={"acme": {}}, **SETTINGS) as llm:
        outputs = llm.chat(CHAT, GREEDY, use_tqdm=False)
        story = {"prompt": STORY + "Its keeper", "cache_salt": "mine"}
        outputs += llm.generate(story, GREEDY, use_tqdm=False, tenant="acme")
        outputs += llm.generate(SECRET, GREEDY, use_tqdm=False)
        return [(list(output.outputs[0].token_ids), output.num_cached_tokens) for output in outputs]


@pytest.fixture(scope="module")
def warmed(tmp_path_factory):
    """A root with one store, in which all three prompts are, and their answers."""
    root = tmp_path_factory.mktemp("kv")
    return root, [tokens for tokens, _ in ask(root)]


def run(root, *args: object) -> str | PagemillError:
    """What it printed, or the error that it would have printed."""
    result = CliRunner().invoke(cache, [*map(str, args), "--root", str(root)])
    if isinstance(result.exception, PagemillError):
        return result.exception
    assert result.exit_code == 0, result.output
    return result.output


def export(archive, pins) -> list[object]:
    """Of the only store there is."""
    path = archive.with_name("pins.json")
    path.write_text(json.dumps(pins))
    return ["export", "", archive, "--pin-file", path, "--tokenizer", MODEL]


def slots_of(archive) -> list[bytes]:
    _, at, data = archive.read_bytes().split(b"\n", 2)
    size = Slots(StoreFormat.from_json(at.decode()).record_bytes).nbytes
    assert len(data) % size == 0
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def test_what_a_pin_file_names_goes_to_another_machine_and_nothing_else(warmed, tmp_path):
    root, answers = warmed
    archive = tmp_path / "archive"
    said = run(root, *export(archive, PINS))
    counts = [tuple(map(int, row)) for row in re.findall(r": (\d+) blocks with (\d+) of its (\d+) tokens", said)]
    assert [tokens for _, tokens, _ in counts] == [blocks * 16 for blocks, _, _ in counts]
    assert [tokens for _, tokens, _ in counts[:2]] == [length // 16 * 16 for *_, length in counts[:2]]
    (teacher, _, _), (story, _, _), (begun, _, _) = counts
    assert teacher > begun > 0
    assert f"{teacher + story:,} blocks" in said.splitlines()[-1]

    store = open_store(root, "")
    exported, data = {name_in(slot)[:2] for slot in slots_of(archive)}, archive.read_bytes()
    assert len(exported) == len(slots_of(archive)) == teacher + story
    others = [name for name in store.names() if name[:2] not in exported]
    assert len(others) > 5
    assert not any(image in data for image in store.images(others))
    assert not any(name.digest in data for name in others)
    store.close()

    assert (
        run(tmp_path / "there", "import", archive) == f"{teacher + story} blocks read, {teacher + story} of them new\n"
    )
    assert ask(tmp_path / "there") == list(zip(answers, [16 * teacher, 16 * story, 0], strict=True))


@pytest.mark.parametrize(
    ("pins", "error", "words"),
    [
        (
            [{**PINS[1], "tenant": "default"}],
            KVStoreError,
            r"tokens of 'story', none of the store's \d+ blocks .* check",
        ),
        ([PINS[0], {"name": "short", "prompt": "Once upon"}], KVStoreError, "the 2 tokens of 'short'"),
        ([{"name": "ids", "prompt": [-1] * 40}], KVStoreError, "the 40 tokens of 'ids'"),
        ([{"name": "no prompt"}], PagemillError, "neither a prompt nor messages"),
        ([{"prompt": "no name"}], ConfigError, "entry 0.name is missing"),
    ],
)
def test_a_prefix_that_is_not_there_is_an_error_and_writes_nothing(warmed, tmp_path, pins, error, words):
    refused = run(warmed[0], *export(tmp_path / "archive", pins))
    assert isinstance(refused, error)
    assert re.search(words, str(refused))
    assert [path.name for path in tmp_path.iterdir()] == ["pins.json"]


def test_prefixes_need_a_tokenizer_to_read_them(warmed, tmp_path):
    for half in (["--tokenizer", MODEL], ["--pin-file", "pins.json"]):
        usage = CliRunner().invoke(cache, ["export", "", str(tmp_path / "file"), *half, "--root", str(warmed[0])])
        assert usage.exit_code == 2
        assert "go together" in usage.output


def test_a_broken_block_of_a_prefix_is_told_and_ends_what_is_left_of_it(warmed, tmp_path):
    root = shutil.copytree(warmed[0], tmp_path / "kv")
    archive = tmp_path / "archive"
    story = export(archive, PINS[1:2])
    blocks = int(re.search(r"story: (\d+) blocks", run(root, *story))[1])
    third = slots_of(archive)[2]
    archive.unlink()
    (kept,) = root.glob("*/blocks.dat")
    data = kept.read_bytes()
    kept.write_bytes(data.replace(third, third[:-1] + bytes([third[-1] ^ 1])))
    assert f"1 of these {blocks} blocks were broken" in str(run(root, *story))
    assert not archive.exists()
    assert "story: 2 blocks with 32 of its" in run(root, *story)
