// Attention in bf16: softmax weights, and the products of queries with keys and of weights with values, on tiles (AMX)
// or by instructions for pairs (AVX512_BF16).
#pragma once

#include "amx_tiles.h"
#include "attention_tiles.h"
#include "linear_tiles.h"
#include "simd.h"

#if defined(__AVX512BF16__)

namespace pagemill { namespace {

// Softmax weights in bf16, 32 scores at a time, in words of 16 bits (after Schraudolph, "A Fast, Compact Approximation
// of the Exponential Function", 1999). x is rounded to 1/256 and held as in bf16, 8 biased bits before the point and 8
// after it. Half of that, as bits of bf16, runs straight from one power of two to the next; what a table adds to it
// before it is halved and rounded makes it 2^x, rounded to nearest. Relative error: 1.9e-3 in the mean (rms), where
// rounding alone makes 1.7e-3.
//
// Weights are relative to the score of a row's first key in the partition, as no pass over the scores has to come
// before then. A row whose weights grow too large by that, or are not numbers, takes the greatest score instead.

constexpr int kPairStep = 32;   // keys that weights are made for, and a tile multiplies, at a time
constexpr float kXUnits = 256;  // of x, per power of two
constexpr int kLift = 32;       // what x is lowered by, so that the table's entries are positive
constexpr float kMostSum = 0x1p60f, kMostExponent = 100;  // weights are held below 2^kMostExponent

struct ExponentialTable {
    alignas(64) uint8_t at[128] = {};

    static constexpr int mantissa(int fraction) {  // of 2^(fraction / 256), 7 bits
        double term = 1, sum = 0.5;  // rounds
        for (int i = 1; i < 20; ++i) sum += 128 * (term *= fraction * 0.69314718055994531 / 256 / i);
        return int(sum);
    }
    // Entry e of the fractions 2i and 2i + 1: (2i + e + 1) / 2 and (2i + 1 + e + 1) / 2, cut off, are their mantissas.
    constexpr ExponentialTable() {
        for (int i = 0; i < 128; ++i) {
            const int even = mantissa(2 * i), same = even == mantissa(2 * i + 1);
            at[(i + 128 - kLift / 2) % 128] = uint8_t(2 * (even - i) - same + kLift);
        }
    }
};
constexpr ExponentialTable kExponentials;

struct Weigher {
    const __m512i low = _mm512_load_si512(kExponentials.at), high = _mm512_load_si512(kExponentials.at + 64);
    const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);  // of what packing takes from two vectors
    const float units;  // per unit of a score
    const F factor, most = broadcast((127 + kMostExponent) * kXUnits);

    // Scores are multiplied by `scale`.
    explicit Weigher(float scale) : units(scale * 1.44269504f * kXUnits), factor(broadcast(units)) {}

    // What is added to a row's scores, times `units`.
    float shift(float reference) const { return 127 * kXUnits - kLift - reference * units; }

    // Weights of 32 keys, those of `keys`; the others are 0.
    INLINE __m512i operator()(const float* scores, F shift, __mmask32 keys) const {
        const auto fixed = [&](F score) { return _mm512_cvtps_epi32(min(fma(score, factor, shift), most).v); };
        const __m512i packed = _mm512_packus_epi32(fixed(load(scores)), fixed(load(scores + W)));
        const __m512i x = _mm512_permutexvar_epi64(in_order, packed);
        constexpr __mmask64 kLowBytes = 0x5555555555555555;
        const __m512i e = _mm512_maskz_permutex2var_epi8(kLowBytes, low, _mm512_srli_epi16(x, 1), high);
        return _mm512_maskz_avg_epu16(keys, x, e);
    }
};

INLINE F add_weights(F sums, __m512i weights) {
    return {_mm512_dpbf16_ps(sums.v, (__m512bh)weights, (__m512bh)_mm512_set1_epi16(0x3f80))};
}

INLINE __mmask32 first_bits(int count) {
    return count >= 32 ? ~__mmask32(0) : count <= 0 ? 0 : (__mmask32(1) << count) - 1;
}

// Of 32 keys from `key` on, those in a range.
INLINE __mmask32 keys_in(const KeyRange& range, int key) {
    return first_bits(int(range.end) - key) & ~first_bits(int(range.begin) - key);
}

INLINE bool is_sound(const KeyRange& range, float sum) { return range.begin >= range.end || sum < kMostSum; }

INLINE Softmax softmax_of(const KeyRange& range, float reference, float sum) {
    if (range.begin >= range.end) return {-kInf, 0.0f};
    return {reference, is_sound(range, sum) ? sum : __builtin_nanf("")};
}

// Of `top`, which is NaN once a score was, and 32 keys from `key` on.
INLINE F greatest(F top, const float* scores, __mmask32 keys) {
    for (int half = 0; half < 2; ++half, keys >>= 16) {
        const F x{_mm512_mask_loadu_ps(broadcast(-kInf).v, __mmask16(keys), scores + half * W)};
        top = {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_max_ps(x.v, top.v), x.v)};
    }
    return top;
}
INLINE float greatest_lane(F top) {
    return _mm512_cmp_ps_mask(top.v, top.v, _CMP_UNORD_Q) ? __builtin_nanf("") : maximum(top);
}

