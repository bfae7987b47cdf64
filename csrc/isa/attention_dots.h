// bf16 attention's products by instructions for pairs (AVX512_BF16): a sum is one chain over k, of whose links each
// adds two neighbouring k; subnormal numbers are taken for zero.
#pragma once

#include "attention_tiles.h"
#include "attention_weights.h"
#include "panels.h"
#include "simd.h"

#include <cstring>

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#include <immintrin.h>

namespace pagemill {
namespace {

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
            with_count(height, Upto<kHeight>{}, [&](auto rows) __attribute__((always_inline)) {
                const TileOperand tile{a.data + m * a.tile, a.row, a.step, 0};
                dot_tile<decltype(rows)::value, N>(tile, b, b_row, steps, c + m * height * c_row, c_row);
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
    // Vector v of pairs, at(v), times each row's pair x[r * row]; of the first or second elements only, if so told.
    template <class At> INLINE void add(const At& at, const float* x, int64_t row, int64_t, bool first, bool second) {
        constexpr __mmask32 kFirst = 0x55555555;
        const __mmask32 taken = (first ? kFirst : 0) | (second ? ~kFirst : 0);
        for (int v = 0; v < NV; ++v) {
            F y = load((const Pair*)at(v));
            if (!first || !second) y.v = _mm512_castsi512_ps(_mm512_maskz_mov_epi16(taken, _mm512_castps_si512(y.v)));
            for (int r = 0; r < MR; ++r)
                sum[r][v] = multiply_add(broadcast(x[r * row]), y, sum[r][v], (const Pair*)nullptr);
        }
    }
    INLINE void end_step(float*, int64_t, bool) const {}
    INLINE void end(float* out, int64_t row) const {
        for (int r = 0; r < MR; ++r)
            for (int v = 0; v < NV; ++v) store(out + r * row + v * W, sum[r][v]);
    }
};

}  // namespace
}  // namespace pagemill
#endif
