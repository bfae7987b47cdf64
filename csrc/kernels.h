// The CPU kernels: plain functions over pointers and strides, no Python. One table of them per instruction set, all
// with the same meaning; strides are in elements. Every row's result is bitwise independent of the other rows, of how
// they are cut into calls, and of the number of threads. Instruction sets may differ from each other in the last bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pagemill {

// Those of one byte are a cache's only. u4: two integers in a byte. e4m3 and e5m2: floating point of 8 bits, with so
// many of exponent and mantissa (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
enum class DType : int { f32 = 0, bf16 = 1, f16 = 2, i8 = 3, u4 = 4, e4m3 = 5, e5m2 = 6 };

static inline size_t item_size(DType type) { return type == DType::f32 ? 4 : type >= DType::i8 ? 1 : 2; }

static inline bool is_integer(DType type) { return type == DType::i8 || type == DType::u4; }

// How a weight is held: in its dtype, as integers of 8 or 4 bits that are multiplied as such (isa/quantized.h), as bf16
// in 12 bits (isa/coded.h), or as fp32 in integers of 4 or 8 bits (isa/affine.h), with a scale for each 32 k, or for
// each 16 (fine8).
enum class Format : int { dense = 0, int8 = 1, int4 = 2, coded = 3, affine4 = 4, affine8 = 5, fine8 = 6 };

// A weight [n, k] packed into panels of neighbouring outputs: panel, then k, then output; bf16, for instructions that
// multiply pairs: panel, then k / 2, then output, then k % 2. Made by Kernels::pack_linear, pack_quantized or
// pack_affine.
struct PackedLinear {
    int64_t n = 0, k = 0;
    DType type = DType::f32;  // of a dense weight; of a quantized one's rows, where nothing else is asked for
    Format format = Format::dense;
    void* panels = nullptr;   // page-aligned, outputs padded with zeros to whole panels
    void* scales = nullptr;   // bf16, of quantized weights only: panel, then group of 192 k, then output
    float* bias = nullptr;    // [padded n] or null
    uint32_t* patches = nullptr;  // of coded weights only: where each step's begin, and then the patches
    uint16_t exponents[16] = {};  // the same: those that have codes
    size_t bytes = 0;
};

// Of a packed weight's parts; of patches only those that say where the others begin.
struct PackedBytes { size_t panels = 0, scales = 0, bias = 0, patches = 0; };

// A quantized weight before it is packed. int8: values int8 [n, k], times the scale of the row's 192 k. int4: values
// uint8 [n, k], each 0 .. 15; the weight is (slope * value + offset) >> 8, modulo 2^16 and as int8, times that scale; k
// % 32 = 0.
struct QuantizedSource {
    const void* values = nullptr;
    const int16_t *slopes = nullptr, *offsets = nullptr;  // [n, k / 32], int4 only
    const uint16_t* scales = nullptr;                     // bf16 [n, ceil(k / 192)]
    const float* bias = nullptr;                          // [n] or null
};

// A weight as a GGUF file has it: rows of whole blocks of the format of this number.
struct StoredWeight {
    int format = 0;
    const void* blocks = nullptr;
    int64_t n = 0, k = 0;
};

// A weight, before it is packed, that is scale * value + low in fp32, where scale * value is exact: values uint8 [n,
// k], each below 16 with affine4; scale and low [n, k / 32], with fine8 [n, k / 16]; k % 32 = 0.
struct AffineSource {
    const uint8_t* values = nullptr;
    const float *scale = nullptr, *low = nullptr;
    const float* bias = nullptr;  // [n] or null
};

