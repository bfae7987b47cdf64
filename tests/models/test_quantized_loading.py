"""Loading with quantized linear layers: which matrices keep the file's integers, and that the model stays the same."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from small_llama import load, logits, save_llama

from harness import load_on
from pagemill import _kernels
from pagemill.attention.cpu_backend import CpuAttention
from pagemill.errors import ConfigError, CorruptWeightsError
from pagemill.models.loading.load import is_native, load_model, open_checkpoint
from pagemill.ops import cpu_ops
from pagemill.ops.cpu_ops import CpuOps
from pagemill.ops.quantized import AffineWeight


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("small"), attention_bias=True)


class NotingOps(CpuOps):
    def __init__(self) -> None:
        super().__init__()
        self.bits: list[int] = []

    def pack_affine(self, weight, bias=None):
        self.bits.append(weight.bits)
        return super().pack_affine(weight, bias)


class DenseOps(CpuOps):
    def pack_affine(self, weight, bias=None):
        return self.pack_linear(weight.dense(), bias)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found - exact).norm() < 0.1 * exact.norm())


def gguf_of(folder, path, kind_of):
    def store(name: str, weight: np.ndarray):
        kind = kind_of(name)
        return (weight, kind) if kind == Kind.F32 else (gguf.quants.quantize(weight, kind), kind)

    return write_gguf(folder, path / "model.gguf", "llama", {}, store)


MIX = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output": Kind.Q6_K, "attn_output": Kind.Q5_0}
"""Names the tensors that differ from Q4_K in a file of llama.cpp's Q4_K_M. Q5_0 stands for the format of one."""


def encode(weight: np.ndarray, kind: Kind) -> np.ndarray:
    """Returns the weight in `kind`; in Q4_K, Q5_K and Q6_K, which the package cannot write, random blocks."""
    if kind not in (Kind.Q4_K, Kind.Q5_K, Kind.Q6_K):
        return gguf.quants.quantize(weight, kind)
    random = np.random.default_rng()
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = random.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=np.uint8)
    scale = random.uniform(1e-4, 2e-4, (*blocks.shape[:2], 1))
    if kind == Kind.Q6_K:
        blocks[..., 208:] = (scale / 4).astype(np.float16).view(np.uint8)
    else:
        middle = 7.5 if kind == Kind.Q4_K else 15.5
        blocks[..., :4] = np.concatenate((scale, middle * scale), axis=-1).astype(np.float16).view(np.uint8)
    return blocks.reshape(len(weight), -1)


@pytest.mark.parametrize(
    ("kind", "mixed", "bits", "widths"),
    [
        (Kind.Q4_K, {}, [4] * 9, {4}),
        (Kind.Q5_K, {}, [8] * 9, {8}),
        (Kind.Q6_K, {}, [8] * 9, {8}),
        (Kind.Q5_K, {"attn_v": Kind.Q4_K}, [8] * 9, {8}),
        (Kind.Q4_K, MIX, [4] * 2 + [8] * 7, {4, 8}),
    ],
    ids=["Q4_K", "Q5_K", "Q6_K", "Q5_K and Q4_K", "Q4_K_M"],
)
def test_k_quants_keep_their_integers(tmp_path, packed, kind, mixed, bits, widths):
    """A float32 model is that of the dense weights to the bit; products of integers are close to it."""
    folder = save_llama(tmp_path, hidden_size=256, intermediate_size=256)

    def store(name: str, weight: np.ndarray):
        chosen = mixed.get(name.split(".")[-2], kind)
        return encode(weight, chosen), chosen

    file = write_gguf(folder, tmp_path / "model.gguf", "llama", {}, store)
    noting, dense = NotingOps(), DenseOps()
    found, expected = (load_model(file, ops=ops, attention=CpuAttention(), dtype="float32") for ops in (noting, dense))
    exact = logits(expected)
    assert torch.equal(logits(found), exact)
    assert len(noting.bits) == 9
    assert set(noting.bits) == widths
    assert close(logits(load(file, dtype="float32", quantization="gguf")), exact)
    assert sorted(packed) == bits
    on_kernels = load_model(file, ops=CpuOps(), attention=CpuAttention(), dtype="float32", quantization="gguf")
    assert close(logits(on_kernels), exact)


