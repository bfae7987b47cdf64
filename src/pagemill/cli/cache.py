"""`pagemill cache`: the KV blocks that are kept on disk."""

from __future__ import annotations

import itertools
import os
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pagemill.cli.app import command_group
from pagemill.cli.help import HelpInSections
from pagemill.cli.listing import AsJson, print_listing
from pagemill.cli.out_file import check_out_file
from pagemill.cli.wording import ago, counted, printable
from pagemill.errors import KVStoreError
from pagemill.kvcache import store_archive
from pagemill.kvcache.disk_store import DiskStore
from pagemill.kvcache.store_format import default_root
from pagemill.memory.work import BlockName
from pagemill.namespace import Namespace

cache = command_group("List, check, shrink and carry KV blocks that are kept on disk.")
Root = Annotated[
    Path | None, typer.Option("--root", help="Folder of the stores. Default: kv in pagemill's cache folder.")
]
Key = Annotated[str, typer.Argument(metavar="STORE", help="The store's name, or how it begins; see pagemill cache ls.")]


@cache.command(cls=HelpInSections)
def ls(root: Root = None, as_json: AsJson = False) -> None:
    """List the stores: model, format, size, last use."""
    table = Table("store", "model", "KV", "kernels", "blocks", "size", "last used", box=None)
    rows: list[dict[str, Any]] = []
    broken = []
    for info in store_archive.list_stores(root or default_root()):
        if isinstance(info, store_archive.StoreInfo):
            age = "never" if not info.used_s else ago(time.time() - info.used_s)
            at, name = info.format, info.folder.name
            table.add_row(printable(name[:12]), printable(at.model), at.kv_format, at.numerics, f"{info.blocks:,}",
                          f"{info.bytes / 2**20:,.0f} MiB", age)  # fmt: skip
            rows.append(
                {"store": name, "model": at.model, "kv_format": at.kv_format, "numerics": at.numerics,
                 "blocks": info.blocks, "bytes": info.bytes, "used_s": info.used_s}
            )  # fmt: skip
        else:
            broken.append(info)
    if rows or as_json or not broken:
        print_listing(rows, table, f"no KV blocks are kept in {root or default_root()}", as_json)
    for error in broken:
        sys.stderr.write(f"error: {error}\n")


@cache.command(cls=HelpInSections)
def verify(store: Key, root: Root = None) -> None:
    """Read every block and check it; drop those that are broken."""
    with closing(store_archive.open_store(root or default_root(), store)) as opened:
        checked = list(track(opened.verify(), "Checking", total=opened.stats().blocks, console=Console(stderr=True)))
    dropped = sum(not held for _, _, held in checked)
    left = sum(held and not whole for _, whole, held in checked)
    sys.stdout.write(f"{counted(len(checked), 'block')} checked, {dropped:,} broken and dropped")
    sys.stdout.write(f", {left:,} broken and kept while another process writes: verify again\n" if left else "\n")
    if dropped or left:
        raise typer.Exit(1)


@cache.command(cls=HelpInSections)
def prune(
    store: Key,
    keep_mib: Annotated[int | None, typer.Option("--keep-mib", min=0, help="Keep at most this much.")] = None,
    unused_hours: Annotated[
        float | None, typer.Option("--unused-hours", min=0, help="Drop what was unused so long.")
    ] = None,
    root: Root = None,
) -> None:
    """Drop the blocks that were unused longest, and give the space back to the disk."""
    if keep_mib is None and unused_hours is None:
        raise typer.BadParameter("say what to drop: --keep-mib or --unused-hours")
    with closing(store_archive.open_store(root or default_root(), store)) as opened:
        dropped = opened.prune(
            keep_bytes=None if keep_mib is None else keep_mib << 20,
            unused_for_s=None if unused_hours is None else unused_hours * 3600,
        )
        left = opened.stats()
    sys.stdout.write(f"{counted(dropped, 'block')} dropped, {left.blocks:,} kept ({left.bytes / 2**20:,.0f} MiB)\n")


