"""Describes the GPU, and the software that a report's figures depend on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

PACKAGES = ("triton", "flash-attn", "flashinfer-python", "vllm")


def describe_machine() -> dict[str, str]:
    """Returns names and values, in the order to show them. What is not installed is said to be so."""
    found = {"GPU": "none: kernels ran in Triton's interpreter"}
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found["GPU"] = f"{about.name}, {about.total_memory / 2**30:.0f} GiB"
        found["compute capability"] = f"{about.major}.{about.minor}"
    found |= {
        "driver": _said_by("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "CUDA of torch": torch.version.cuda or "none",
        "torch": torch.__version__,
        **{package: _version(package) for package in PACKAGES},
        "Python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "commit": _said_by("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _said_by(*command: str) -> str:
    """Returns the first line that a command prints."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return (done.stdout.splitlines() or ["unknown"])[0]
