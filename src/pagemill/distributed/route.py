"""Describes what the router is asked of a request, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pagemill.engine.messages import EngineReady, EngineRequest, name_in_memory, name_on_disk
from pagemill.memory.digest import extend_chain, namespace_root
from pagemill.namespace import Namespace


class Asked(NamedTuple):
    """Describes a request to the router.

    digests: names of the prompt's whole blocks, in order, where they are in memory. most_tokens: that its answer may
    have. session: a key that turns of one session share; None for no turn. on_disk: names of the same blocks where they
    are on disk; empty where nobody tells of a disk.
    """

    num_tokens: int
    digests: Sequence[bytes]
    most_tokens: int
    session: object = None
    on_disk: Sequence[bytes] = ()

    @classmethod
    def of(cls, asked: EngineRequest, come: Sequence[int], facts: EngineReady) -> Asked:
        """Describes a request to engines of such facts. come: tokens of its answer, which are computed as a prompt
        is."""
        tokens = [*asked.prompt_token_ids, *come]
        adapter = next((each.digest for each in facts.adapters if each.number == asked.adapter), b"")
        space = Namespace(asked.tenant, asked.cache_salt)
        root = namespace_root(space, facts.fingerprint, facts.kv_format_name, facts.numerics, adapter)
        digests: list[bytes] = []
        extend_chain(digests, root, tokens, facts.block_size)
        most = asked.params.max_tokens
        return cls(
            num_tokens=len(tokens),
            digests=[name_in_memory(digest) for digest in digests],
            most_tokens=(facts.max_model_len if most is None else most) * asked.params.n,
            session=(space, asked.session) if asked.session else None,
            on_disk=[name_on_disk(digest) for digest in digests] if facts.tells_disk else (),
        )


class Route(NamedTuple):
    """Names the replica that a request goes to, with the tokens of its prompt that are expected to be found there, and
    the seconds of work that it will find and bring.

    holder: another replica that holds more of its blocks, the first `held_blocks`; None if there is none.
    """

    replica: str
    found_tokens: int
    work_s: float
    holder: str | None = None
    held_blocks: int = 0
