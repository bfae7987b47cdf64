"""Stores carried between machines, and listed, by hand and from the command line."""

import io
import json
import re
from dataclasses import asdict, replace

import pytest
from disk_blocks import FORMAT, RECORD, content, read, store_of, write
from typer.testing import CliRunner

from pagemill.cli.cache import cache
from pagemill.errors import KVStoreError
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_archive import export_store, import_archive, list_stores, stored_prefixes
from pagemill.memory.digest import extend_chain, root_digest
from pagemill.memory.work import BlockName
from pagemill.namespace import Namespace


def named(data: bytes) -> io.BytesIO:
    file = io.BytesIO(data)
    file.name = "archive"  # type: ignore[attr-defined]
    return file


def archive_of(path, blocks: int) -> bytes:
    store = store_of(path)
    write(store, range(blocks))
    file = io.BytesIO()
    assert export_store(store, file) == blocks
    store.close()
    return file.getvalue()


def test_what_is_exported_is_found_elsewhere(tmp_path):
    data = archive_of(tmp_path / "here", 40)
    there = store_of(tmp_path / "there")
    write(there, range(35, 50))
    assert import_archive(tmp_path / "there", named(data), 1 << 30) == (40, 35, 0)
    assert read(there, list(range(60))) == list(range(50))


def test_an_import_evicts_nothing_and_leaves_out_the_ends_of_chains(tmp_path):
    data = archive_of(tmp_path / "here", 40)
    there = store_of(tmp_path / "there")
    write(there, range(35, 50))
    there.close()
    assert import_archive(tmp_path / "there", named(data), 30 * 8192 + 5) == (40, 15, 20)
    kept = [*range(15), *range(35, 50)]
    assert read(store_of(tmp_path / "there"), range(50)) == kept
    assert import_archive(tmp_path / "there", named(data), 8192) == (40, 0, 20)
    assert read(store_of(tmp_path / "there"), range(50)) == kept


@pytest.mark.parametrize("batch", [1, 100 * 8192])
def test_what_does_not_fit_into_an_empty_store_leaves_the_beginning(tmp_path, monkeypatch, batch):
    monkeypatch.setattr("pagemill.kvcache.store_archive._BATCH_BYTES", batch)
    data = archive_of(tmp_path / "here", 40)
    assert import_archive(tmp_path / "there", named(data), 12 * 8192) == (40, 12, 28)
    assert read(store_of(tmp_path / "there"), range(40)) == list(range(12))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 9},
        {"version": True},
        {"record_bytes": "abc"},
        {"record_bytes": 0},
        {"record_bytes": 10**15},
        {"record_bytes": RECORD + 1},
        {"fingerprint": "x"},
        {"kv_format": "float32"},
        {"kv_format": "float32,0"},
        {"model": None},
        {"more": 1},
    ],
)
def test_a_bad_header_is_an_error_and_leaves_no_folder(tmp_path, change):
    head = json.dumps(asdict(FORMAT) | change).encode()
    data = archive_of(tmp_path / "here", 3).replace(FORMAT.to_json().encode(), head)
    with pytest.raises(KVStoreError, match=r"names no format|is broken"):
        import_archive(tmp_path / "there", named(data), 1 << 30)
    assert not (tmp_path / "there").exists()


def test_a_header_without_end_is_an_error(tmp_path):
    with pytest.raises(KVStoreError, match="names no format"):
        import_archive(tmp_path / "there", named(b"pagemill KV archive 1\n" + b"[" * 100_000), 1 << 30)


@pytest.fixture
def chain():
    """Tokens of the tenant acme, the roots and digests of their 8 blocks, and the names of these in two groups."""
    tokens = list(range(130))
    root = root_digest(bytes.fromhex(FORMAT.fingerprint), FORMAT.kv_format, FORMAT.numerics, str(Namespace("acme")))
    extend_chain(digests := [], root, tokens, 16)
    parents = [root, *digests]
    return tokens, [BlockName(digests[i], group, parents[i], i) for i in range(8) for group in range(2)]


def found(store: DiskStore, *prefixes) -> list[list[BlockName]]:
    return stored_prefixes(store, [*prefixes, (Namespace("default"), prefixes[0][1]), (Namespace("acme"), [-1] * 16)])


def test_a_stored_prefix_ends_where_a_layer_group_lacks_a_block(tmp_path, chain):
    acme, (tokens, names) = Namespace("acme"), chain
    store = DiskStore(tmp_path, FORMAT, 1 << 20, [None, None])
    assert found(store, (acme, tokens), (acme, tokens[:31])) == [[], [], [], []]
    lacking = names[5]
    store.write([name for name in names if name != lacking], [content(i) for i in range(15)])
    assert found(store, (acme, tokens), (acme, tokens[:31])) == [names[:4], names[:2], [], []]
    store.close()


@pytest.mark.parametrize("windows", [[None, 33], [33, None]])
def test_of_a_group_with_a_window_a_stored_prefix_needs_what_the_next_token_sees(tmp_path, chain, windows):
    """It sees 32 tokens before it, two blocks; the others go first where a disk fills up."""
    acme, (tokens, names) = Namespace("acme"), chain
    windowed = windows.index(33)
    held = [name for name in names if name.group != windowed or name.depth in (3, 4, 6)]
    store = DiskStore(tmp_path, FORMAT, 1 << 20, windows)
    store.write(held, [content(i) for i in range(len(held))])
    whole = [name for name in held if name.depth < 5]
    assert found(store, (acme, tokens), (acme, tokens[:79])) == [whole, [], [], []]
    store.close()
    again = store_of(tmp_path)
    assert again.windows == windows
    assert found(again, (acme, tokens)) == [whole, [], []]
    again.close()


