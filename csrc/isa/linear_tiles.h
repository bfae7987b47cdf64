// What linear layers are cut into: weights into panels of neighbouring outputs, rows into tiles, both into tasks; how
// rows are packed, what is fetched ahead, and how outputs are written.
#pragma once

#include "../threads.h"
#include "simd.h"

#include <cstdlib>

namespace pagemill { namespace {

constexpr int NR = 2 * W;  // outputs in a panel

// Two neighbouring k of one output, or of one row of x: what bf16 instructions take.
struct Pair { bf16 even, odd; };

#if defined(PRODUCTS_OF_PAIRS)
constexpr bool kHasPairs = true;
#if defined(__AMX_BF16__)
constexpr int64_t kPairedStep = 32;  // a tile's
#else
constexpr int64_t kPairedStep = 2;
#endif

INLINE F load(const Pair* p) { return load((const float*)p); }
INLINE F multiply_add(F x, F w, F sum, const Pair*) { return add_pairs(sum, x, w); }

#else
constexpr bool kHasPairs = false;
constexpr int64_t kPairedStep = 1;
#endif

template <class T> INLINE F multiply_add(F x, F w, F sum, const T*) { return fma(x, w, sum); }

// Length of a packed weight's rows: bf16 in pairs has zeros up to whole steps.
INLINE int64_t packed_k(const PackedLinear& weight) {
    return kHasPairs && weight.type == DType::bf16 ? (weight.k + kPairedStep - 1) / kPairedStep * kPairedStep
                                                   : weight.k;
}

INLINE int64_t panels_of(const PackedLinear& weight) { return (weight.n + NR - 1) / NR; }

INLINE size_t whole_pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }
INLINE size_t bias_bytes(int64_t outputs) { return (outputs * sizeof(float) + 63) / 64 * 64; }

// Padded with zeros to so many outputs; false: out of memory.
bool pack_bias(PackedLinear& packed, const float* bias, int64_t outputs) {
    if (!bias) return true;
    const size_t bytes = bias_bytes(outputs);
    packed.bias = (float*)std::aligned_alloc(64, bytes);
    if (!packed.bias) return false;
    packed.bytes += bytes;
    std::memset(packed.bias, 0, bytes);
    std::memcpy(packed.bias, bias, packed.n * sizeof(float));
    return true;
}

// avx512_bf16 is chosen on AMD's cores only (dispatch.cpp). They read one stream as fast as two, and fastest fetched
// into the first-level cache line by line.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
constexpr bool kFetchFirst = true;
#else
constexpr bool kFetchFirst = false;
#endif
#if defined(__AVX512F__)
constexpr int kMaxTile = 14;                   // rows x 2 vectors: 28 accumulators of 32 registers
constexpr int kMaxWide = kFetchFirst ? 0 : 6;  // rows x 4 vectors, two panels at once; 0: never
#elif defined(__aarch64__)
constexpr int kMaxTile = 10;  // of as many registers GCC needs more for x
constexpr int kMaxWide = 5;
#else
constexpr int kMaxTile = 6;
constexpr int kMaxWide = 2;
#endif
constexpr int kChunk = 576;      // k in a panel's piece, which then stays in the second-level cache for all tiles
constexpr int kBlockRows = 252;  // rows whose piece of x stays there too
// Where every thread gets blocks of rows of its own: rows of a block for each thread at least, outputs for each row at
// most.
constexpr int64_t kOwnRows = 16, kOwnOutputs = 64;

// Weights that are fetched while others are computed with: at every turn the next `stride` bytes, at most two lines,
// into the first-level cache or the second. Spread evenly, the fetches leave the kernel's own loads room.
template <bool First> struct Fetch {
    const char* at;
    int64_t stride;

    static Fetch evenly(const char* at, int64_t bytes, int64_t turns) { return {at, (bytes + turns - 1) / turns}; }
    INLINE void turn() {
        __builtin_prefetch(at, 0, First ? 3 : 2);
        if (First && stride > 64) __builtin_prefetch(at + 64, 0, 3);  // into the second, lines come in pairs
        at += stride;
    }
};
using Ahead = Fetch<kFetchFirst>;

// Rows cut into tiles of nearly equal height, as many in each of `blocks`.
struct Tiles {
    int64_t rows, blocks, count;

