// Softmax weights in bf16, 32 scores at a time, in words of 16 bits (after Schraudolph, "A Fast, Compact Approximation
// of the Exponential Function", 1999). x is rounded to 1/256 and held as in bf16, 8 biased bits before the point and 8
// after it. Half of that, as bits of bf16, runs straight from one power of two to the next; what a table adds to it
// before it is halved and rounded makes it 2^x, rounded to nearest. Relative error: 1.9e-3 in the mean (rms), where
// rounding alone makes 1.7e-3.
//
// Weights are relative to the score of a row's first key in the partition, as no pass over the scores has to come
// before then. A row whose weights grow too large by that, or are not numbers, takes the greatest score instead.
#pragma once

#include "../kernels.h"
#include "attention_tiles.h"
#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

namespace pagemill {
namespace {

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

}  // namespace
}  // namespace pagemill
#endif
