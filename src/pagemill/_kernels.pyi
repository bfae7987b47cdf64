# The compiled CPU kernels (csrc/bindings). Arrays and tensors raise ValueError for another dtype or shape, or gaps
# between their elements. Addresses are integers, strides are in elements; dtypes: 0 fp32, 1 bf16, 2 fp16.

from collections.abc import Callable, Sequence
from typing import TypeAlias, overload

import numpy as np
import numpy.typing as npt
from torch import Tensor

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int32: TypeAlias = npt.NDArray[np.int32]
Int64: TypeAlias = npt.NDArray[np.int64]
UInt32: TypeAlias = npt.NDArray[np.uint32]
Float32: TypeAlias = npt.NDArray[np.float32]

interface: str  # SHA-256 of this file when the kernels were compiled
sources: str  # SHA-256 of the hexadecimal SHA-256s of csrc/**/*.{cpp,h} without csrc/tests, by path

def isa() -> str: ...
def available_isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
def num_threads() -> int: ...
def set_num_threads(count: int) -> None: ...
def rms_norm(
    x: int, x_outer: int, x_inner: int, weight: int, eps: float, y: int, dtype: int, outer: int, inner: int, size: int
) -> None: ...
def rotate(
    x: int, x_token: int, x_head: int, dtype: int, cos: int, sin: int, tokens: int, heads: int, half: int
) -> None: ...
def gated(x: int, x_row: int, y: int, dtype: int, activation: int, rows: int, size: int) -> None: ...
def widen(x: int, dtype: int, soft_cap: float, y: int, size: int) -> None: ...
def exp(x: int, y: int, size: int) -> None: ...
def tanh(x: int, y: int, size: int) -> None: ...
def copy_frames(
    base: int, pieces: int, piece_stride: int, frame_stride: int, nbytes: int, source: Int64, target: Int64
) -> None:
    """Copies frames source[i] -> target[i], in order. Strides in bytes; source and target [count]."""

def copy_records(targets: Sequence[Bytes], sources: Sequence[Bytes]) -> None:
    """Copies sources[i] -> targets[i] by all threads: arrays of any shape, equally long, without gaps."""

def dequantize(format: int, blocks: npt.NDArray[np.uint8], out: Float32) -> None:
    """Widens whole blocks (bytes) of a GGUF format, by its number, to `out` [weights]."""

def round_stored(format: int, blocks: npt.NDArray[np.uint8], values: Tensor, scales: Tensor) -> bool:
    """Rounds rows of blocks of a GGUF format, as `quantize_int8` does. Returns whether all weights are finite."""

def keep_int4(
    format: int, blocks: npt.NDArray[np.uint8], values: Tensor, slopes: Tensor, offsets: Tensor, scales: Tensor
) -> bool:
    """Takes rows of blocks of a GGUF format of 4 bits apart: `values` uint8 [n, k], `slopes` and `offsets` int16
    [n, k / 32], `scales` bfloat16 [n, ceil(k / 192)]. Returns whether all are finite."""

def quantize_int8(weight: Tensor, values: Tensor, scales: Tensor) -> None:
    """Rounds a finite weight [n, k] to `values` int8 [n, k] and `scales` bfloat16 [n, ceil(k / 192)]."""

def choose_tokens(
    logits: Float32,
    places: Int64,
    temperature: Float32,
    top_k: Int64,
    top_p: Float32,
    min_p: Float32,
    uniforms: npt.NDArray[np.float64],
    tokens: Int64,
) -> None:
    """Writes a token for each of `places`, rows of logits [rows, n]; the others [places]."""

def mask_logits(logits: Float32, places: Int64, bits: UInt32, rows_of_bits: Int64) -> None:
    """Makes -inf, in rows `places` of logits [rows, n], of those whose bits are not set.

    bits: [any, ceil(n / 32)], token t's being bit t % 32 of word t / 32. rows_of_bits: [places], each place's row."""