// One layer's keys or values: element (frame, head, token, dim) at data + frame * frame_stride + ... `beside`
// neighbouring dimensions of a key lie side by side (2 of bf16, 4 of integers, or 1), and as many neighbouring tokens
// of a value: `dim` of keys and `token` of values are then the strides of so many, and the other one is `beside`.
//
// An i8 element is a multiple of its token's fp32 scale, scales[frame * scale_frame + head * scale_head + token].
//
// A u4 vector is bytes: byte 16 g + i, i < 16, has dimension 32 g + i in its lower half and 32 g + i + 16 in its upper
// one. Element n of a group of dimensions is low + n * scale, two bf16 numbers in one word, the scale in its upper
// half: scales[frame * scale_frame + head * scale_head + group * block_size + token]. Groups are kKeyGroup dimensions
// of a key, all dimensions of a value. Keys are rotated (rotate_head in isa/narrow_kv.h), and so are queries.
struct CacheView {
    void* data = nullptr;
    int64_t frame = 0, head = 0, token = 0, dim = 0;
    DType type = DType::f32;
    int beside = 1;
    void* scales = nullptr;
    int64_t scale_frame = 0, scale_head = 0;
};

constexpr int kKeyGroup = 32, kMostNarrowDims = 512;

struct LayerCache {
    CacheView key, value;
    int kv_heads = 0, block_size = 0, head_dim = 0;
};

// Whether keys and values, and weights in integers, come faster when fetched into the second-level cache than into the
// first.
extern const bool fetches_to_second_level;
// Whether the processor reads ahead by itself what lies in one stream, the better the less it is told.
extern const bool foresees_streams;

// Attention cuts keys into partitions at fixed absolute positions.
constexpr int kPartition = 256;

// A query token, its row, and how many partitions from the first on it attends together with other rows.
struct QueryToken { int32_t token, row, shared; };

// Rows whose tables begin with the same frames: their tokens, in the order of AttentionArgs, and as many whole
// partitions.
struct SharedPrefix { int32_t first, tokens, partitions; };

// Queries, keys or values [tokens, heads, head_dim], the last dimension contiguous; strides.
struct HeadsView {
    const void* data = nullptr;
    int64_t token = 0, head = 0;
};

// What the first 4 bits of a token's key and value have left out, in 4 bits again, at slots of its own in the same
// cache. A query adds it to the keys and values of its own position and of the `window` - 1 before it. With caches of
// u4 only.
struct Remainders {
    const int32_t* tables = nullptr;  // [rows, ...]; null: there are none
    int64_t table_stride = 0;
    int64_t window = 0;
};

struct AttentionArgs {
    HeadsView query;
    DType type = DType::f32;  // of query and output
    void* output = nullptr;  // [tokens, heads, head_dim], contiguous
    float* lse = nullptr;    // [tokens, heads] or null
    LayerCache cache;
    const int32_t* tables = nullptr;  // [rows, ...]; null (benchmarks.paging): row r has frames r * table_stride, ...
    int64_t table_stride = 0;
    const int32_t* query_start = nullptr;  // [rows + 1]
    const int32_t* context_lens = nullptr;  // [rows]
    const int64_t* positions = nullptr;  // [tokens]
    const int32_t* key_start = nullptr;  // [rows] or null
    const int32_t* key_end = nullptr;  // [rows] or null
    int rows = 0, heads = 0;
    float scale = 1;
    int64_t window = 0;  // 0: none
    float soft_cap = 0;  // 0: none
    Remainders remainders;
    // All query tokens, those of `prefixes` first; a row's lie side by side, ascending. Made by SharedPrefixes.
    const QueryToken* order = nullptr;
    const SharedPrefix* prefixes = nullptr;
    int num_prefixes = 0;
};

struct KeyRange { int64_t begin, end; };

// The keys that a query sees; begin == end: none.
static inline KeyRange key_range(const AttentionArgs& args, int row, int64_t token) {
    const int64_t position = args.positions[token];
    int64_t begin = args.window && position >= args.window ? position - args.window + 1 : 0;
    int64_t end = position < args.context_lens[row] ? position + 1 : args.context_lens[row];
    if (args.key_start && begin < args.key_start[row]) begin = args.key_start[row];
    if (args.key_end && args.key_end[row] < end) end = args.key_end[row];
    return {begin, begin < end ? end : begin};
}

