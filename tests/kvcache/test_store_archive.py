"""Stores carried between machines, and listed, by hand and from the command line."""

import io
import re

import pytest
from disk_blocks import FORMAT, content, read, store_of, write
from typer.testing import CliRunner

from pagemill.cli.cache import cache
from pagemill.errors import KVStoreError
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
    assert import_archive(tmp_path / "there", named(data), 1 << 30) == (40, 35)
    assert read(there, list(range(60))) == list(range(50))


def test_a_stored_prefix_ends_where_a_layer_group_lacks_a_block(tmp_path):
    acme, tokens = Namespace("acme"), list(range(70))
    chain = [root_digest(bytes.fromhex(FORMAT.fingerprint), FORMAT.kv_format, FORMAT.numerics, str(acme))]
    extend_chain(digests := [], chain[0], tokens, 16)
    chain += digests
    names = [BlockName(chain[i + 1], group, chain[i], i) for i in range(4) for group in range(2)]
    store = store_of(tmp_path)
    prefixes = [(acme, tokens), (acme, tokens[:31]), (Namespace("default"), tokens), (acme, [-1] * 16)]
    assert stored_prefixes(store, prefixes) == [[], [], [], []]
    lacking = names[5]
    store.write([name for name in names if name != lacking], [content(i) for i in range(7)])
    assert stored_prefixes(store, prefixes) == [names[:4], names[:2], [], []]
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


def test_the_command_line_lists_checks_shrinks_and_carries(tmp_path):
    def run(*args: str, fails: bool = False) -> str:
        result = CliRunner().invoke(cache, [*args, "--root", str(tmp_path / "kv")], env={"COLUMNS": "200"})
        assert (result.exit_code != 0) == fails, result.output
        if isinstance(result.exception, KVStoreError):
            return str(result.exception)
        return result.output

    assert "no KV blocks" in run("ls")
    store = store_of(tmp_path / "kv")
    write(store, range(20))
    key = store.folder.name
    assert re.search(rf"{key[:12]} +test +float32,16 +reference +20 +0 MiB +0.0 h ago", run("ls"))
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
    assert "begin with 'zz'" in run("verify", "zz", fails=True)
    (store.folder / "index.sqlite").write_bytes(b"garbage" * 1000)
    assert [type(info) for info in list_stores(tmp_path / "kv")] == [KVStoreError] or run("ls")