def log_probabilities(
    logits: Float32,
    places: Int64,
    tokens: Int64,
    own: Float32,
    ranks: Int64,
    top_tokens: Int64,
    top_logprobs: Float32,
) -> None:
    """Writes `own` and `ranks` of `tokens` [places] in rows `places` of logits, and the largest: [places, k]."""

class Linear:
    """A weight [n, k] in panels: dense, for inputs of `x_dtype` above all; of integers (QuantizedSource in
    csrc/kernels.h), 8 bits without slopes, else 4; or float32 held in integers (AffineSource). bias: float32 [n].

    Raises TypeError for a dtype without kernels."""

    @overload
    def __init__(self, weight: Tensor, bias: Tensor | None, x_dtype: int) -> None: ...
    @overload
    def __init__(
        self,
        values: Tensor,
        slopes: Tensor | None,
        offsets: Tensor | None,
        scales: Tensor,
        bias: Tensor | None,
        dtype: int,
    ) -> None: ...
    @overload
    def __init__(self, values: Tensor, scale: Tensor, low: Tensor, bias: Tensor | None, bits: int) -> None: ...
    @overload
    def __init__(
        self,
        n: int,
        k: int,
        format: int,
        type: int,
        exponents: list[int],
        panels: Bytes,
        scales: Bytes | None,
        bias: Bytes | None,
        patches: Bytes | None,
    ) -> None:
        """Uses what `parts` has given where it lies, aligned to 64 bytes, and keeps the arrays.

        Raises ValueError for sizes that these kernels do not give a weight of n, k, format and type."""

    def parts(
        self,
    ) -> tuple[int, int, int, int, list[int], Bytes, Bytes | None, Bytes | None, Bytes | None]: ...
    def __call__(self, x: int, x_row: int, y: int, y_row: int, dtype: int, rows: int) -> None: ...
    def argmax(
        self, x: int, x_row: int, dtype: int, tokens: Int64, bits: UInt32 | None, rows_of_bits: Int64 | None
    ) -> None:
        """Writes tokens [rows]: as `choose_tokens` at temperature 0 from what a call would have written, where outputs
        whose bits are not set are -inf.

        bits: [any, ceil(n / 32)], output o's being bit o % 32 of word o / 32. rows_of_bits: [rows], negative for rows
        in which all outputs count."""

    def rows(self, ids: Int64, y: int) -> None:
        """Writes weight[ids] to y [len(ids), k], in the weight's dtype."""

    @property
    def nbytes(self) -> int: ...

class LowRank:
    """What an adapter adds to a linear layer's outputs (LowRank in csrc/kernels.h). Keep the tensors.

    parts: (a [blocks, in_features, 16], b [panels, rank, 64], first output, outputs, scale), a and b of one dtype."""

    def __init__(
        self, out_features: int, in_features: int, parts: list[tuple[Tensor, Tensor, int, int, float]]
    ) -> None: ...

def add_low_rank(
    runs: list[tuple[LowRank, Int64]], tokens: int, x: int, x_row: int, y: int, y_row: int, dtype: int
) -> None:
    """Adds to y [tokens, out_features], for x [tokens, in_features], what each run's addition gives for its tokens; no
    token may be in two."""

def order_rows(
    tables: Int32,
    groups: list[int],
    rows: Int32,
    limits: Int32,
    chunks: Int32,
    block_size: int,
    most: int,
    moves: bool,
    order: Int32,
    common: Int32,
) -> None:
    """Writes an order [n] of `rows` [n], numbers from 0 on, in which neighbours have much in common; and, in that
    order, how many keys each has in common with the one before it, in the same frames: `common` [n].

    tables [any, every row, entries]: by layer group, of which `groups` count. limits [n]: keys that a row may share,
    within its table. chunks [n]: keys are shared in multiples of so many, by rows that have the same. At most `most`
    rows one after the other have something in common. moves: if not, the order stays.

    Raises IndexError for groups, rows and limits that have no entries."""

class Adapter:
    """What an adapter adds to each layer of a decoder. Keep the additions."""

    def __init__(self) -> None: ...
    def set(self, decoder: Decoder, layer: int, place: int, addition: LowRank) -> None:
        """Names the addition to a layer's qkv (0), o (1), gate_up (2) or down (3)."""

