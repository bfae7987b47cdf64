// A step of 4-bit weights for AVX-512: what the 16 values of q stand for, for one output and 32 k, is a table of 16
// bytes. It is made once, and looked up 32 times by a shuffle of bytes. So a vector of weights has 16 neighbouring k of
// 4 outputs, one in each lane of 128 bits; four such vectors are a panel's. From there, 8-bit lines are a transposition
// away (expand_steps), and few rows multiply the vectors as they are, without memory between (quantized_direct.h).
#pragma once

#include "quantized_panels.h"
#include "simd.h"

#if defined(__AVX512BW__)
namespace pagemill { namespace {

constexpr int kLanes = 4;  // of 128 bits, and as many outputs in each: output 4 * lane + i is in vector i of a panel

struct alignas(64) PackedStep {
    struct Half {
        struct { uint16_t slope[4], offset[4]; } lane[kLanes];
        uint8_t q[4][kLanes][16];  // k 0 .. 15 in lower halves of a byte, k 16 .. 31 in upper ones
    } half[2];

    // The 32 k of a half.
    void put_half(int output, int h, const uint8_t* values, uint16_t slope, uint16_t offset) {
        Half& of = half[h];
        of.lane[output / 4].slope[output % 4] = slope;
        of.lane[output / 4].offset[output % 4] = offset;
        uint8_t* to = of.q[output % 4][output / 4];
        for (int i = 0; i < 16; ++i) to[i] = uint8_t(values[i] | values[i + 16] << 4);
    }
    int weight(int output, int k) const {
        const Half& of = half[k / kHalfK];
        const int value = of.q[output % 4][output / 4][k % 16] >> shift(k) & 15;
        return uint16_t(of.lane[output / 4].slope[output % 4] * value + of.lane[output / 4].offset[output % 4]) >> 8;
    }
    static int shift(int k) { return k % kHalfK / 16 * 4; }
};

typedef int8_t Weights __attribute__((vector_size(64)));

// In every lane, word i of it eight times.
INLINE __m512i all_words(__m512i lanes, int i) {
    return _mm512_shuffle_epi8(lanes, _mm512_set1_epi16(int16_t((2 * i + 1) << 8 | 2 * i)));
}

// Of a half, the weights of vector i: of k 0 .. 15, and of k 16 .. 31.
INLINE void look_up(const PackedStep::Half& half, int i, Weights& low, Weights& high) {
    const __m512i even_values = _mm512_set_epi16(14, 12, 10, 8, 6, 4, 2, 0, 14, 12, 10, 8, 6, 4, 2, 0, 14, 12, 10, 8, 6,
                                                 4, 2, 0, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512i lanes = _mm512_load_si512(half.lane), slope = all_words(lanes, i);
    const __m512i even = _mm512_add_epi16(_mm512_mullo_epi16(slope, even_values), all_words(lanes, 4 + i));
    const __m512i odd = _mm512_add_epi16(even, slope);
    const __m512i up = _mm512_set_epi64(0x0f0f0d0d0b0b0909, 0x0707050503030101, 0x0f0f0d0d0b0b0909, 0x0707050503030101,
                                        0x0f0f0d0d0b0b0909, 0x0707050503030101, 0x0f0f0d0d0b0b0909, 0x0707050503030101);
    const __m512i table = _mm512_mask_shuffle_epi8(odd, 0x5555555555555555, even, up);
    const __m512i q = _mm512_load_si512(half.q[i]), four_bits = _mm512_set1_epi8(15);
    low = (Weights)_mm512_shuffle_epi8(table, _mm512_and_si512(q, four_bits));
    high = (Weights)_mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(q, 4), four_bits));
}

constexpr int kTurnsInStep = 2 * 4;  // of expand_steps

// The 8-bit lines of packed steps. By itself: within its caller GCC makes it a tenth slower.
__attribute__((noinline)) void expand_steps(const PackedStep* from, int64_t steps, int8_t* lines, NextPiece fetch) {
    for (int64_t s = 0; s < steps; ++s, ++from)
        for (const PackedStep::Half& half : from->half) {
            Weights weights[2][4];
            for (int i = 0; i < 4; ++i) {
                fetch.turn();
                look_up(half, i, weights[0][i], weights[1][i]);
            }
            for (const Weights* part : weights) {  // fours of k by output instead of outputs by fours of k
                const __m512i *w = (const __m512i*)part, a = _mm512_unpacklo_epi32(w[0], w[1]),
                              b = _mm512_unpacklo_epi32(w[2], w[3]), c = _mm512_unpackhi_epi32(w[0], w[1]),
                              d = _mm512_unpackhi_epi32(w[2], w[3]);
                _mm512_store_si512(lines, _mm512_unpacklo_epi64(a, b));
                _mm512_store_si512(lines + 64, _mm512_unpackhi_epi64(a, b));
                _mm512_store_si512(lines + 128, _mm512_unpacklo_epi64(c, d));
                _mm512_store_si512(lines + 192, _mm512_unpackhi_epi64(c, d));
                lines += 256;
            }
        }
}

}}  // namespace pagemill
#endif
