// Queries and softmax weights as integers of L bytes, a share of their largest magnitude, for instructions that
// multiply bytes. Queries have a sign, weights have none.
#pragma once

#include "attention_tiles.h"
#include "math.h"
#include "simd.h"

#if defined(__AVX512VNNI__)
namespace pagemill { namespace {

// Numbers with a sign: number = unit * sum of 256^l byte l. NaN and infinities become a unit that is NaN.
template <int L> struct SignedBytes {
    static constexpr float kMost = 127 << 8 * (L - 1);

    // put(i, l, 16 bytes in the vector's elements) for the numbers from 16 i on.
    template <class Put> INLINE static float split(const float* x, int count, Put&& put) {
        F top = zero(), all = zero();
        for (int i = 0; i < count; i += 16) {
            const F each = load(x + i);
            top = max(abs(each), top);
            all = fma(each, zero(), all);
        }
        const float most = maximum(top), spoilt = sum(all);
        const F factor = broadcast(most > 0.0f ? kMost / most : 0.0f);
        for (int i = 0; i < count; i += 16) {
            __m512i whole = _mm512_cvtps_epi32((load(x + i) * factor).v);
            for (int l = 0; l < L; ++l) {
                const __m512i byte = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
                put(i / 16, l, byte);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, byte), 8);
            }
        }
        return most / kMost + spoilt;
    }
};

// The sums of products with each byte as one number. Those of two bytes fit into one integer.
template <int L> INLINE F join(const __m512i (&sums)[L]) {
    if constexpr (L == 2) return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(sums[1], 8), sums[0]))};
    F x{_mm512_cvtepi32_ps(sums[L - 1])};
    for (int l = L - 2; l >= 0; --l) x = fma(x, broadcast(256.0f), {_mm512_cvtepi32_ps(sums[l])});
    return x;
}

// exp(unit * (score - greatest)). For weights of up to 2 bytes as 2^x, x = n + r with n whole, 2^r by a polynomial
// fitted by least squares (relative error below 3e-6).
template <int L> struct Exponential {
    F greatest, factor;

    Exponential(float greatest, float unit)
        : greatest(broadcast(greatest)), factor(broadcast(L == 2 ? unit * 1.44269504f : unit)) {}

    // Of the elements of `in`; the others are 0.
    INLINE F operator()(F score, __mmask16 in) const {
        const F x = (score - greatest) * factor;
        if (L > 2) return {_mm512_maskz_mov_ps(in, exp_nonpositive(x).v)};
        const F n{_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT)}, r = x - n;
        F p = broadcast(0.009570102f);
        p = fma(p, r, broadcast(0.055917863f));
        p = fma(p, r, broadcast(0.24024744f));
        p = fma(p, r, broadcast(0.69312179f));
        p = fma(p, r, broadcast(0.99999928f));
        return {_mm512_maskz_scalef_ps(in, p.v, n.v)};
    }
};

// Weights' bytes of so many tokens are made at a time, in fours of neighbouring tokens: those of 16 s + 4 i are the
// (4 i + s)th.
constexpr int kWeightsTogether = 64;
INLINE int four_of(int token) { return token / kWeightsTogether * 16 + token / 16 % 4; }

// What weights' integers are multiplied by, NaN if the greatest weight is not finite; and, of one byte, their sum.
struct SplitWeights {
    float unit;
    int sum;
};

// Weights [from, until), zero over the rest of whole kWeightsTogether, of which `most` is the greatest: weight = unit *
// sum of 256^l byte l. Byte l's begin l * kPartition behind the first's.
template <int L> INLINE SplitWeights split_weights(const float* weights, int from, int until, float most, uint8_t* to) {
    constexpr float kMost = L == 1 ? 0xff : L == 2 ? 0xffff : 0xfffff8;  // of fp32, less fits: products round up too
    const F factor = broadcast(most > 0.0f ? kMost / most : 0.0f);
    __m512i sum = _mm512_setzero_si512();
    for (int token = from / kWeightsTogether * kWeightsTogether; token < until; token += kWeightsTogether) {
        __m512i w[4];
        for (int s = 0; s < 4; ++s) w[s] = _mm512_cvtps_epi32((load(weights + token + s * 16) * factor).v);
        const auto put = [&](int l, __m512i first, __m512i second) __attribute__((always_inline)) {
            const __m512i bytes = _mm512_packus_epi16(first, second);
            _mm512_storeu_si512(to + l * kPartition + token, bytes);
            if (L == 1) sum = _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi8(1));
        };
        if constexpr (L <= 2) {
            const __m512i lower = _mm512_set1_epi16(0xff);
            const __m512i first = _mm512_packus_epi32(w[0], w[1]), second = _mm512_packus_epi32(w[2], w[3]);
            put(0, _mm512_and_si512(first, lower), _mm512_and_si512(second, lower));
            if (L == 2) put(1, _mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
        } else {
            for (int l = 0; l < L; ++l) {
                const auto byte = [&](int s) __attribute__((always_inline)) {
                    return _mm512_and_si512(_mm512_srli_epi32(w[s], 8 * l), _mm512_set1_epi32(0xff));
                };
                put(l, _mm512_packus_epi32(byte(0), byte(1)), _mm512_packus_epi32(byte(2), byte(3)));
            }
        }
    }
    return {most / kMost + most * 0.0f, L == 1 ? _mm512_reduce_add_epi32(sum) : 0};
}

}}  // namespace pagemill
#endif