    Tiles(int64_t rows, int highest, int64_t blocks = 1)
        : rows(rows), blocks(blocks), count((rows + highest * blocks - 1) / (highest * blocks) * blocks) {}
    int64_t begin(int64_t tile) const { return rows * tile / count; }
    int height(int64_t tile) const { return int(begin(tile + 1) - begin(tile)); }
};

// out[j * stride + i] = row i's lane j.
INLINE void store_transposed(float* out, int64_t stride, const float* const (&row)[4]) {
#if defined(__x86_64__)
    __m128 a = _mm_loadu_ps(row[0]), b = _mm_loadu_ps(row[1]), c = _mm_loadu_ps(row[2]), d = _mm_loadu_ps(row[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + stride, b);
    _mm_storeu_ps(out + 2 * stride, c);
    _mm_storeu_ps(out + 3 * stride, d);
#else
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 4; ++i) out[j * stride + i] = row[i][j];
#endif
}

// A tile's rows of x as fp32 [k][height]; rows lie `x_row` bytes apart.
template <class T> void pack_rows(const void* x, int64_t x_row, int64_t k, int height, float* out) {
    auto row_at = [&](int r) { return (const T*)((const char*)x + r * x_row); };
    int r = 0;
    for (; r + 4 <= height; r += 4) {
        int64_t i = 0;
        for (; i + W <= k; i += W) {
            float wide[4][W];
            const float* row[4];
            for (int j = 0; j < 4; ++j) {
                store(wide[j], load(row_at(r + j) + i));
                row[j] = wide[j];
            }
            for (int v = 0; v < W; v += 4) {
                const float* part[4] = {row[0] + v, row[1] + v, row[2] + v, row[3] + v};
                store_transposed(out + (i + v) * height + r, height, part);
            }
        }
        for (; i < k; ++i)
            for (int j = 0; j < 4; ++j) out[i * height + r + j] = widen_one(row_at(r + j) + i);
    }
    for (; r < height; ++r)
        for (int64_t i = 0; i < k; ++i) out[i * height + r] = widen_one(row_at(r) + i);
}

// The same in pairs, [k / 2][height]; an odd last k gets a zero beside it.
void pack_pairs(const void* x, int64_t x_row, int64_t k, int height, float* out) {
    pack_rows<float>(x, x_row, k / 2, height, out);
    if (k % 2)
        for (int r = 0; r < height; ++r)
            out[k / 2 * height + r] = float_of(((const bf16*)((const char*)x + r * x_row))[k - 1].bits);
}

template <class Y> void write_tile(const float* c, int width, int height, const float* bias, Y* y, int64_t y_row,
                                   int64_t left) {
    for (int r = 0; r < height; ++r)
        for (int v = 0; v * W < width && v * W < left; ++v) {
            F x = load(c + r * width + v * W);
            if (bias) x = x + load(bias + v * W);
            store_upto(y + r * y_row + v * W, x, left - v * W);
        }
}

// How tasks cut the panels: enough of them that no thread waits long for the last; whole pairs of panels, which few
// rows take two at once; small enough to share evenly.
INLINE int64_t panels_in_task(int64_t panels, int64_t blocks, bool wide) {
    const int64_t group = panels * blocks / (int64_t(num_threads()) * 8);
    return group < 2 ? (wide && panels > 2 * num_threads() ? 2 : 1) : lesser<int64_t>(group, 64) & ~int64_t(1);
}

// With enough rows every thread has blocks of its own, and what it reads of x and writes of y stays in its caches from
// one operator to the next. Each block reads the weights again, which costs less than lines of cores that share no
// cache. Blocks have `most` rows at most, for each of which there are up to `outputs` outputs if they are a thread's
// own.
INLINE Tiles cut_rows(int64_t rows, int64_t n, int highest = kMaxTile, int64_t most = kBlockRows,
                      int64_t outputs = kOwnOutputs) {
    const int64_t threads = num_threads(), blocks = (rows + most - 1) / most;
    const int64_t whole = (blocks + threads - 1) / threads * threads;
    const bool own = rows >= kOwnRows * threads * whole && n <= outputs * rows;
    return Tiles(rows, highest, own ? whole : blocks);
}

// The largest allowed output of each row, taken from a linear layer's sums as they come: nothing else of the outputs is
// kept.
// They are compared as they would have been rounded to `type`, and the first of equals is found, whatever the order of
// the tasks.
struct Argmax {
    int64_t* tokens;  // [rows]: the answer, or kNotFinite, kAllForbidden as in ChooseArgs
    DType type;
    AllowedOutputs allowed;
    int64_t rows = 0, parts = 0;
    // [parts][rows][2][W]: by lane the largest so far, infinite if one was no number; its vector's number
    float* found = nullptr;