def test_of_a_store_that_no_engine_has_opened_a_prefix_reaches_as_far_as_one_group(tmp_path, chain):
    acme, (tokens, names) = Namespace("acme"), chain
    held = [name for name in names if name.depth < 6 and (name.group == 1 or name.depth > 3)]
    store = store_of(tmp_path)
    store.write(held, [content(i) for i in range(len(held))])
    assert store.windows is None
    assert found(store, (acme, tokens)) == [held, [], []]
    store.close()


def test_a_broken_archive_is_refused_and_what_came_before_is_kept(tmp_path):
    data = archive_of(tmp_path / "here", 10)
    with pytest.raises(KVStoreError, match="no KV archive"):
        import_archive(tmp_path / "there", named(b"x" + data), 1 << 30)
    with pytest.raises(KVStoreError, match="names no format"):
        import_archive(tmp_path / "there", named(data.replace(b'"model"', b'"modem"')), 1 << 30)
    with pytest.raises(KVStoreError, match="after 6 whole ones"):
        import_archive(tmp_path / "there", named(data[: -3 * 8192 - 5]), 1 << 30)
    assert read(store_of(tmp_path / "there"), list(range(10))) == list(range(6))
    flipped = bytearray(data)
    flipped[-1] ^= 1
    with pytest.raises(KVStoreError, match="is broken"):
        import_archive(tmp_path / "elsewhere", named(bytes(flipped)), 1 << 30)


@pytest.fixture
def run(tmp_path):
    """Runs `pagemill cache` on the stores in tmp_path / "kv"; gives what it printed, or the error."""

    def run(*args: str, fails: bool = False) -> str:
        result = CliRunner().invoke(cache, [*args, "--root", str(tmp_path / "kv")])
        assert (result.exit_code != 0) == fails, result.output
        if isinstance(result.exception, KVStoreError):
            return str(result.exception)
        return result.output

    return run


def test_the_command_line_lists_checks_shrinks_and_carries(tmp_path, run):
    assert "no KV blocks" in run("ls")
    store = store_of(tmp_path / "kv")
    write(store, range(20))
    key = store.folder.name
    assert re.search(rf"{key[:12]} +test +float32,16 +reference +20 +0 MiB +[0-9]+ s ago", run("ls"))
    assert "20 blocks checked, 0 broken" in run("verify", key[:6])
    assert "20 blocks" in run("export", key, str(tmp_path / "file"))
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    with (store.folder / "blocks.dat").open("r+b") as file:
        file.seek(8191)
        byte = file.read(1)[0]
        file.seek(8191)
        file.write(bytes([byte ^ 1]))
    assert "20 blocks checked, 1 broken" in run("verify", key, fails=True)
    assert "say what to drop" in run("prune", key, fails=True)
    assert "19 blocks dropped, 0 kept" in run("prune", key, "--keep-mib", "0")
    assert "20 blocks read, 20 of them new" in run("import", str(tmp_path / "file"))
    assert "begins with 'zz'" in run("verify", "zz", fails=True)
    (store.folder / "index.sqlite").write_bytes(b"garbage" * 1000)
    assert [type(info) for info in list_stores(tmp_path / "kv")] == [KVStoreError] or run("ls")


def test_what_does_not_fit_is_told(tmp_path, run):
    (tmp_path / "file").write_bytes(archive_of(tmp_path / "here", 130))
    said = run("import", str(tmp_path / "file"), "--limit-mib", "1", fails=True)
    assert "130 blocks read, 128 of them new" in said
    assert "2 blocks did not fit into 1 MiB; raise --limit-mib" in said
    assert "130 blocks read, 2 of them new" in run("import", str(tmp_path / "file"))


def test_hours_below_none_are_refused(tmp_path, run):
    store = store_of(tmp_path / "kv")
    write(store, range(20))
    run("prune", "", "--unused-hours", "-5", fails=True)
    assert store.stats().blocks == 20


def test_whole_columns_are_listed_for_who_is_no_terminal(tmp_path, run):
    format = replace(FORMAT, model="a model with a long name " * 5 + "[/and] brackets", numerics="kernels-" * 20)
    DiskStore(tmp_path / "kv", format, 1 << 20).close()
    line = run("ls").splitlines()[1]
    assert format.model in line
    assert format.numerics in line


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "blocks.dat").unlink(), "has lost its blocks.dat.*remove the folder"),
        (lambda folder: (folder / "index.sqlite").unlink(), "cannot be read.*an engine with the store's model"),
        (
            lambda folder: (folder / "index.sqlite").write_bytes(b"garbage" * 1000),
            "cannot be read.*an engine with the store's model",
        ),
        (
            lambda folder: folder.rename(folder.with_name("moved")),
            rf"holds blocks of test \(weights abababab…\) in float32,16 .*; rename it {FORMAT.key}",
        ),
    ],
)
def test_a_damaged_store_is_named_with_the_way_to_mend_it(tmp_path, run, damage, words):
    store = store_of(tmp_path / "kv")
    write(store, range(20))
    store.close()
    damage(store.folder)
    assert re.search(words, run("ls"))
    for command in (["verify", ""], ["export", "", str(tmp_path / "file")], ["prune", "", "--keep-mib", "0"]):
        assert re.search(words, run(*command, fails=True))
    assert len(list((tmp_path / "kv").iterdir())) == 1
