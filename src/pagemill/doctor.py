"""Examines the machine for `pagemill doctor`: processor, memory, GPU, kernels, versions, pulled models.

Reads files and package metadata; torch is imported only where there is a GPU to ask it about.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pagemill
from pagemill.errors import StaleKernelsError
from pagemill.hub.registry import cache_dir, pulled_models
from pagemill.machine import cpu_features, cpu_info, usable_cores, usable_memory
from pagemill.ops.prepare import check_compiled

# What kernels choose by, in the words of /proc/cpuinfo (x86 flags, ARM features).
_CPU_FEATURES = (
    "avx", "avx2", "fma", "f16c",
    "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16",
    "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme",
)  # fmt: skip
_PACKAGES = (
    "torch", "transformers", "tokenizers", "huggingface-hub", "safetensors", "gguf", "numpy",
    "msgspec", "fastapi", "uvicorn", "triton",
)  # fmt: skip
_SMI_TIMEOUT_S = 10


def examine() -> dict[str, Any]:
    """Returns all that was found, by section and name: texts, bytes as int, lists of texts, None for not found."""
    features = cpu_features()
    return {
        "pagemill": {
            "version": pagemill.__version__,
            "installed in": str(Path(pagemill.__file__).parent),
            "kernels": _kernels(),
        },
        "machine": {
            "system": platform.platform(),
            "cpu": cpu_model(),
            "cpu features": [feature for feature in _CPU_FEATURES if feature in features],
            "cores": os.cpu_count(),
            "physical cores for this process": usable_cores(),
            **_memory(),
        },
        "gpu": _gpu(),
        "software": {
            "python": f"{platform.python_version()} ({sys.executable})",
            **{name: _version(name) for name in _PACKAGES},
        },
        "settings": {name: value for name, value in sorted(os.environ.items()) if _is_setting(name)},
        "models": {
            "cache": str(cache_dir()),
            **{name: f"{path} ({path.stat().st_size:,} bytes)" for name, path in pulled_models().items()},
        },
    }


def as_markdown(report: dict[str, Any]) -> str:
    """Returns the report as Markdown lists, byte counts in GiB."""
    lines = []
    for section, entries in report.items():
        lines += [f"### {section}", ""]
        lines += [f"- {name}: {_shown(name, value)}" for name, value in entries.items()] or ["- none"]
        lines.append("")
    return "\n".join(lines).rstrip()


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "not found"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value / 2**30:.1f} GiB" if name.startswith("memory") else str(value)


def _kernels() -> str:
    try:
        kernels = importlib.import_module("pagemill._kernels")
    except ImportError as error:
        return f"not usable ({error}); `make` in a checkout, with a C++20 compiler, builds them"
    try:
        check_compiled()
    except StaleKernelsError as error:
        return f"not usable: {error}"
    return str(kernels.isa())


def cpu_model() -> str | None:
    """Returns the processor's name."""
    fields = cpu_info()
    if "model name" in fields:
        return fields["model name"]
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"])
    return platform.processor() or platform.machine() or None


def _memory() -> dict[str, int | None]:
    """Returns sizes in bytes."""
    memory = usable_memory()
    sizes = {"memory": memory.total, "memory available": memory.available}
    return sizes if memory.limit is None else {**sizes, "memory limit of the control group": memory.limit}


def _gpu() -> dict[str, str]:
    smi = shutil.which("nvidia-smi")
    found = (smi and _output([smi, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])) or ""
    gpus = {f"gpu {i}": line.strip() for i, line in enumerate(found.splitlines()) if line.strip()}
    return {**gpus, "torch": _torch_on_gpu()} if gpus else {}


def _torch_on_gpu() -> str:
    try:
        import torch
    except ImportError as error:
        return f"cannot be imported ({error})"
    if not torch.cuda.is_available():
        return f"{torch.__version__} cannot use the GPU (a build for CPU only, or a driver too old for it)"
    major, minor = torch.cuda.get_device_capability(0)
    from pagemill.ops.triton_driver import triton_refusal

    kernels = triton_refusal() or "Triton starts"
    return f"{torch.__version__}, CUDA {torch.version.cuda}, compute capability {major}.{minor}; {kernels}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_setting(name: str) -> bool:
    """Returns whether a variable changes what pagemill does. Tokens and keys do not: the report is for pasting."""
    return bool(
        re.match(r"(PAGEMILL|OMP|KMP|MKL|CUDA)_|HF_(HOME|ENDPOINT|HUB_OFFLINE|HUB_CACHE)$", name)
    ) and not re.search(r"KEY|TOKEN|SECRET|PASSWORD", name)


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