@pytest.mark.parametrize("blocks", [1, 37])
@pytest.mark.parametrize("form", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_integers_are_what_the_package_reads(tmp_path, form, blocks):
    """Every bit of the blocks is random but for their scales in fp16; sums and products in float64 agree exactly."""
    folder = save_llama(tmp_path, hidden_size=256, intermediate_size=256 * blocks, num_hidden_layers=1)
    stored, kind = {}, Kind[form]

    def store(name: str, weight: np.ndarray):
        stored[name] = encode(weight, kind), kind
        return stored[name]

    checkpoint = open_checkpoint(write_gguf(folder, tmp_path / "model.gguf", "llama", {}, store), {})
    for name, (raw, _) in stored.items():
        values, scale, low = checkpoint.read_affine(name)
        assert int(values.max()) < 1 << checkpoint.affine_bits(name)
        wide = values.double().view(*scale.shape, -1) * scale.double().unsqueeze(-1) + low.double().unsqueeze(-1)
        exact = torch.from_numpy(gguf.quants.dequantize(raw, kind))
        assert torch.equal(wide.float().view(values.shape), exact)
        assert torch.equal(AffineWeight(values, scale, low, 4 if kind.name[1] == "4" else 8).dense(), exact)


@pytest.mark.parametrize(
    ("kind", "bits"), [(Kind.Q4_0, 4), (Kind.Q4_1, 4), (Kind.Q8_0, 8), (Kind.Q5_0, 8), (Kind.Q5_1, 8)]
)
def test_a_quantized_file_gives_the_model_of_its_dense_weights(folder, tmp_path, packed, kind, bits):
    file = gguf_of(folder, tmp_path, lambda name: kind)
    exact = logits(load(file, dtype="float32"))
    assert packed == []
    assert close(logits(load(file, dtype="float32", quantization="gguf")), exact)
    assert packed == [bits] * 9


@pytest.mark.parametrize("unlike", [{}, {"attn_v": Kind.Q5_1, "output": Kind.F32}])
@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_float32_model_holds_the_integers_of_its_file(folder, tmp_path, kind, unlike):
    """To the bit what their dense weights give; with unlike parts in one matrix too, which takes 8 bits then."""
    file = gguf_of(folder, tmp_path, lambda name: unlike.get(name.split(".")[-2], kind))
    noting, dense = NotingOps(), DenseOps()
    found, expected = (load_model(file, ops=ops, attention=CpuAttention(), dtype="float32") for ops in (noting, dense))
    assert torch.equal(logits(found), logits(expected))
    bits = 8 if kind == Kind.Q8_0 else 4
    assert sorted(noting.bits) == (sorted([bits] * 6 + [8] * 2) if unlike else [bits] * 9)


def test_a_joined_matrix_takes_what_its_widest_part_needs(folder, tmp_path, packed):
    kinds = {"attn_v": Kind.Q8_0, "ffn_up": Kind.F32, "output": Kind.F32}
    file = gguf_of(folder, tmp_path, lambda name: kinds.get(name.split(".")[-2], Kind.Q4_1))
    exact = logits(load(file, dtype="float32"))
    assert close(logits(load(file, dtype="float32", quantization="gguf")), exact)
    assert sorted(packed) == [4, 4, 4, 4, 8, 8]


def test_int8_takes_any_checkpoint(folder, packed):
    assert close(logits(load(folder, dtype="float32", quantization="int8")), logits(load(folder, dtype="float32")))
    assert packed == [8] * 9


def test_tied_embeddings_are_rows_of_the_quantized_head(tmp_path, packed):
    folder = save_llama(tmp_path, tie_word_embeddings=True)
    assert close(logits(load(folder, dtype="float32", quantization="int8")), logits(load(folder, dtype="float32")))
    assert packed == [8] * 9


@pytest.mark.parametrize("fast", [True, False], ids=["with products of integers", "without"])
def test_a_quantized_file_is_computed_on_its_integers_where_that_is_faster(folder, tmp_path, monkeypatch, fast):
    monkeypatch.setattr(cpu_ops, "INTEGER_ISAS", (_kernels.isa(),) if fast else ())
    file = gguf_of(folder, tmp_path, lambda name: Kind.Q4_1)
    wide = torch.bfloat16 if is_native(torch.bfloat16, torch.device("cpu")) else torch.float32
    chosen = load_on("cpu", file)
    assert (chosen.quantization, chosen.dtype) == (("gguf", wide) if fast else (None, torch.float32))
    exact = load_on("cpu", file, dtype="float32")
    assert (exact.quantization, exact.dtype) == (None, torch.float32)
    unquantized = load_on("cpu", folder)
    assert (unquantized.quantization, unquantized.dtype) == (None, torch.float32)


def test_a_folder_has_no_quantized_weights_to_keep(folder):
    with pytest.raises(ConfigError, match=r"are not quantized; use quantization='int8'"):
        load(folder, quantization="gguf")


def test_weights_that_are_not_finite_are_named(folder, tmp_path):
    file = gguf_of(folder, tmp_path, lambda name: Kind.Q4_1)
    data = bytearray(file.read_bytes())
    reader = gguf.GGUFReader(file)
    at = next(tensor.data_offset for tensor in reader.tensors if tensor.name == "blk.1.ffn_down.weight")
    data[at : at + 2] = np.array([np.inf], dtype=np.float16).tobytes()
    file.write_bytes(data)
    with pytest.raises(CorruptWeightsError, match=r"blk\.1\.ffn_down.*not finite"):
        load(file, quantization="gguf")
