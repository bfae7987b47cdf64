"""Sets up the engines that can be measured: pagemill by its defaults, each peer the fastest way known."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagemill.hub.registry import REGISTRY

MODEL = "smollm2-135m"
BLOCK_ELEMENTS = 30 * 2 * 3 * 64 * 16
"""Keys and values of 16 tokens in MODEL: 30 layers, 3 KV heads of 64."""
PEERS = Path.home() / ".cache/pagemill/peers"
"""One environment per peer, and the model in the peers' formats; nothing of it in the repository."""
QUANTIZED = "4-bit GGUF, int8"
"""The precision of engines that keep the GGUF's weights as they are."""
CHECKPOINT = PEERS / "models" / MODEL / "checkpoint"
"""The GGUF's weights as a Hugging Face folder in float32, for vLLM and transformers."""
OPENVINO_MODEL = PEERS / "models" / MODEL / "openvino"
"""The GGUF in OpenVINO's format, still 4-bit."""


@dataclass(frozen=True)
class EngineSetup:
    """Says how an engine is run.

    adapter: a file `adapters/ADAPTER_engine.py`.
    environment: a folder in `PEERS`; None is pagemill's own.
    """

    adapter: str
    environment: str | None
    precision: str
    settings: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables of its process."""

    @property
    def runs_any_gguf(self) -> bool:
        """Returns whether it needs no other form of a model, as is made when peers are installed."""
        return self.adapter in ("pagemill", "llamacpp")

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.environment is None else PEERS / self.environment / "bin/python"


def _vllm(dtype: str, **settings: Any) -> EngineSetup:
    return EngineSetup("vllm", "vllm", dtype, {"dtype": dtype, **settings})


def _openvino(**properties: Any) -> EngineSetup:
    scheduler = {"cache_size": 4, "enable_prefix_caching": True}
    return EngineSetup("openvino", "openvino", QUANTIZED, {"scheduler": scheduler, "properties": properties})


LLAMACPP = {"n_seq_max": 32, "n_batch": 512, "n_ubatch": 512, "n_ctx": 1 << 16}

SMALL_KV = {"dtype": "float32", "kv_memory": "512MiB", "max_model_len": 2048, "kv_compaction": "off"}
"""Half of what the requests of mixed fill together, and five times `max_model_len`."""

ENGINES = {
    "pagemill": EngineSetup("pagemill", None, "float32", {"dtype": "float32"}),
    "pagemill-bf16": EngineSetup("pagemill", None, "bfloat16", {"dtype": "bfloat16"}),
    "pagemill-gguf": EngineSetup("pagemill", None, QUANTIZED, {"dtype": "bfloat16", "quantization": "gguf"}),
    # What paging itself brings: the same kernels and the same KV memory, paged and reserved for each request.
    "pagemill-512MiB": EngineSetup("pagemill", None, "float32, 512 MiB of KV memory", SMALL_KV),
    "pagemill-contiguous": EngineSetup("pagemill_contiguous", None, "float32, 512 MiB of KV memory", SMALL_KV),
    "vllm": _vllm("float32", enforce_eager=True),
    # Without a process of its own for the engine core: two cores may have better things to do than to pass messages.
    "vllm-one-process": replace(
        _vllm("float32", enforce_eager=True), variables={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    ),
    "vllm-bf16": _vllm("bfloat16", enforce_eager=True),
    "vllm-bf16-compiled": _vllm("bfloat16"),
    "openvino": _openvino(),
    "openvino-f32": _openvino(INFERENCE_PRECISION_HINT="f32"),
    # The cache cut into one part of 2,048 tokens per sequence, too short for long; and one for all sequences together.
    "llamacpp": EngineSetup("llamacpp", "llamacpp", QUANTIZED, {"context": LLAMACPP}),
    "llamacpp-unified": EngineSetup("llamacpp", "llamacpp", QUANTIZED, {"context": LLAMACPP | {"kv_unified": True}}),
    # 256 pages of 256 tokens: room for every workload. By default it takes most of the machine's memory, and is slower.
    "transformers": EngineSetup(
        "transformers", "transformers", "float32", {"dtype": "float32", "batching": {"num_blocks": 256}}
    ),
    "transformers-static": EngineSetup(
        "transformers_static", "transformers", "float32", {"dtype": "float32", "batch_size": 16}
    ),
    "transformers-static-bf16": EngineSetup(
        "transformers_static", "transformers", "bfloat16", {"dtype": "bfloat16", "batch_size": 16}
    ),
}


def model_paths(gguf: Path | None = None) -> dict[str, str]:
    """Returns the model's name and its files by form. gguf: another model's."""
    if gguf is not None:
        return {"name": gguf.stem, "gguf": str(gguf.resolve())}
    return {"name": MODEL, "gguf": str(REGISTRY[MODEL].file), "checkpoint": str(CHECKPOINT),
            "openvino": str(OPENVINO_MODEL)}  # fmt: skip


def process_environment(setup: EngineSetup) -> dict[str, str]:
    """Returns variables for the engine's process: all of the machine's cores, no other tuning but vLLM's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "VLLM_"))}
    environment["HF_HUB_OFFLINE"] = "1"
    if setup.environment == "vllm":
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        libraries = [PEERS / "vllm/lib/libiomp5.so", *(PEERS / "vllm").glob("tcmalloc/**/libtcmalloc_minimal.so.4")]
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": cpus,
            "VLLM_CPU_KVCACHE_SPACE": "4",
            "VLLM_NO_USAGE_STATS": "1",
            "LD_PRELOAD": ":".join(str(library) for library in libraries if library.exists()),
        }
    return environment | setup.variables
