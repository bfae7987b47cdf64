// bf16 attention's products on tiles (AMX), and the same sums on vectors. A tile product (TDPBF16PS) adds to each of
// its sums a step of 32 neighbouring k as two chains of multiply-adds from zero on, one over the even k and one over
// the odd, which are added to each other and then to the sum; subnormal numbers are taken for zero throughout. The
// products are exact, so the same on vectors in fp32 gives the same bits: one vector of pairs holds a link of either
// chain.
#pragma once

#include "amx_tiles.h"
#include "attention_tiles.h"
#include "simd.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace pagemill {
namespace {

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
    // Vector v of pairs, at(v), times each row's factors x[r * row] for its first elements and x[r * row + next] for
    // its second.
    template <class At> INLINE void add(const At& at, const float* x, int64_t row, int64_t next, bool first,
                                        bool second) {
        for (int v = 0; v < NV; ++v) {
            F e, o;
            load_pairs(at(v), e, o);
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

}  // namespace
}  // namespace pagemill
#endif
