"""Forks over HTTP: an answer that begins as another one has come so far, and shares its KV blocks."""

from __future__ import annotations

from pagemill.frontend.async_llm import AsyncLLM
from pagemill.namespace import Namespace
from pagemill.sampling.params import BeamSearchParams, SamplingParams
from pagemill.server.generation import Generation
from pagemill.server.protocol import GenerationRequest
from pagemill.text.detokenizer import Detokenizer


async def fork(
    llm: AsyncLLM,
    request: GenerationRequest,
    params: SamplingParams | BeamSearchParams,
    request_id: str,
    tenant: str,
) -> tuple[Generation, str]:
    """What goes on from the running request `fork_of`, and the text that this has brought.

    Raises `RequestNotFoundError` for one of another namespace too, and what `AsyncLLM.fork` raises.
    """
    assert request.fork_of is not None
    tokenizer = await llm.tokenizer()
    origin = llm.running(request.fork_of, Namespace(tenant, request.cache_salt or ""))
    stream = await llm.fork(
        request.fork_of, params, request_id, index=request.fork_index or 0, priority=request.priority
    )
    prompt = origin.prompt_token_ids
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=request.skip_special_tokens is not False)
    return Generation.of([stream], request.n or 1), detokenizer.add(stream.prompt_token_ids[len(prompt) :])
