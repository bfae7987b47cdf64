"""How blocks lie in a folder that several machines share: a file each, whose path there is the block's name.

`<tenant's folder>/<first byte of the digest>/<digest>-<parent>-<layer group>-<depth>`. A path is a text: a folder may
hold millions of blocks, and texts cost little to compare, and nothing when garbage is collected.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from pathlib import Path

from pagemill.memory.work import BlockName

TENANT_FILE = "tenant"
"""Says in a tenant's folder whose it is."""
_FOLDER_DIGITS = 24
TENANT_FOLDER, SHARD = re.compile(f"[0-9a-f]{{{_FOLDER_DIGITS}}}"), re.compile("[0-9a-f]{2}")

MOST_DEEP = (1 << 32) - 1
"""The largest depth that a block's header holds."""

Block = tuple[bytes, int]


def folder_of(tenant: str) -> str:
    """Returns the name of the folder of a tenant's blocks."""
    return hashlib.sha256(tenant.encode()).hexdigest()[:_FOLDER_DIGITS]


def path_of(name: BlockName) -> str:
    digest = name.digest.hex()
    return f"{folder_of(name.tenant)}/{digest[:2]}/{digest}-{name.parent.hex()}-{name.group}-{name.depth}"


def tenant_folder(path: str) -> str:
    """Returns the name of the folder of the tenant whose block this is."""
    return path[:_FOLDER_DIGITS]


def shard_of(path: str) -> str:
    """Returns the path of the folder that a block lies in."""
    return path.rpartition("/")[0]


def name_at(path: str, tenant: str) -> BlockName | None:
    """Returns the name of the block in a file of this path; None for other files."""
    try:
        digest, parent, group, depth = path.rpartition("/")[2].split("-")
        found = BlockName(bytes.fromhex(digest), int(group), bytes.fromhex(parent), int(depth), tenant)
    except ValueError:
        return None
    return found if 0 <= found.depth <= MOST_DEEP else None


def write_whole(path: Path, parts: list[bytes], used_s: float) -> None:
    """Lets a file appear with all of its content, by being renamed. Raises OSError."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.unfinished")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.writelines(parts)
        os.utime(unfinished, (used_s, used_s))
        unfinished.rename(path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
