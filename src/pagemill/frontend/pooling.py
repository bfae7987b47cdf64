"""What a caller gets for a prompt that is embedded, under vLLM's names."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pagemill.errors import PagemillError
from pagemill.frontend.request_state import RequestState


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding; empty where the request failed."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens whose K/V were found in the prefix cache."""
    finished: bool = True
    error: PagemillError | None = None
    """Why there is no embedding."""


def embedding_of(request: RequestState) -> EmbeddingRequestOutput:
    """Returns what a request has brought that asked for an embedding and has ended."""
    numbers = array("f", request.pooled or b"")
    return EmbeddingRequestOutput(
        request_id=request.request_id,
        outputs=EmbeddingOutput(numbers.tolist()),
        prompt_token_ids=request.prompt_token_ids,
        num_cached_tokens=request.num_cached_tokens,
        error=request.error,
    )
