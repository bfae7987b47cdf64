// Few rows times 4-bit weights, in bytes with AVX-512: weights are looked up (quantized_tables.h) and multiplied in
// registers. The sums are integers, so they are those of any other way.
#pragma once

#include "quantized_amx.h"
#include "quantized_bytes.h"
#include "quantized_panels.h"
#include "quantized_steps.h"
#include "quantized_tables.h"
#include "quantized_words.h"
#include "simd.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
namespace pagemill { namespace {

constexpr int kDirectRows = kRowsInTile;
constexpr int64_t kDirectAhead = kPanelsTogether * kGroupSteps * sizeof(PackedStep);  // the panel's next group

INLINE Dwords add_sixteens(Dwords sum, Weights weights, __m128i x) {
    return (Dwords)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_broadcast_i32x4(x));
}

// By itself, or else GCC keeps sums in memory.
template <int H> __attribute__((noinline)) void direct_product_of(const TileGroup& x, const PackedStep* from,
                                                                  int64_t steps, const bf16* scales, float* c,
                                                                  int64_t width, bool add) {
    Weights weights[kGroupK / 16][4];
    Dwords sum[H][4];
#pragma GCC unroll 8
    for (int r = 0; r < H; ++r)
        for (int i = 0; i < 4; ++i) sum[r][i] = Dwords{};
    for (int64_t h = 0; h < 2 * steps; ++h) {
        const PackedStep::Half& half = from[h / 2].half[h % 2];
        for (int64_t line = 0; line < int64_t(sizeof half); line += 64)
            fetch_line((const char*)&half + kDirectAhead + line);
        __m128i low[H], high[H];
        for (int r = 0; r < H; ++r) {
            low[r] = _mm_load_si128((const __m128i*)(x.low[r] + h * kHalfK));
            high[r] = _mm_load_si128((const __m128i*)(x.low[r] + h * kHalfK + 16));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            Weights a, b;
            look_up(half, i, a, b);
            weights[2 * h][i] = a;
            weights[2 * h + 1][i] = b;
#pragma GCC unroll 8
            for (int r = 0; r < H; ++r) {
                sum[r][i] = add_sixteens(sum[r][i], a, low[r]);
                sum[r][i] = add_sixteens(sum[r][i], b, high[r]);
            }
        }
    }
    const F scale = load(scales);
    const int32_t* high = x.high;
#pragma GCC unroll 8
    for (int r = 0; r < H; ++r) {
        if (x.has_high[r]) {
            Dwords upper[4] = {};
            for (uint64_t left = x.has_high[r]; left;) {
                const int part = __builtin_ctzll(left) / 4;
                const __mmask8 fours = left >> part * 4 & 15;
                const __m128i x16 = _mm_maskz_expand_epi32(fours, _mm_loadu_si128((const __m128i*)high));
                high += __builtin_popcount(fours);
                left &= ~(uint64_t(15) << part * 4);
                for (int i = 0; i < 4; ++i) upper[i] = add_sixteens(upper[i], weights[part][i], x16);
            }
            for (int i = 0; i < 4; ++i) sum[r][i] += upper[i] << 8;
        }
        // The four parts of each output's sum, brought together.
        const __m512i s0 = (__m512i)sum[r][0], s1 = (__m512i)sum[r][1], s2 = (__m512i)sum[r][2],
                      s3 = (__m512i)sum[r][3];
        const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(s0, s1), _mm512_unpackhi_epi32(s0, s1)),
                      b = _mm512_add_epi32(_mm512_unpacklo_epi32(s2, s3), _mm512_unpackhi_epi32(s2, s3));
        const Dwords all = (Dwords)_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        float* out = c + r * width;
        store(out, fma(to_float(all + x.correction[r]), scale * broadcast(x.scale[r]), add ? load(out) : zero()));
    }
}

// c [height][width] (+)= a tile of rows times a panel's group.
INLINE void direct_product(const TileGroup& x, int height, const PackedStep* from, int64_t steps, const bf16* scales,
                           float* c, int64_t width, bool add) {
    with_count<kDirectRows>(height, [&]<int H>() { direct_product_of<H>(x, from, steps, scales, c, width, add); });
}

}}  // namespace pagemill
#else
namespace pagemill { namespace {

constexpr int kDirectRows = 0;

INLINE void direct_product(const TileGroup&, int, const PackedStep*, int64_t, const bf16*, float*, int64_t, bool) {}

}}  // namespace pagemill
#endif