// Those of them to which it adds remainders.
static inline KeyRange precise_range(const AttentionArgs& args, int row, int64_t token) {
    const KeyRange keys = key_range(args, row, token);
    if (!args.remainders.tables) return {keys.end, keys.end};
    const int64_t begin = args.positions[token] - args.remainders.window + 1;
    return {begin < keys.begin ? keys.begin : begin < keys.end ? begin : keys.end, keys.end};
}

struct WriteArgs {
    HeadsView key, value;
    DType type = DType::f32;
    LayerCache cache;
    const int64_t* slots = nullptr;  // [tokens]; negative: not written
    const int64_t* remainder_slots = nullptr;  // the same, of remainders; null: there are none
    int64_t tokens = 0;
};

// What lies between a layer's joined projection and attention, token by token.
struct HeadsArgs {
    void* qkv = nullptr;  // [tokens, heads + 2 * kv_heads, head_dim], contiguous; changed in place
    int heads = 0;  // of queries; the rest, and the tokens' number, as in `write`
    const float *q_norm = nullptr, *k_norm = nullptr;  // [head_dim], or null
    float eps = 0;
    const float *cos = nullptr, *sin = nullptr;  // [positions, half] fp32, or null: not rotated
    int64_t half = 0;
    const int64_t* positions = nullptr;  // [tokens]
    WriteArgs write;  // its keys and values lie in qkv
};

enum class Activation : int { silu = 0, gelu_tanh = 1 };

// Instead of a token: a logit is NaN or +inf; all are -inf.
constexpr int64_t kNotFinite = -1, kAllForbidden = -2;

// A token for each of `items`, which are rows `places` of logits [.., n].
struct ChooseArgs {
    const float* logits = nullptr;
    int64_t n = 0;
    const int64_t* places = nullptr;
    int64_t items = 0;
    const float* temperature = nullptr;  // [items]; 0: the largest logit's, the first of equals
    const int64_t* top_k = nullptr;  // [items]; 0: off
    const float *top_p = nullptr, *min_p = nullptr;  // [items]; 1 and 0: off
    const double* uniforms = nullptr;  // [items], in [0, 1)
    int64_t* tokens = nullptr;  // [items]
};

// Which outputs count, row by row: those whose bits are set, output o's being bit o % 32 of its row's word o / 32.
struct AllowedOutputs {
    const uint32_t* bits = nullptr;  // [.., words]
    int64_t words = 0;
    const int64_t* rows = nullptr;  // each row's among `bits`; negative: all outputs count. Null: in all rows

    const uint32_t* of(int64_t row) const { return rows && rows[row] >= 0 ? bits + rows[row] * words : nullptr; }
};

// Of `items` rows, `places` of logits [.., n], what is not allowed becomes -inf.
struct MaskArgs {
    float* logits = nullptr;
    int64_t n = 0;
    const int64_t* places = nullptr;  // no two equal
    int64_t items = 0;
    AllowedOutputs allowed;  // its rows: [items]
};

// Log probabilities of a token in each row, its rank, and the k largest; all NaN where no token could be chosen.
struct LogprobArgs {
    const float* logits = nullptr;
    int64_t n = 0;
    const int64_t* places = nullptr;
    int64_t items = 0, k = 0;  // k at most n
    const int64_t* tokens = nullptr;  // [items]
    float* own = nullptr;  // [items]
    int64_t* ranks = nullptr;  // [items]
    int64_t* top_tokens = nullptr;  // [items, k], the largest first, then by token
    float* top_logprobs = nullptr;  // [items, k]
};

