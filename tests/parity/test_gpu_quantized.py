"""Quantized checkpoints on the GPU's operators: every linear layer stays narrow, and the model is that of the dense
weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from interpreter import CAPABILITY, DEVICE

pytest.importorskip("triton")
sys.path.append(str(Path(__file__).parents[1] / "models"))

import float8_folders
import gguf
import quantized_folders
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from small_llama import load, logits, save_llama

from pagemill.attention.torch_backend import TorchAttention
from pagemill.errors import ConfigError
from pagemill.models.gpu_decoder import GpuDecoder
from pagemill.models.loading import LoadedModel, load_model
from pagemill.ops.triton_quantized import NarrowLinear, TritonQuantizedOps

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # NumPy's, in the interpreter


def load_on_gpu(path: Path, **settings) -> LoadedModel:
    """Loads as the engine does on a GPU; in the interpreter on the CPU."""
    return load_model(
        path,
        ops=TritonQuantizedOps(CAPABILITY),
        attention=TorchAttention(),
        decoder=GpuDecoder,
        device=DEVICE,
        **settings,
    )


def kinds(model: LoadedModel) -> set[str]:
    """How the linear layers of a model are packed; "dense" for those that are not."""
    weights = model.decoder.weights
    linears = [part for layer in weights.layers for part in (layer.qkv, layer.o, layer.mlp.gate_up, layer.mlp.down)]
    return {part.weight.kind if isinstance(part, NarrowLinear) else "dense" for part in [*linears, weights.lm_head]}


def gguf_of(folder: Path, kind: Kind) -> Path:
    def store(name: str, weight):
        return gguf.quants.quantize(weight, kind), kind

    return write_gguf(folder, folder / "model.gguf", "llama", {}, store)


def checkpoints(form: str, folder: Path) -> Path:
    save_llama(folder, hidden_size=128, intermediate_size=192, num_hidden_layers=1, tie_word_embeddings=form == "Q5_1")
    if form in Kind.__members__:
        return gguf_of(folder, Kind[form])
    if form in ("gptq", "awq"):
        quantized_folders.quantize_folder(folder, form, group_size=64)
    else:
        float8_folders.quantize_folder(folder, form, "block")
    return folder


@pytest.mark.parametrize(
    ("form", "quantization", "packed"),
    [
        ("Q4_1", "gguf", {"int4"}),
        ("Q5_1", "gguf", {"int6"}),
        ("Q8_0", "gguf", {"int8"}),
        ("gptq", "gptq", {"int4", "dense"}),
        ("awq", "awq", {"int4", "dense"}),
        ("fp8", "fp8", {"float8", "dense"}),
        ("compressed-tensors", "fp8", {"float8", "dense"}),
    ],
)
def test_a_checkpoint_stays_narrow(tmp_path, form, quantization, packed) -> None:
    path = checkpoints(form, tmp_path)
    exact = logits(load(path, dtype="float32"))
    model = load_on_gpu(path, dtype="float32")
    assert (model.quantization, kinds(model)) == (quantization, packed)
    torch.testing.assert_close(logits(model).cpu(), exact, rtol=0, atol=1e-4)
    narrow = load_on_gpu(path, dtype="bfloat16")
    assert (narrow.quantization, kinds(narrow)) == (quantization, packed)
    found = logits(narrow).float().cpu()
    assert (found - exact).norm() < 0.03 * exact.norm()


def test_int8_rounds_weights_and_leaves_activations(tmp_path) -> None:
    folder = save_llama(tmp_path, num_hidden_layers=1)
    model = load_on_gpu(folder, dtype="float32", quantization="int8")
    exact = logits(load(folder, dtype="float32"))
    assert kinds(model) == {"int8"}
    assert (logits(model).cpu() - exact).norm() < 0.03 * exact.norm()


def test_layers_in_the_order_of_activations_are_rounded_to_8_bits(tmp_path) -> None:
    folder = save_llama(tmp_path, hidden_size=128, intermediate_size=192, num_hidden_layers=1)
    quantized_folders.quantize_folder(folder, "gptq", act_order=True)
    model = load_on_gpu(folder, dtype="float32")
    exact = logits(load(folder, dtype="float32"))
    assert kinds(model) == {"int8", "dense"}
    assert (logits(model).cpu() - exact).norm() < 0.03 * exact.norm()


def test_another_method_than_the_checkpoints_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="are gptq; use quantization='int8'"):
        load_on_gpu(checkpoints("gptq", tmp_path), quantization="fp8")
