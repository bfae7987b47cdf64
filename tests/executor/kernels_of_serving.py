"""Serves requests without a GPU, by Triton kernels that are started and do nothing, and prints those that have to be
compiled once requests have come: the warm-up should have seen to that.

PYTHONPATH=tests python tests/executor/kernels_of_serving.py [CASE ...], without TRITON_INTERPRET
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from checked_device import CheckedDevice
from late import Late
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from core.drive import request
from models.small_llama import save_llama
from pagemill.attention.triton_backend import TritonAttention
from pagemill.config import EngineConfig
from pagemill.executor import graphs
from pagemill.executor.backend import torch_backend
from pagemill.executor.load import open_executor
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.ops.triton_quantized import TritonQuantizedOps
from pagemill.sampling.params import SamplingParams
from pagemill.sampling.triton_sampling import TritonSamplingKernels
from parity import random_models

CAPABILITY = (9, 0)
SIZES = {
    "vocab_size": 5000, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
}  # fmt: skip
SETTINGS = {
    "max_model_len": 2048, "max_num_batched_tokens": 512, "max_num_seqs": 24, "kv_memory": "24MiB",
    "target_tpot_ms": "off", "dtype": "bfloat16", "hf_overrides": {"max_position_embeddings": 2048},
}  # fmt: skip
KINDS = [
    {"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.9, "top_p": 0.8}, {"temperature": 0.9, "top_k": 9},
    {"temperature": 0.0, "logprobs": 2}, {"temperature": 0.7, "repetition_penalty": 1.2}, {"temperature": 0.8, "n": 3},
    {"temperature": 0.9, "top_k": 4, "logprobs": 1}, {"temperature": 0.0, "bad_words": []},
]  # fmt: skip
RESULTS = {"output", "y", "tokens"}
"""Arguments that kernels fill."""


@dataclass
class Started:
    """Holds what has been started: kernels, with what they are compiled for."""

    kernels: dict[str, set[str]] = field(default_factory=dict)
    times: int = 0

    @contextmanager
    def noting(self) -> Any:
        target = GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)
        device = SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda _: 0, get_current_target=lambda: target
        )

        def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            arguments, specialized, options = kernel.device_caches[0][-1](*args, **kwargs)
            self.kernels.setdefault(kernel.__name__, set()).add(f"{specialized} {options}")
            self.times += 1
            for result in (arguments.get(name) for name in RESULTS):
                if isinstance(result, torch.Tensor):
                    result.zero_()

        triton.runtime.driver.set_active(device)
        with mock.patch.object(JITFunction, "run", note):
            yield


def late_kernels(model: str, **settings: Any) -> dict[str, list[str]]:
    """Returns, by kernel, what it is compiled for while requests are served, and was not before."""
    device, started = CheckedDevice(), Started()
    device.nbytes = 1 << 30
    backend = torch_backend(torch.device("cpu"))._replace(
        ops=TritonQuantizedOps(CAPABILITY), attention=TritonAttention(CAPABILITY), decoder=GpuDecoder,
        sampling=TritonSamplingKernels(),
    )  # fmt: skip
    config = EngineConfig(model=model, **SETTINGS | settings)
    with started.noting(), device:
        late = Late(config, open_executor(config, backend=backend, device=device), depth=2)
        late.executor.warm_up()
        before, times = {name: set(known) for name, known in started.kernels.items()}, started.times
        assert before, "no kernel was started before the first request"
        draw = random.Random(0)
        for round_, kinds in enumerate([KINDS[:1], KINDS[1:2], KINDS]):
            for count in (1, 12):
                for index in range(count):
                    params = SamplingParams(max_tokens=draw.choice((2, 6)), ignore_eos=True, **draw.choice(kinds))
                    prompt = [draw.randrange(3, 150) for _ in range(draw.choice((1, 2, 3, 5, 17, 40, 130, 300, 700)))]
                    late.add([request(f"{round_} {count} {index}", prompt, params)])
                late.run()
        late.executor.close()
        assert not late.errors, late.errors
        assert started.times > times, "no kernel was started by requests"
        device.synchronize()
    found = {name: sorted(known - before.get(name, set())) for name, known in started.kernels.items()}
    return {name: late for name, late in found.items() if late}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "float32": ("llama", {"dtype": "float32"}),
    "int8 cache": ("llama", {"kv_cache_dtype": "int8"}),
    "4-bit cache": ("llama", {"kv_cache_dtype": "int4_mixed", "enforce_eager": True}),
    "8-bit weights": ("llama", {"quantization": "int8", "enforce_eager": True}),
    "windows": ("gemma2", {"enforce_eager": True}),
    "experts": ("mixtral", {"enforce_eager": True}),
    "latents": ("deepseek-v2-lite", {"enforce_eager": True}),
}


def main() -> None:
    """Prints case, kernel and what it is compiled for too late, of the cases that the command line names."""
    graphs.LEAST_CONTEXT = 256
    saves = {case.name: case.save for case in random_models.CASES}
    for name in sys.argv[1:] or CASES:
        model, settings = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            saves.get(model, lambda path: save_llama(path, **SIZES))(Path(folder))
            for kernel, late in late_kernels(folder, **settings).items():
                for each in late:
                    print(name, kernel, each, sep="\t")


if __name__ == "__main__":
    main()
