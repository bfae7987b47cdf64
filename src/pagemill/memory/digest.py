"""Digests: names for the content of a block, chained, so that one names the whole prefix that it ends.

They name blocks on disk and on other machines too, so their bytes are specified here and versioned. Version 1:

    field(x)   = length of x in bytes as little-endian uint32, then x; strings are UTF-8
    root       = SHA-256("pagemill-kv-1" field(fingerprint) field(kv_format) field(numerics) field(namespace))
    digest 0   = SHA-256(root, tokens of block 0)
    digest i   = SHA-256(digest i-1, tokens of block i)       tokens as little-endian uint32, block_size of them

Two blocks have equal digests only if model, format, numerics, namespace and all tokens up to the block's end are equal;
different groups' blocks of the same tokens share a digest.

    namespace  = length of the tenant's name in characters ":" name, then cache_salt, as strings
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from pagemill.namespace import Namespace

VERSION = b"pagemill-kv-1"
TOKEN_BYTES = 4


def root_digest(fingerprint: bytes, kv_format: str, numerics: str, namespace: str) -> bytes:
    """Returns the digest (32 bytes) in which a chain begins.

    It names all that K and V depend on besides tokens, and who may find them.

    fingerprint: of the model's weights and configuration, then the digest of the adapter if there is one.
    kv_format: dtype, layout and block size.
    numerics: names of the kernels (equal names give equal bits). namespace: see above.
    """
    root = hashlib.sha256(VERSION)
    for field in (fingerprint, kv_format.encode(), numerics.encode(), namespace.encode()):
        root.update(struct.pack("<I", len(field)))
        root.update(field)
    return root.digest()


def namespace_root(space: Namespace, fingerprint: bytes, kv_format: str, numerics: str, adapter: bytes = b"") -> bytes:
    """Returns the digest (32 bytes) in which the chains of a namespace's requests begin, see `root_digest`.

    fingerprint: of the model's weights and configuration. adapter: the digest of the requests' adapter; empty for none.
    """
    return root_digest(fingerprint + adapter, kv_format, numerics, str(space))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Returns token ids as little-endian uint32. Raises struct.error for ids that do not fit."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def extend_chain(digests: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Appends the digests (32 bytes each) of all full blocks of `token_ids` that `digests` does not reach yet."""
    begin, end = len(digests) * block_size, len(token_ids) // block_size * block_size
    if begin >= end:
        return
    packed = pack_tokens(token_ids[begin:end])
    stride = block_size * TOKEN_BYTES
    sha256 = hashlib.sha256
    digest = digests[-1] if digests else root
    for start in range(0, len(packed), stride):
        digest = sha256(digest + packed[start : start + stride]).digest()
        digests.append(digest)
