"""What `LLM.pin` and `AsyncLLM.pin` have in common: the request that computes a prefix, and the pin that it became."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pagemill.engine.input_processor import InputProcessor, ProcessedInput, Prompt
from pagemill.engine.messages import PinInfo
from pagemill.errors import InvalidRequestError, PinNotFoundError
from pagemill.namespace import Namespace
from pagemill.sampling.params import SamplingParams

MAX_NAME = 128


def pin_request(
    inputs: InputProcessor,
    prompt: Prompt,
    request_id: str,
    name: str,
    expires_s: float | None,
    cache_salt: str,
    tenant: str,
) -> ProcessedInput:
    """A request for the prompt's whole blocks. Raises `InvalidRequestError` children."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or "/" in name:
        raise InvalidRequestError(
            f"the pin's name is {name!r:.140}; it must be 1 to {MAX_NAME} characters without a slash", param="name"
        )
    is_number = isinstance(expires_s, (int, float)) and not isinstance(expires_s, bool)
    if expires_s is not None and not (is_number and 0 < expires_s < math.inf):
        raise InvalidRequestError(
            f"expires_s is {expires_s!r}; it must be above 0 seconds, or None to keep the pin", param="expires_s"
        )
    if cache_salt:
        prompt = _salted(prompt, cache_salt)
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    item = inputs.process(prompt, params, request_id, tenant=tenant)
    request, size = item.request, inputs.ready.block_size
    whole = len(request.prompt_token_ids) // size * size
    if not whole:
        raise InvalidRequestError(
            f"pin {name!r} has {len(request.prompt_token_ids)} tokens; blocks are shared whole, so pin {size} at least",
            param="prompt",
        )
    request.prompt_token_ids = request.prompt_token_ids[:whole]
    request.pin, request.pin_expires_s = name, expires_s
    return item


def _salted(prompt: Prompt, cache_salt: str) -> Prompt:
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": cache_salt}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": cache_salt}


def pin_of(pins: Sequence[PinInfo], name: str, space: Namespace) -> PinInfo:
    """Raises `PinNotFoundError` if it has gone since it was made."""
    for pin in pins:
        if (pin.tenant, pin.cache_salt, pin.name) == (*space, name):
            return pin
    raise PinNotFoundError(f"pin {name!r} has expired, or was unpinned, as soon as it was computed", param="name")