class Cache:
    """One layer's cache, as `attention.LayerCache` holds it. Keep the tensors.

    float8: 5 (e4m3) or 6 (e5m2) for keys and values in floating point of 8 bits, which come as uint8.
    Raises TypeError for a dtype without kernels, ValueError for keys and values that do not belong together and for
    integers without scales."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        key_scale: Tensor | None,
        value_scale: Tensor | None,
        float8: int | None = None,
    ) -> None: ...
    def write(
        self,
        key: int,
        key_token: int,
        key_head: int,
        value: int,
        value_token: int,
        value_head: int,
        dtype: int,
        slots: int,
        remainder_slots: int,
        tokens: int,
    ) -> None: ...
    def attend(
        self,
        query: int,
        dtype: int,
        query_token: int,
        query_head: int,
        heads: int,
        output: int,
        lse: int,
        tables: int,
        table_stride: int,
        query_start: int,
        context_lens: int,
        positions: int,
        key_start: int,
        key_end: int,
        rows: int,
        scale: float,
        window: int,
        soft_cap: float,
        remainder_tables: int,
        remainder_stride: int,
        remainder_window: int,
        share: bool,
    ) -> None: ...

class Exchange:
    """Exchanges activations among ranks through memory that their processes share (csrc/exchange.h). Keep the memory.

    memory: the address of so many bytes, zeros at first."""

    def __init__(self, memory: int, bytes: int, rank: int, size: int) -> None: ...
    def gather(self, part: int, out: int, widths: list[int], rows: int, idle: Callable[[float], None] | None) -> None:
        """Joins all ranks' parts [rows, widths[rank]], in bytes, at address `out`. idle: told now and then for how many
        seconds this rank has waited; it may raise."""

class Decoder:
    """A dense decoder's step as one call (csrc/decoder.h). Keep the tensors and the linears.

    embedding: as the head's weight, of `dtype`; None: the rows of `head`. Norms: float32 [hidden], or [head_dim].
    """

    def __init__(
        self,
        embedding: Tensor | None,
        head: Linear,
        final_norm: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: int,
        eps: float,
        activation: int,
        scale: float,
        soft_cap: float,
        embedding_scale: float,
    ) -> None: ...
    def add_layer(
        self,
        input_norm: Tensor,
        qkv: Linear,
        o: Linear,
        pre_mlp_norm: Tensor,
        gate_up: Linear,
        down: Linear,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        post_attention_norm: Tensor | None,
        post_mlp_norm: Tensor | None,
        rope: int,
        group: int,
        window: int,
    ) -> None: ...
    def set_parts(self, exchange: Exchange, heads: list[int], hidden: list[int], intermediate: list[int]) -> None:
        """Makes it that of one rank: by rank, the bytes of its part of a token's heads, hidden state and activations
        between the MLP's projections. Keep the exchange."""

    def run(
        self,
        token_ids: Int64,
        positions: Int64,
        max_positions: int,
        query_start: Int32,
        context_lens: Int32,
        groups: list[tuple[Int32, Int64, Int32 | None, Int64 | None, int]],
        angles: list[tuple[Float32, Float32]],
        caches: list[Cache],
        output: int,
        on_layer: Callable[[int], None] | None = None,
        adapters: list[tuple[Adapter, Int64]] = ...,
        embedded: int = 0,
        idle: Callable[[float], None] | None = None,
    ) -> None:
        """Runs a step. groups: (tables [rows, entries], slots [tokens]) each; angles: (cos, sin), each [positions,
        half]; on_layer: told each layer's number when it begins; adapters: each with its tokens, which ascend, and no
        token in two. A decoder in parts takes the address of what the embedding has for the tokens, [tokens, hidden],
        and `idle` as `Exchange.gather` does. Raises IndexError for a token id, position or token outside its table,
        before anything is written."""

    @property
    def seconds(self) -> dict[str, float]: ...