struct FlushSubnormals {
    const unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
    FlushSubnormals(const FlushSubnormals&) = delete;
};

INLINE void cap_scores(float* scores, int count, float scale, float soft_cap) {
    const FlushSubnormals rounding;
    for (int i = 0; i < count; i += W)
        store(scores + i, tanh(load(scores + i) * broadcast(scale / soft_cap)) * broadcast(soft_cap));
}

// What scores are left to be multiplied by.
INLINE float natural_scale(const AttentionArgs& args) { return args.soft_cap != 0.0f ? 1.0f : args.scale; }

#if defined(__AMX_BF16__)

// bf16 attention's products on tiles (AMX), and the same sums on vectors. A tile product (TDPBF16PS) adds to each of
// its sums a step of 32 neighbouring k as two chains of multiply-adds from zero on, one over the even k and one over
// the odd, which are added to each other and then to the sum; subnormal numbers are taken for zero throughout. The
// products are exact, so the same on vectors in fp32 gives the same bits: one vector of pairs holds a link of either
// chain.
constexpr int kPieces = 1;  // of a step: it lies together in its operand

struct TileProducts {
    static constexpr int kHeight = kTileHeight;

    explicit TileProducts(int height) {
        const TileConfig config(height);
        _tile_loadconfig(&config);
    }
    ~TileProducts() { _tile_release(); }
    TileProducts(const TileProducts&) = delete;

    // c (rows of M tiles, `height` each, c_row floats apart) [..][16 N] = M tiles of a times N tiles over `steps`; tile
    // n of step s at b(s, n, 0), its rows b_row bytes apart.
    template <int M, int N, class B>
    INLINE static void multiply(const TileOperand& a, const B& b, int64_t b_row, int steps, float* c, int64_t c_row,
                                int height) {
        __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
        _tile_zero(0);
        if (N == 2) _tile_zero(1);
        if (M == 2) _tile_zero(2);
        if (M == 2 && N == 2) _tile_zero(3);
        for (int s = 0; s < steps; ++s) {
            const char* x = a.data + s * a.step;
            _tile_loadd(6, b(s, 0, 0), b_row);
            _tile_loadd(4, x, a.row);
            _tile_dpbf16ps(0, 4, 6);
            if (N == 2) {
                _tile_loadd(7, b(s, 1, 0), b_row);
                _tile_dpbf16ps(1, 4, 7);
            }
            if (M == 2) {
                _tile_loadd(5, x + a.tile, a.row);
                _tile_dpbf16ps(2, 5, 6);
                if (N == 2) _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, c, c_row * 4);
        if (N == 2) _tile_stored(1, c + W, c_row * 4);
        if (M == 2) _tile_stored(2, c + height * c_row, c_row * 4);
        if (M == 2 && N == 2) _tile_stored(3, c + height * c_row + W, c_row * 4);
    }
};

// How few rows' factors and weights are held, and read for a pair: two floats.
constexpr int kFactors = 2;
constexpr int kPairRows = 6;  // (token, head) rows at most
constexpr int pair_vectors(int rows) { return rows <= 3 ? 4 : 2; }

INLINE void put_factors(float* to, int64_t next, const bf16* pair) {
    to[0] = widen_one(pair);
    to[next] = widen_one(pair + 1);
}
INLINE void put_weights(float* to, const bf16* weights, int count) {
    for (int i = 0; i < count; i += W) store(to + i, load(weights + i));
}

// The two chains of a step, for MR rows and NV vectors.
template <int MR, int NV> struct PairChains {
    F even[MR][NV], odd[MR][NV];

    INLINE void begin_step() {
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < NV; ++v) even[r][v] = odd[r][v] = zero();
    }
    // Vector v of pairs, y(v), times each row's factors x[r * row] for its first elements and x[r * row + next] for
    // its second.
    template <class Y> INLINE void add(const Y& y, const float* x, int64_t row, int64_t next, bool first, bool second) {
        for (int v = 0; v < NV; ++v) {
            F e, o;
            split_pairs(y(v), e, o);
            for (int r = 0; r < MR && first; ++r) even[r][v] = fma(broadcast(x[r * row]), e, even[r][v]);
            for (int r = 0; r < MR && second; ++r) odd[r][v] = fma(broadcast(x[r * row + next]), o, odd[r][v]);
        }
    }
    // The step's chains are added to each other, and to the sums at `out`, which begin with the first step.
    INLINE void end_step(float* out, int64_t row, bool first) const {
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < NV; ++v) {
                float* at = out + r * row + v * W;
                store(at, (first ? zero() : load(at)) + (even[r][v] + odd[r][v]));
            }
    }
    INLINE void end(float*, int64_t) const {}
};

