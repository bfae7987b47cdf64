# The compiled CPU kernels (csrc/bindings.cpp). Addresses are integers, strides are in elements; dtypes: 0 fp32, 1 bf16,
# 2 fp16; 3 int8, of caches only.

from collections.abc import Callable
from typing import overload

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
def exp(x: int, y: int, size: int) -> None: ...
def tanh(x: int, y: int, size: int) -> None: ...
def copy_frames(
    base: int, pieces: int, piece_stride: int, frame_stride: int, nbytes: int, source: int, target: int, count: int
) -> None:
    """Strides in bytes; source and target are addresses of int64 [count]."""

def dequantize(format: int, blocks: int, out: int, weights: int) -> None:
    """From whole blocks of a GGUF format, by its number, to fp32."""

def choose_tokens(
    logits: int,
    n: int,
    places: int,
    items: int,
    temperature: int,
    top_k: int,
    top_p: int,
    min_p: int,
    uniforms: int,
    tokens: int,
) -> None: ...
def log_probabilities(
    logits: int,
    n: int,
    places: int,
    items: int,
    k: int,
    tokens: int,
    own: int,
    ranks: int,
    likely: int,
    likely_logprobs: int,
) -> None: ...

class Linear:
    """Dense; of integers (QuantizedSource in csrc/kernels.h), slopes 0: 8 bits; or float32 held in integers
    (AffineSource)."""

    @overload
    def __init__(self, weight: int, bias: int, n: int, k: int, dtype: int, x_dtype: int) -> None: ...
    @overload
    def __init__(
        self, values: int, slopes: int, offsets: int, scales: int, bias: int, n: int, k: int, dtype: int
    ) -> None: ...
    @overload
    def __init__(self, values: int, scale: int, low: int, bias: int, n: int, k: int, bits: int) -> None: ...
    def __call__(self, x: int, x_row: int, y: int, y_row: int, dtype: int, rows: int) -> None: ...
    def likeliest(self, x: int, x_row: int, dtype: int, rows: int, tokens: int) -> None:
        """tokens int64 [rows]: as `choose_tokens` at temperature 0 from what a call would have written."""

    def rows(self, ids: int, y: int, count: int) -> None:
        """y [count, k] in the weight's dtype = weight[ids]; ids int64."""

    @property
    def nbytes(self) -> int: ...

class Cache:
    """One layer's cache: address and strides (frame, head, token, dim) of keys and of values, address and strides
    (frame, head) of their scales, all 0 where there are none."""

    def __init__(
        self,
        key: tuple[int, ...],
        value: tuple[int, ...],
        key_scale: tuple[int, ...],
        value_scale: tuple[int, ...],
        dtype: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
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
        share: bool,
    ) -> None: ...

class Decoder:
    """A dense decoder's step as one call (csrc/decoder.h). Keep what the addresses point to, and the linears.

    embedding 0: the rows of `head`.
    """

    def __init__(
        self,
        embedding: int,
        head: Linear,
        vocab: int,
        hidden: int,
        final_norm: int,
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
        input_norm: int,
        qkv: Linear,
        o: Linear,
        pre_mlp_norm: int,
        gate_up: Linear,
        down: Linear,
        q_norm: int,
        k_norm: int,
        post_attention_norm: int,
        post_mlp_norm: int,
        rope: int,
        group: int,
        window: int,
    ) -> None: ...
    def run(
        self,
        token_ids: int,
        positions: int,
        tokens: int,
        max_positions: int,
        query_start: int,
        context_lens: int,
        rows: int,
        groups: list[tuple[int, int, int]],
        angles: list[tuple[int, int, int]],
        caches: list[Cache],
        output: int,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """groups: (tables, stride, slots) each; angles: (cos, sin, half) each; on_layer: told each layer's number when
        it begins. IndexError: token id or position."""

    @property
    def seconds(self) -> dict[str, float]: ...