// An adapter's addition to neighbouring outputs of a linear layer: scale * B A x. Ranks and outputs are padded with
// zeros to whole blocks and panels.
constexpr int64_t kRankBlock = 16, kOutputPanel = 64;
struct LowRankPart {
    const void* a = nullptr;  // [blocks, k, kRankBlock]
    const void* b = nullptr;  // [panels, rank, kOutputPanel]
    int64_t rank = 0, begin = 0, count = 0;  // outputs from `begin` on
    float scale = 1;
};

// All that it adds to one layer, whose weight is [n, k]; no two parts to the same output.
struct LowRank {
    DType type = DType::f32;  // of a and b
    int64_t n = 0, k = 0;
    const LowRankPart* parts = nullptr;
    int num_parts = 0;
};

// Tokens that have the same adapter.
struct LowRankRun {
    const LowRank* low_rank = nullptr;
    const int64_t* tokens = nullptr;
    int64_t count = 0;
};

struct LowRankArgs {
    const void* x = nullptr;
    int64_t x_row = 0;
    void* y = nullptr;
    int64_t y_row = 0;
    int64_t first = 0;  // the token in the first row of x and y
    DType type = DType::f32;  // of x and y
    const LowRankRun* runs = nullptr;  // no token in two
    int num_runs = 0;
};

struct Kernels {
    const char* isa = nullptr;