#else

// bf16 attention's products by instructions for pairs (AVX512_BF16): a sum is one chain over k, of whose links each
// adds two neighbouring k; subnormal numbers are taken for zero.
// Pieces of a step, each of which lies together in its operand: with blocks of 16 tokens, values are read where they
// lie.
constexpr int kPieces = 2;

// c [height][16 N], c_row floats apart = rows of a times N vectors of pairs over `steps` of 32 k.
template <int H, int N, class B>
INLINE void dot_tile(const TileOperand& a, const B& b, int64_t b_row, int steps, float* c, int64_t c_row) {
    F sum[H][N];
    for (int r = 0; r < H; ++r)
        for (int n = 0; n < N; ++n) sum[r][n] = zero();
    for (int s = 0; s < steps; ++s) {
        const char* x = a.data + s * a.step;
        for (int piece = 0; piece < kPieces; ++piece) {
            const char* from[N];
            for (int n = 0; n < N; ++n) from[n] = b(s, n, piece);
            for (int pair = 0; pair < kPairStep / 2 / kPieces; ++pair, x += 4) {
                F y[N];
                for (int n = 0; n < N; ++n) y[n] = load((const Pair*)(from[n] + pair * b_row));
                for (int r = 0; r < H; ++r) {
                    const F factor = broadcast(widen_one((const float*)(x + r * a.row)));
                    for (int n = 0; n < N; ++n) sum[r][n] = multiply_add(factor, y[n], sum[r][n], (const Pair*)nullptr);
                }
            }
        }
    }
    for (int r = 0; r < H; ++r)
        for (int n = 0; n < N; ++n) store(c + r * c_row + n * W, sum[r][n]);
}

struct TileProducts {
    static constexpr int kHeight = 12;

    explicit TileProducts(int) {}

    // c (rows of M tiles, `height` each, c_row floats apart) [..][16 N] = M tiles of a times N tiles over `steps`;
    // piece p of tile n of step s at b(s, n, p), its rows b_row bytes apart.
    template <int M, int N, class B>
    INLINE static void multiply(const TileOperand& a, const B& b, int64_t b_row, int steps, float* c, int64_t c_row,
                                int height) {
        for (int m = 0; m < M; ++m)
            with_count<kHeight>(height, [&]<int H>() __attribute__((always_inline)) {
                const TileOperand tile{a.data + m * a.tile, a.row, a.step, 0};
                dot_tile<H, N>(tile, b, b_row, steps, c + m * height * c_row, c_row);
            });
    }
};

// How few rows' factors and weights are held, and read for a pair: as that pair, in the place of a float.
constexpr int kFactors = 1;
constexpr int kPairRows = 12;  // (token, head) rows at most
constexpr int pair_vectors(int rows) { return rows <= 6 ? 4 : 2; }

INLINE void put_factors(float* to, int64_t, const bf16* pair) { std::memcpy(to, pair, sizeof *to); }
INLINE void put_weights(float* to, const bf16* weights, int count) {
    std::memcpy(to, weights, count * sizeof *weights);
}

// Chains for MR rows and NV vectors.
template <int MR, int NV> struct PairChains {
    F sum[MR][NV];

    INLINE PairChains() {
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < NV; ++v) sum[r][v] = zero();
    }
    INLINE void begin_step() {}
    // Vector v of pairs, y(v), times each row's pair x[r * row]; of the first or second elements only, if so told.
    template <class Y> INLINE void add(const Y& y, const float* x, int64_t row, int64_t, bool first, bool second) {
        constexpr __mmask32 kFirst = 0x55555555;
        const __mmask32 taken = (first ? kFirst : 0) | (second ? ~kFirst : 0);
        for (int v = 0; v < NV; ++v) {
            __m512i pairs = y(v);
            if (!first || !second) pairs = _mm512_maskz_mov_epi16(taken, pairs);
            for (int r = 0; r < MR; ++r)
                sum[r][v] =
                    multiply_add(broadcast(x[r * row]), F{_mm512_castsi512_ps(pairs)}, sum[r][v], (const Pair*)nullptr);
        }
    }
    INLINE void end_step(float*, int64_t, bool) const {}
    INLINE void end(float* out, int64_t row) const {
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < NV; ++v) store(out + r * row + v * W, sum[r][v]);
    }
};

#endif

}}  // namespace pagemill
#endif