    // A part is what one task at a time sees, in ascending order of outputs; so are the parts.
    void begin(int64_t rows_, int64_t parts_) {
        rows = rows_, parts = parts_;
        found = (float*)caller_scratch(2, sizeof(float) * parts * rows * 2 * W);
        for (int64_t i = 0; i < parts * rows; ++i) store(found + i * 2 * W, broadcast(-kInf));
    }

    // c [height][width] are outputs from `first` on, a multiple of W, of `n`, for the rows from `row` on.
    void take(const float* c, int width, int height, const float* bias, int64_t first, int64_t n, int64_t part,
              int64_t row) const {
        with_type(type, [&]<class Y>(Y*) {
            for (int r = 0; r < height; ++r) {
                float* best = found + (part * rows + row + r) * 2 * W;
                F most = load(best), where = load(best + W);
                const uint32_t* bits = allowed.of(row + r);
                for (int v = 0; v < width && first + v < n; v += W) {
                    F x = load(c + r * width + v);
                    if (bias) x = x + load(bias + v);
                    Y rounded[W];
                    store(rounded, x);
                    x = load(rounded);
                    x = select_less(x, broadcast(kInf), x, broadcast(kInf));
                    if (bits) x = select_set(bits[(first + v) / 32] >> (first + v) % 32, x, broadcast(-kInf));
                    if (const int left = int(lesser<int64_t>(W, n - first - v)); left < W) {
                        float some[W];
                        store(some, broadcast(-kInf));
                        store_first(some, x, left);
                        x = load(some);
                    }
                    where = select_less(most, x, broadcast(float((first + v) / W)), where);
                    most = max(most, x);
                }
                store(best, most);
                store(best + W, where);
            }
        });
    }

    void end() const {
        for (int64_t row = 0; row < rows; ++row) {
            float most = -kInf;
            int64_t token = kAllForbidden;
            for (int64_t part = 0; part < parts; ++part) {
                const float* best = found + (part * rows + row) * 2 * W;
                for (int lane = 0; lane < W; ++lane) {
                    if (best[lane] < most || best[lane] == -kInf) continue;
                    const int64_t place = int64_t(best[W + lane]) * W + lane;
                    if (best[lane] > most || place < token) most = best[lane], token = place;
                }
            }
            tokens[row] = most == kInf ? kNotFinite : token;
        }
    }
};

// All tasks of a linear layer: each takes a group of its panels, for a block of its rows.
template <class Run> void run_panels(Run& run, int64_t rows, int64_t blocks) {
    const int64_t groups = (run.panels() + run.group - 1) / run.group;
    if (run.argmax) run.argmax->begin(rows, groups);
    parallel(groups * blocks, run);
    if (run.argmax) run.argmax->end();
}

}}  // namespace pagemill
