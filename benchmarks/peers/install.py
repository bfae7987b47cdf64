"""Makes one environment per peer under ~/.cache/pagemill/peers, with pinned versions, and the model in its format.

    python -m benchmarks.peers.install [vllm] [openvino] [transformers] [llamacpp]      (all of them without a name)

Needs Python 3.11 to 3.13. vLLM is faster with tcmalloc: on Debian and Ubuntu its package is fetched with apt-get and
unpacked into the environment; elsewhere vLLM runs without. llama.cpp is compiled for this machine's processor, which
takes a C++ compiler and about ten minutes on two cores (CMAKE_BUILD_PARALLEL_LEVEL=1 leaves one to others).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.engines import CHECKPOINT, MODEL, OPENVINO_MODEL, PEERS

from pagemill.hub import resolve_model

REQUIREMENTS = Path(__file__).parent / "requirements"
ROOT = Path(__file__).parents[2]
BUILD_VARIABLES = {
    # GCC 12 takes the instruction that loads a tile configuration for one that reads 8 bytes of it, and drops the
    # stores of the other 56; on processors with AMX the first product then faults.
    "llamacpp": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-dse -fno-tree-dse'"}
}
"""Environment variables for what an environment compiles."""


def make_environment(name: str, torch_index: str | None) -> None:
    """Does nothing if the environment already has exactly these versions."""
    folder, requirements = PEERS / name, REQUIREMENTS / f"{name}.txt"
    installed = folder / "installed.txt"
    if installed.exists() and installed.read_text() == requirements.read_text():
        return
    if not (folder / "bin/pip").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    torch = [line for line in requirements.read_text().splitlines() if line.startswith("torch==")]
    if torch and torch_index:
        subprocess.run([*pip, *torch, "--index-url", torch_index], check=True)
    # Everything is pinned, so pip has nothing to resolve, and vLLM's unused requirements stay out.
    variables = os.environ | BUILD_VARIABLES.get(name, {})
    subprocess.run([*pip, "--requirement", requirements], check=True, env=variables)
    shutil.copy(requirements, installed)


def add_tcmalloc() -> None:
    folder = PEERS / "vllm" / "tcmalloc"
    if folder.exists() or not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return
    folder.mkdir()
    try:
        subprocess.run(["apt-get", "--quiet", "download", "libtcmalloc-minimal4"], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder)
        print(f"vLLM will run without tcmalloc, and slower: {error}", file=sys.stderr)


def make_checkpoint() -> None:
    """Writes the GGUF's weights as a Hugging Face folder in float32."""
    if (CHECKPOINT / "config.json").exists():
        return
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = resolve_model(MODEL)
    CHECKPOINT.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(CHECKPOINT)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    # The loaded model counts as quantized and cannot be saved; one of the same weights that was not can be.
    del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(CHECKPOINT)


def make_openvino_model() -> None:
    if (OPENVINO_MODEL / "openvino_model.xml").exists():
        return
    convert = "import sys; from pathlib import Path; from benchmarks.peers.adapters.openvino_engine import convert; "
    call = f"{convert}convert(Path(sys.argv[1]), Path(sys.argv[2]))"
    python = PEERS / "openvino" / "bin/python"
    subprocess.run([python, "-c", call, resolve_model(MODEL), OPENVINO_MODEL], cwd=ROOT, check=True)


def main() -> None:
    names = sorted(path.stem for path in REQUIREMENTS.glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*names, []], metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--torch-index", help="where torch's CPU build comes from, if pip is not set up to find it")
    arguments = parser.parse_args()
    PEERS.mkdir(parents=True, exist_ok=True)
    for name in arguments.names or names:
        print(f"{name}: {PEERS / name}", flush=True)
        make_environment(name, arguments.torch_index)
        if name == "vllm":
            add_tcmalloc()
        if name == "openvino":
            make_openvino_model()
        elif name != "llamacpp":
            make_checkpoint()


if __name__ == "__main__":
    main()
