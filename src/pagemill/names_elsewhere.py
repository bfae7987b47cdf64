"""Says what stands here for names that other engines have, where a likeness of names would mislead."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_IN_TEMPLATE = "give it in chat_template_kwargs"
_IN_CONFIGURATION = "give it in hf_overrides"

INSTEAD = {
    "cache_prompt": "every prompt is cached; leave it out",
    "cpu_kvcache_space": "give kv_memory, such as '8GiB'",
    "enable_thinking": _IN_TEMPLATE,
    "grammar": "give structured_outputs with a grammar",
    "guided_decoding_backend": "llguidance compiles every grammar; leave it out",
    "json_schema": "give response_format, or structured_outputs with json",
    "logprobs_mode": "log probabilities are the model's own, before any sampling parameter; leave it out",
    "max_log_len": "no text of any request is logged; leave it out",
    "max_logprobs": "each token has 20 log probabilities at most; leave it out",
    "n_predict": "give max_tokens",
    "n_threads": "give num_threads",
    "num_predict": "give max_tokens",
    "prompt_token_ids": 'give prompts={"prompt_token_ids": …}',
    "repeat_penalty": "give repetition_penalty",
    "repetition_detection": "give repetition_penalty, or stop",
    "rope_scaling": _IN_CONFIGURATION,
    "rope_theta": _IN_CONFIGURATION,
    "thinking": _IN_TEMPLATE,
    "thinking_token_budget": "reasoning counts among max_tokens; leave it out",
}
"""Ways out, by a name without dashes."""

PYTHON_NAMES = {
    "GuidedDecodingParams": "StructuredOutputsParams",
    "LLMEngine": "LLM, or AsyncLLM",
    "PoolingOutput": "EmbeddingOutput",
    "PoolingRequestOutput": "EmbeddingRequestOutput",
}
"""Names of pagemill, by vLLM's name for the same."""

MOST_SHOWN = 12
"""Known names that a message lists; of more, nobody would read the last."""


def way_out(name: str, known: Collection[str]) -> str:
    """Returns what to do instead of an argument that is not among the known ones."""
    if name in INSTEAD and name not in known:
        return INSTEAD[name]
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    return f"known arguments: {', '.join(known) or 'none'}" if len(known) <= MOST_SHOWN else "leave it out"
