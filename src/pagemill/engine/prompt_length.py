"""How long a prompt may be: asked where text becomes tokens, and by the engine of those who bring tokens to it."""

from __future__ import annotations

from pagemill.errors import EmptyPromptError, PromptTooLongError


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises `EmptyPromptError` for no token, `PromptTooLongError` where none is left for the answer."""
    if num_tokens == 0:
        raise EmptyPromptError("the prompt has no tokens; give it at least one", param="prompt")
    if num_tokens >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {num_tokens} tokens; max_model_len is {max_model_len}, and one must be for the answer; "
            f"shorten the prompt to {max_model_len - 1} tokens or raise max_model_len",
            param="prompt",
        )