    // weight [n, k] contiguous in `type`; bias [n] fp32 or null; for x of this dtype above all. Memory for the panels
    // is allocated; false: out of memory.
    bool (*pack_linear)(PackedLinear&, const void* weight, const float* bias, DType x) = nullptr;
    // The same for integers, in the weight's `format`.
    bool (*pack_quantized)(PackedLinear&, const QuantizedSource&) = nullptr;
    // A weight [n, k], finite, rounded to the values [n, k] and scales [n, ceil(k / 192)] of an int8 QuantizedSource.
    void (*quantize_int8)(const void* weight, DType, int64_t n, int64_t k, int8_t* values, uint16_t* scales) = nullptr;
    // Widens `weights` (whole blocks) of a GGUF tensor to fp32. False, here and below: no such format.
    bool (*dequantize)(int format, const void* blocks, float* out, int64_t weights) = nullptr;
    // Bytes of k weights of such a tensor; 0 for no such format, or weights that are no whole blocks.
    int64_t (*stored_bytes)(int format, int64_t k) = nullptr;
    // The same rounded as by quantize_int8; `finite` [n] says which rows are, of the others nothing is known.
    bool (*round_stored)(const StoredWeight&, int8_t* values, uint16_t* scales, bool* finite) = nullptr;
    // A weight in a format of 4 bits as the parts of an int4 QuantizedSource; `finite` likewise.
    bool (*keep_int4)(const StoredWeight&, uint8_t* values, int16_t* slopes, int16_t* offsets, uint16_t* scales,
                      bool* finite) = nullptr;
    bool (*pack_affine)(PackedLinear&, const AffineSource&) = nullptr;
    // What a weight of this n, k, type and format takes here, with a bias.
    PackedBytes (*packed_bytes)(const PackedLinear&) = nullptr;
    // y [m, n] = x [m, k] · weight^T + bias; rows of x and y at row_stride; both of dtype `type`.
    void (*linear)(const PackedLinear&, const void* x, int64_t x_row, void* y, int64_t y_row, DType type,
                   int64_t m) = nullptr;
    // tokens [m]: the argmax of each row of `linear`, as choose_tokens would find it at temperature 0 in the row
    // rounded to `type`, where what is not allowed is -inf, and what that says of rows without one. No output is
    // written.
    void (*linear_argmax)(const PackedLinear&, const void* x, int64_t x_row, DType type, int64_t m,
                          const AllowedOutputs& allowed, int64_t* tokens) = nullptr;
    // y [m, n of down] = down · (activation(first half of gate_up's outputs) * second half), the same bits as linear,
    // gated and linear give; false, and nothing is done: this set has no such kernel for these operands.
    bool (*mlp)(const PackedLinear& gate_up, const PackedLinear& down, const void* x, int64_t x_row, void* y,
                int64_t y_row, DType type, Activation, int64_t m) = nullptr;
    // y[token] += scale * B A x[token], summed in fp32 and rounded once, for the tokens of each run.
    void (*add_low_rank)(const LowRankArgs&) = nullptr;
    void (*attend)(const AttentionArgs&) = nullptr;
    void (*write_kv)(const WriteArgs&) = nullptr;
    // x [outer, inner, n], the last dimension contiguous; y the same, contiguous; weight [n] fp32
    void (*rms_norm)(const void* x, int64_t x_outer, int64_t x_inner, const float* weight, float eps, void* y,
                     DType type, int64_t outer, int64_t inner, int64_t n) = nullptr;
    // In place: x [tokens, heads, ...] halves convention over 2 * half leading dimensions; cos, sin [tokens, half] fp32
    void (*rotate)(void* x, int64_t x_token, int64_t x_head, DType type, const float* cos, const float* sin,
                   int64_t tokens, int64_t heads, int64_t half) = nullptr;
    // x [rows, 2 n] (gate, up) -> y [rows, n] = activation(gate) * up
    void (*gated)(const void* x, int64_t x_row, void* y, DType type, Activation activation, int64_t rows,
                  int64_t n) = nullptr;
    // y [tokens, n] = table [ids[token]] * scale, all of dtype `type`
    void (*embed)(const void* table, const int64_t* ids, float scale, void* y, DType type, int64_t tokens,
                  int64_t n) = nullptr;
    // The same from the rows of a packed weight, exactly what was packed.
    void (*embed_packed)(const PackedLinear&, const int64_t* ids, float scale, void* y, DType type,
                         int64_t tokens) = nullptr;
    // x [rows, n] += delta, which goes through a norm of its own first if post_norm is given; y = norm(x). All
    // contiguous and rounded to `type` in between; y may be delta.
    void (*add_norm)(void* x, const void* delta, const float* post_norm, const float* norm, float eps, void* y,
                     DType type, int64_t rows, int64_t n) = nullptr;
    // Norms of queries and keys, rotary embedding, and keys and values to their slots.
    void (*prepare_heads)(const HeadsArgs&) = nullptr;
    void (*mask_logits)(const MaskArgs&) = nullptr;
    void (*choose_tokens)(const ChooseArgs&) = nullptr;
    void (*log_probabilities)(const LogprobArgs&) = nullptr;
    // y [n] fp32 = x [n], or soft_cap * tanh(x / soft_cap); soft_cap 0: none. y may be x.
    void (*widen)(const void* x, DType type, float soft_cap, float* y, int64_t n) = nullptr;
    // Elementwise exp and tanh as the kernels use them, for tests.
    void (*exp)(const float* x, float* y, int64_t n) = nullptr;
    void (*tanh)(const float* x, float* y, int64_t n) = nullptr;
};

// The kernels that run: the best of this CPU, or what PAGEMILL_ISA asks for (generic; avx2, avx512, avx512_vnni,
// avx512_bf16, amx_bf16; neon_dotprod, neon_bf16), if the CPU has it.
const Kernels& kernels();
// Switches to another instruction set that this CPU has; false if it has not. Packed weights belong to the set that
// packed.
bool use_isa(const std::string& name);
// Names of the instruction sets of this CPU, best first.
std::vector<std::string> available_isas();

void release(PackedLinear&);

// Copies frames source[i] -> target[i], in ascending i, in each of `pieces` regions (piece_stride bytes apart) of
// frames of `bytes` bytes that lie frame_stride bytes apart.
void copy_frames(void* base, int64_t pieces, int64_t piece_stride, int64_t frame_stride, int64_t bytes,
                 const int64_t* source, const int64_t* target, int64_t count);

// Copies sources[i] to targets[i], `bytes` bytes each, in any order, by all threads.
void copy_records(void* const* targets, const void* const* sources, int64_t count, int64_t bytes);

}  // namespace pagemill