@cache.command(name="export", cls=HelpInSections)
def export_(
    store: Key,
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="File to write.")],
    pin_file: Annotated[
        Path | None,
        typer.Option(
            "--pin-file",
            help="Write the blocks of these prefixes and no others; a file as of pagemill serve --pin-file.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer", help="With --pin-file: the model, or a folder or file with its tokenizer, to read it."
        ),
    ] = None,
    root: Root = None,
) -> None:
    """Write a store's blocks, or those of chosen prefixes, to one file, for another machine. Only its owner may read
    it, as the store: who reads blocks can tell prompts from them."""
    if (pin_file is None) != (tokenizer is None):
        raise typer.BadParameter("--pin-file and --tokenizer go together: one names prefixes, the other reads them")
    check_out_file("ARCHIVE", archive)
    partial = archive.with_name(archive.name + ".partial")
    with closing(store_archive.open_store(root or default_root(), store)) as opened:
        chosen = None if pin_file is None or tokenizer is None else _blocks_of(pin_file, opened, tokenizer)
        try:
            with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                blocks = store_archive.export_store(opened, file, chosen)
            if chosen is not None and blocks < len(chosen):
                raise KVStoreError(
                    f"{len(chosen) - blocks:,} of these {len(chosen):,} blocks were broken, and have left the store; "
                    "warm the prefixes again, or export what is left of them"
                )
            partial.replace(archive)
        except OSError as error:
            raise KVStoreError(f"{archive} cannot be written: {error}") from error
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
    sys.stdout.write(f"{counted(blocks, 'block')} ({archive.stat().st_size / 2**20:,.0f} MiB) written to {archive}\n")


def _blocks_of(pin_file: Path, store: DiskStore, tokenizer: str) -> list[BlockName]:
    """Returns the stored blocks of a file's prefixes, each once, and prints how many of each there are.

    Raises `KVStoreError` where there is none, and what `read_pins` and reading with the tokenizer raise.
    """
    from pagemill.server.routes.pins import read_pins
    from pagemill.text.tokenizer import Tokenizer

    pins, size = read_pins(pin_file), store.format.block_size
    reader = Tokenizer.named(tokenizer)
    prefixes = [(Namespace(pin.tenant, pin.cache_salt), pin.token_ids(reader)) for pin in pins]
    found = store_archive.stored_prefixes(store, prefixes)
    lines = []
    for pin, (_, token_ids), names in zip(pins, prefixes, found, strict=True):
        if not names:
            raise KVStoreError(
                f"of the {len(token_ids):,} tokens of {pin.name!r}, none of the store's {store.stats().blocks:,} "
                f"blocks (of {size} tokens) holds any; warm it with pagemill serve --pin-file and --kv-disk-memory, "
                "which stores it when it ends, or check its tenant and cache_salt, and --tokenizer"
            )
        tokens = len({name.digest for name in names}) * size
        lines.append(f"{pin.name}: {len(names):,} blocks with {tokens:,} of its {len(token_ids):,} tokens\n")
    sys.stdout.write("".join(lines))
    return list(dict.fromkeys(itertools.chain(*found)))


@cache.command(name="import", cls=HelpInSections)
def import_(
    archive: Annotated[Path, typer.Argument(metavar="ARCHIVE", help="A file that pagemill cache export wrote.")],
    limit_mib: Annotated[
        int, typer.Option("--limit-mib", min=1, help="The most that the store may take, with what it has.")
    ] = 16384,
    root: Root = None,
) -> None:
    """Add the blocks of an exported file to this machine's store of the same model, as far as there is room. None that
    it has is dropped for them. Import only files that you trust: their checksums find damage, not malice."""
    try:
        with archive.open("rb") as file:
            blocks, new, left_out = store_archive.import_archive(root or default_root(), file, limit_mib << 20)
    except OSError as error:
        raise KVStoreError(f"{archive} cannot be read: {error}") from error
    sys.stdout.write(f"{counted(blocks, 'block')} read, {new:,} of them new\n")
    if left_out:
        sys.stderr.write(f"error: {counted(left_out, 'block')} did not fit into {limit_mib:,} MiB; raise --limit-mib\n")
        raise typer.Exit(1)
