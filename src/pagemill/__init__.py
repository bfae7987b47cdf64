"""pagemill: an LLM inference and serving engine with a virtual-memory system for the KV cache."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagemill.config import AsyncEngineArgs as AsyncEngineArgs
    from pagemill.config import EngineArgs as EngineArgs
    from pagemill.config import EngineConfig as EngineConfig
    from pagemill.draft_counts import DraftCounts as DraftCounts
    from pagemill.errors import PagemillError as PagemillError
    from pagemill.frontend.async_llm import AsyncLLM as AsyncLLM
    from pagemill.frontend.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from pagemill.frontend.input_processor import PromptType as PromptType
    from pagemill.frontend.input_processor import TextPrompt as TextPrompt
    from pagemill.frontend.input_processor import TokensPrompt as TokensPrompt
    from pagemill.frontend.llm import LLM as LLM
    from pagemill.frontend.outputs import BeamSearchOutput as BeamSearchOutput
    from pagemill.frontend.outputs import BeamSearchSequence as BeamSearchSequence
    from pagemill.frontend.outputs import CompletionOutput as CompletionOutput
    from pagemill.frontend.outputs import Logprob as Logprob
    from pagemill.frontend.outputs import RequestMetrics as RequestMetrics
    from pagemill.frontend.outputs import RequestOutput as RequestOutput
    from pagemill.frontend.pooling import EmbeddingOutput as EmbeddingOutput
    from pagemill.frontend.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from pagemill.lora_request import LoRARequest as LoRARequest
    from pagemill.sampling.params import BeamSearchParams as BeamSearchParams
    from pagemill.sampling.params import RequestOutputKind as RequestOutputKind
    from pagemill.sampling.params import SamplingParams as SamplingParams
    from pagemill.sampling.pooling_params import PoolingParams as PoolingParams
    from pagemill.sampling.structured import StructuredOutputsParams as StructuredOutputsParams
    from pagemill.tenant_limits import TenantLimits as TenantLimits

__version__ = "0.1.0"

# Torch's idle OpenMP threads would spin for milliseconds on cores where the kernels' own threads compute. OpenMP reads
# this when torch is imported; who imports torch first, or sets it, decides otherwise.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_HOMES = {
    "LLM": "pagemill.frontend.llm",
    "AsyncLLM": "pagemill.frontend.async_llm",
    "AsyncLLMEngine": "pagemill.frontend.async_llm",
    "BeamSearchOutput": "pagemill.frontend.outputs",
    "BeamSearchParams": "pagemill.sampling.params",
    "BeamSearchSequence": "pagemill.frontend.outputs",
    "CompletionOutput": "pagemill.frontend.outputs",
    "DraftCounts": "pagemill.draft_counts",
    "EmbeddingOutput": "pagemill.frontend.pooling",
    "EmbeddingRequestOutput": "pagemill.frontend.pooling",
    "AsyncEngineArgs": "pagemill.config",
    "EngineArgs": "pagemill.config",
    "EngineConfig": "pagemill.config",
    "LoRARequest": "pagemill.lora_request",
    "Logprob": "pagemill.frontend.outputs",
    "PagemillError": "pagemill.errors",
    "PoolingParams": "pagemill.sampling.pooling_params",
    "PromptType": "pagemill.frontend.input_processor",
    "RequestMetrics": "pagemill.frontend.outputs",
    "RequestOutput": "pagemill.frontend.outputs",
    "RequestOutputKind": "pagemill.sampling.params",
    "SamplingParams": "pagemill.sampling.params",
    "StructuredOutputsParams": "pagemill.sampling.structured",
    "TenantLimits": "pagemill.tenant_limits",
    "TextPrompt": "pagemill.frontend.input_processor",
    "TokensPrompt": "pagemill.frontend.input_processor",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Names are imported when they are first used: `import pagemill` itself costs nothing."""
    home = _HOMES.get(name)
    if home is None:
        from pagemill.names_elsewhere import PYTHON_NAMES

        if name in PYTHON_NAMES:
            raise ImportError(f"pagemill has no {name}; import {PYTHON_NAMES[name]} instead", name=name)
        raise AttributeError(f"module 'pagemill' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
