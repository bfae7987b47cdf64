// What attention on plain vectors is made of: tiles of scores and of weighted values, softmax over a partition; and the
// folding of partitions, which all ways share.
#pragma once

#include "attention_plan.h"
#include "math.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int kScoreRow = kPartition + 4 * W;  // a group of key vectors may end beyond the partition
// (token, head) rows that run side by side in registers, and vectors of each row.
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
constexpr int kTileRows = 12;
constexpr int vectors_beside(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kTileRows = 6;
constexpr int vectors_beside(int rows) { return rows <= 2 ? 4 : 2; }
#endif

// Memory is slower than the products, and the hardware starts anew at each page: what the first rows read is fetched
// before.
constexpr int kBlocksAhead = 4;  // of values

// The left operand of a product: tile t of step s at data + t * tile + s * step, its rows `row` apart; all in bytes.
struct TileOperand {
    const char* data;
    int64_t row, step, tile;
};

template <class T> INLINE void load_each(const T* p, F (&x)[1]) { x[0] = load(p); }
INLINE void load_each(const bf16* p, F (&x)[2]) { load_pairs(p, x[0], x[1]); }
INLINE void load_each(const int8_t* p, F (&x)[4]) {
    Dwords fours;
    std::memcpy(&fours, p, sizeof fours);
    for (int i = 0; i < 4; ++i) x[i] = to_float(fours << (24 - 8 * i) >> 24);
}

// scores [MR][kScoreRow] = q [dims][MR] · NV vectors of W keys; vector v of dimension d, or of so many that lie side by
// side, lies at key[v] + d * key_dim. With `ahead`, the lines at ahead[v] + d * key_dim are fetched.
template <int MR, class T>
void score_tile(const float* q, const T* const* key, const T* const* ahead, int64_t key_dim, int dims, float* scores) {
    constexpr int NV = vectors_beside(MR);
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    const T *at[NV], *next[NV];
    for (int v = 0; v < NV; ++v) {
        at[v] = key[v];
        next[v] = ahead ? ahead[v] : nullptr;
    }
    constexpr int P = kSideBySide<T>;
    for (int d = 0; d < dims / P; ++d, q += P * MR) {
        F k[NV][P];
        for (int v = 0; v < NV; ++v) load_each(at[v] + d * key_dim, k[v]);
        for (int v = 0; v < NV && ahead; ++v) fetch_line(next[v] + d * key_dim);
        for (int p = 0; p < P; ++p)
            for (int r = 0; r < MR; ++r) {
                const F x = broadcast(q[p * MR + r]);
                for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, k[v][p], acc[r][v]);
            }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(scores + r * kScoreRow + v * W, acc[r][v]);
}

// Where a partition's values lie: token t of the partition at block[t / tokens] + t % tokens * stride; so many
// as lie side by side, P, at block[t / tokens] + t % tokens / P * stride. Behind the last block come those to fetch, if
// any are.
template <class T> struct Values {
    const T* block[kPartition / 8 + kBlocksAhead];
    int64_t stride;
    int tokens;
};

// out [MR][row] = sum over keys begin .. end - 1 of weights [MR][kScoreRow] * NV vectors of values from dimension `dim`
// on.
template <int MR, int NV, class T>
void value_tile(const float* weights, const Values<T>& values, bool ahead, int dim, int begin, int end, float* out,
                int64_t row) {
    F acc[MR][NV];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    for (int key = begin; key < end;) {
        const int block = key / values.tokens;
        const int stop = lesser(end, (block + 1) * values.tokens);
        constexpr int P = kSideBySide<T>;
        const int64_t offset = (key - block * values.tokens) / P * values.stride + dim * P;
        const T *at = values.block[block] + offset, *next = ahead ? values.block[block + kBlocksAhead] + offset : at;
        // Keys [first, last) of those that lie side by side: what lies outside a range may be NaN.
        auto add = [&](int first, int last) __attribute__((always_inline)) {
            F x[NV][P];
            for (int v = 0; v < NV; ++v) load_each(at + v * W * P, x[v]);
            for (int p = first; p < last; ++p, ++key)
                for (int r = 0; r < MR; ++r) {
                    const F w = broadcast(weights[r * kScoreRow + key]);
                    for (int v = 0; v < NV; ++v) acc[r][v] = fma(w, x[v][p], acc[r][v]);
                }
            at += values.stride;
            next += values.stride;
        };
        if (key % P) add(key % P, lesser(P, key % P + stop - key));
        while (key + P <= stop) {
            for (int v = 0; v < NV && ahead; v += 4 / (P * sizeof(T))) fetch_line(next + v * W * P);
            add(0, P);
        }
        if (key < stop) add(0, stop - key);
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(out + r * row + v * W, acc[r][v]);
}

template <int MR, class T>
void value_rows(const float* weights, const Values<T>& values, bool ahead, int dims, int begin, int end, float* out) {
    constexpr int NV = vectors_beside(MR);
    int dim = 0;
    for (; dim + NV * W <= dims; dim += NV * W)
        value_tile<MR, NV>(weights, values, ahead, dim, begin, end, out + dim, dims);
    switch ((dims - dim) / W) {
        case 3: value_tile<MR, (NV > 3 ? 3 : 1)>(weights, values, ahead, dim, begin, end, out + dim, dims); break;
        case 2: value_tile<MR, (NV > 2 ? 2 : 1)>(weights, values, ahead, dim, begin, end, out + dim, dims); break;
        case 1: value_tile<MR, 1>(weights, values, ahead, dim, begin, end, out + dim, dims); break;
        default: break;
    }
}

template <class T> struct TileKernels {
    void (*score)(const float*, const T* const*, const T* const*, int64_t, int, float*);
    void (*value)(const float*, const Values<T>&, bool, int, int, int, float*);
    int vectors;
};

template <class T, int... R> const TileKernels<T>& tile_kernels(int rows, Sequence<R...>) {
    static constexpr TileKernels<T> table[] = {{score_tile<R + 1, T>, value_rows<R + 1, T>, vectors_beside(R + 1)}...};
    return table[rows - 1];
}

// What a partition's scores and weights are multiplied by, by token, zero outside the range; null: nothing.
struct TokenScales { const float *key = nullptr, *value = nullptr; };

// Scores of keys [begin, end) of a partition become weights exp(score - maximum) in place, zero over the rest of
// [from, to). Returns maximum and sum; -inf and 0 for an empty range. Scores are multiplied by `scales` of keys
// first, and the weights that are left, not their sum, by those of values.
struct Softmax { float reference, sum; };

INLINE Softmax softmax(float* s, int begin, int end, int from, int to, float soft_cap, const TokenScales& scales) {
    const int first = from / W, last = (to + W - 1) / W;
    if (begin >= end) {
        for (int v = first; v < last; ++v) store(s + v * W, zero());
        return {-kInf, 0.0f};
    }
    // Pairs of vectors, for two independent chains of each reduction; what lies outside the range is masked.
    const int own_first = begin / W / 2 * 2, own_last = (end + 2 * W - 1) / (2 * W) * 2;
    float lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = float(i);
    const F iota = load(lanes), none = broadcast(-kInf);
    auto masked = [&](int v) __attribute__((always_inline)) {
        F x = load(s + v * W);
        if (scales.key) x = x * load(scales.key + v * W);
        const bool edge = v * W < begin || v * W + W > end;
        if (soft_cap != 0.0f) x = tanh(x * broadcast(1.0f / soft_cap)) * broadcast(soft_cap);
        if (edge) {
            x = select_less(iota, broadcast(float(begin - v * W)), none, x);
            x = select_less(iota, broadcast(float(end - v * W)), x, none);
        }
        if (edge || soft_cap != 0.0f || scales.key) store(s + v * W, x);
        return x;
    };
    F top_even = none, top_odd = none;
    for (int v = own_first; v < own_last; v += 2) {
        top_even = max(top_even, masked(v));
        top_odd = max(top_odd, masked(v + 1));
    }
    const float maximum_score = maximum(max(top_even, top_odd));
    const F m = broadcast(maximum_score);
    F even = zero(), odd = zero();
    for (int v = own_first; v < own_last; v += 2) {
        const F p = exp_nonpositive(load(s + v * W) - m), q = exp_nonpositive(load(s + v * W + W) - m);
        even = even + p;
        odd = odd + q;
        store(s + v * W, scales.value ? p * load(scales.value + v * W) : p);
        store(s + v * W + W, scales.value ? q * load(scales.value + v * W + W) : q);
    }
    for (int v = first; v < own_first; ++v) store(s + v * W, zero());
    for (int v = own_last; v < last; ++v) store(s + v * W, zero());
    return {maximum_score, sum(even + odd)};
}

// Adds scores of remainders [begin, end) to those of the keys.
INLINE void add_scores(float* scores, const float* more, const KeyRange& keys) {
    for (int64_t i = keys.begin; i < keys.end; ++i) scores[i] += more[i];
}

// A row's state: values weighted relative to a maximum, [dims], then that maximum and the sum of weights, padded to a
// vector.
INLINE bool is_empty(float maximum, float sum) { return maximum == -kInf && sum == 0.0f; }

// Adds a partition's values and sum to a state; both are multiplied by what a greater maximum leaves of them.
INLINE void add_partition(float* state, float before, const float* values, float sum, float after, int dims) {
    const F a = broadcast(before), b = broadcast(after);
    for (int d = 0; d < dims; d += W) store(state + d, fma(load(state + d), a, load(values + d) * b));
    state[dims + 1] = state[dims + 1] * before + sum * after;
}

// Folds the next partition into rows' states, which lie `size` apart; its values lie `dims` apart.
void fold(int rows, float* state, int64_t size, const Softmax* part, const float* values, int64_t values_size,
          int dims) {
    for (int first = 0; first < rows; first += W, state += W * size, part += W, values += W * values_size) {
        const int count = lesser(W, rows - first);
        float before[W] = {}, after[W] = {}, top[W];
        for (int r = 0; r < count; ++r) {
            const float maximum = state[r * size + dims];
            top[r] = maximum < part[r].reference ? part[r].reference : maximum;
            before[r] = maximum - top[r];
            after[r] = part[r].reference - top[r];
        }
        store(before, exp_nonpositive(load(before)));
        store(after, exp_nonpositive(load(after)));
        for (int r = 0; r < count; ++r) {
            if (is_empty(part[r].reference, part[r].sum)) continue;
            float* to = state + r * size;
            add_partition(to, before[r], values + r * values_size, part[r].sum, after[r], dims);
            to[dims] = top[r];
        }
    }
}

// Folds a row's next partitions, whose states lie `size` apart, as `fold` does one by one. What their values are
// multiplied by depends on maxima alone, and is computed for many at a time.
void fold_partitions(int64_t count, float* state, const float* parts, int64_t size, int dims) {
    float top = state[dims];
    for (; count > 0; count -= W, parts += W * size) {
        const int here = int(lesser<int64_t>(count, W));
        float before[W] = {}, after[W] = {};
        for (int i = 0; i < here; ++i) {
            const float maximum = top, reference = parts[i * size + dims];
            top = maximum < reference ? reference : maximum;
            before[i] = maximum - top;
            after[i] = reference - top;
        }
        store(before, exp_nonpositive(load(before)));
        store(after, exp_nonpositive(load(after)));
        for (int i = 0; i < here; ++i) {
            const float* from = parts + i * size;
            if (is_empty(from[dims], from[dims + 1])) continue;
            add_partition(state, before[i], from, from[dims + 1], after[i], dims);
        }
    }
    state[dims] = top;
}

}}  // namespace pagemill
