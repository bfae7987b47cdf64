// Products of few rows with weights held in integers (affine.h), which are widened in registers.
#pragma once

#include "../kernels.h"
#include "affine.h"
#include "compile_time.h"
#include "panels.h"
#include "simd.h"

namespace pagemill {
namespace {

constexpr int kFewAffine = W == 16 ? 9 : 4;  // so few rows

// c [MR][NR] = a [k][MR] times a panel of `blocks`, for so few rows that nothing widened is used again. GCC keeps the
// sums in registers only if all loops over them are unrolled early.
template <int MR, int Bits> void affine_product(const float* a, const AffineBlock<Bits>* block, int64_t blocks,
                                                float* c) {
    F acc[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2; ++v) acc[r][v] = zero();
    for (; blocks; --blocks, ++block) {
        fetch_after(block);
        for (int word = 0; word < Bits; ++word) {
            const Integers all[2] = {load_integers(block->words[0][word]), load_integers(block->words[1][word])};
            for (int i = 0; i < AffineBlock<Bits>::kTogether; ++i, a += MR)
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v) {
                    const F w = fma(lowest_bits<Bits>(all[v] >> (i * Bits)), load(block->scale + v * W),
                                    load(block->low + v * W));
                    for (int r = 0; r < MR; ++r) acc[r][v] = fma(broadcast(a[r]), w, acc[r][v]);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2; ++v) store(c + (r * 2 + v) * W, acc[r][v]);
}

INLINE void few_rows_affine(const PackedLinear& weight, int64_t panel, int rows, const float* a, float* c) {
    with_affine(weight.format, [&](auto* t) {
        using Block = Pointee<decltype(t)>;
        const int64_t blocks = weight.k / kAffineK;
        const Block* from = (const Block*)weight.panels + panel * blocks;
        with_count(rows, Upto<kFewAffine>{}, [&](auto r) { affine_product<decltype(r)::value>(a, from, blocks, c); });
    });
}

}  // namespace
}  // namespace pagemill
