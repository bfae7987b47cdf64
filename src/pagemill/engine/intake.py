"""Intake: a front end's request as the scheduler takes it."""

from __future__ import annotations

from pagemill.engine.messages import EngineReady, EngineRequest
from pagemill.errors import PoolShrunkError
from pagemill.namespace import Namespace
from pagemill.scheduling.beam import row_params
from pagemill.scheduling.sequence import Pinning, Request


def scheduled(asked: EngineRequest, ready: EngineReady, *, seed: int, root: bytes, prepared: object = None) -> Request:
    """Returns the request that is scheduled. seed: where the parameters have none. root, prepared: see `Request`.

    Raises what `EngineReady.check_prompt_length` raises.
    """
    params, beam, prompt_len = asked.params, asked.beam, len(asked.prompt_token_ids)
    ready.check_prompt_length(prompt_len, answered=params.max_tokens != 0)
    pin = None
    if asked.pin is not None:
        pin = Pinning(asked.pin, Namespace(asked.tenant, asked.cache_salt), asked.pin_expires_s)
    return Request(
        request_id=asked.request_id,
        prompt_token_ids=asked.prompt_token_ids,
        params=params if beam is None else row_params(beam, len(ready.eos_token_ids)),
        seed=seed if params.seed is None else params.seed,
        priority=asked.priority,
        arrival_s=asked.arrival_s,
        root=root,
        max_len=_most_tokens(prompt_len, params.max_tokens, ready.max_model_len),
        beam=beam,
        pooling=asked.pooling,
        pin=pin,
        tenant=asked.tenant,
        in_session=asked.in_session,
        adapter=asked.adapter,
        answered=asked.answered,
        is_admitted=asked.is_admitted,
        prepared=prepared,
    )


def may_come_again(blocks: int, num_frames: int, at_start: int) -> PoolShrunkError:
    """Returns what to raise for a request that needs so many blocks, more than it can count on in a pool that has
    given its memory back for a while.

    num_frames, at_start: the pool's frames now, and those with which the request would fit.
    """
    needed = "1 KV block" if blocks == 1 else f"{blocks} KV blocks"
    return PoolShrunkError(
        f"this request needs {needed}, and the KV pool has {num_frames} of {at_start} now; try again later, or give "
        f"the pool its memory back (kv_memory)"
    )


def _most_tokens(prompt_len: int, max_tokens: int | None, limit: int) -> int:
    """Returns `Request.max_len` of a request."""
    if max_tokens is None:
        return limit
    return prompt_len + 1 if max_tokens == 0 else min(prompt_len + max_tokens, limit)
