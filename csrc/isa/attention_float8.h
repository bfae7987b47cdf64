// Keys and values in floating point of 8 bits, as pairs of bf16, which holds all of these numbers exactly. The two
// bytes of a number in bf16 are looked up by its magnitude, and it keeps its sign.
#pragma once

#include "attention_plan.h"
#include "simd.h"

#include <type_traits>

#if defined(__AVX512BF16__)
namespace pagemill { namespace {

template <class T> constexpr bool kIsFloat8 = std::is_same_v<T, e4m3> || std::is_same_v<T, e5m2>;

// The bytes of magnitudes in bf16.
template <class T> struct Magnitudes {
    alignas(64) uint8_t low[128] = {}, high[128] = {};

    static constexpr int kMantissa = std::is_same_v<T, e4m3> ? 3 : 2, kBias = std::is_same_v<T, e4m3> ? 7 : 15;

    static constexpr int in_bf16(int magnitude) {
        const int exponent = magnitude >> kMantissa, mantissa = magnitude & ((1 << kMantissa) - 1);
        if (kMantissa == 3 ? magnitude == 127 : exponent == 31) return kMantissa == 3 || mantissa ? 0x7fc0 : 0x7f80;
        if (exponent) return (exponent - kBias + 127) << 7 | mantissa << (7 - kMantissa);
        for (int bit = kMantissa - 1; bit >= 0; --bit)
            if (mantissa >> bit) return (1 - kBias - kMantissa + bit + 127) << 7 | (mantissa << (7 - bit) & 127);
        return 0;
    }
    constexpr Magnitudes() {
        for (int i = 0; i < 128; ++i) {
            low[i] = uint8_t(in_bf16(i) & 255);
            high[i] = uint8_t(in_bf16(i) >> 8);
        }
    }
};
template <class T> constexpr Magnitudes<T> kMagnitudes;

// Which byte goes where before bytes are unpacked, so that pairs are in order then. The two numbers of a pair come from
// places that are `Apart`; the pairs of the second unpacked vector come from `Further` behind those of the first.
template <int Apart, int Further> struct PairOrder {
    alignas(64) uint8_t at[64] = {};

    constexpr PairOrder() {
        for (int i = 0; i < 64; ++i) at[i] = uint8_t(i / 16 * 4 + i % 8 / 2 + i % 2 * Apart + i % 16 / 8 * Further);
    }
};
constexpr PairOrder<16, 32> kKeyOrder;    // of four dimensions of 16 tokens
constexpr PairOrder<32, 16> kValueOrder;  // of 32 dimensions of two tokens

// Makes pairs of bf16 of 64 numbers.
template <class T> struct Widener {
    const __m512i low[2] = {_mm512_load_si512(kMagnitudes<T>.low), _mm512_load_si512(kMagnitudes<T>.low + 64)},
                  high[2] = {_mm512_load_si512(kMagnitudes<T>.high), _mm512_load_si512(kMagnitudes<T>.high + 64)};
    const __m512i of_keys = _mm512_load_si512(kKeyOrder.at), of_values = _mm512_load_si512(kValueOrder.at);

    struct Pairs { __m512i first, second; };

    // Two pairs of dimensions, `stride` apart, of 16 tokens.
    INLINE Pairs keys(const T* from, int64_t stride) const {
        if (stride == 16) return widen(_mm512_loadu_si512(from), of_keys);
        const auto row = [&](int i) { return _mm_loadu_si128((const __m128i*)(from + i * stride)); };
        return widen(both(_mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1),
                          _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1)),
                     of_keys);
    }
    // 32 dimensions, or those of them that are given, of two tokens, `next` behind each other.
    INLINE Pairs values(const T* from, int64_t next) const {
        return widen(both(_mm256_loadu_si256((const __m256i*)from), _mm256_loadu_si256((const __m256i*)(from + next))),
                     of_values);
    }
    INLINE Pairs values(const T* from, int64_t next, __mmask32 even, __mmask32 odd) const {
        return widen(both(_mm256_maskz_loadu_epi8(even, from), _mm256_maskz_loadu_epi8(odd, from + next)), of_values);
    }

  private:
    INLINE static __m512i both(__m256i lower, __m256i upper) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(lower), upper, 1);
    }
    INLINE Pairs widen(__m512i bytes, __m512i order) const {
        constexpr int kFirstOrBoth = 0xf8;  // first | second & third
        const __m512i x = _mm512_permutexvar_epi8(order, bytes), lower = _mm512_permutex2var_epi8(low[0], x, low[1]);
        const __m512i upper = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], x, high[1]), x,
                                                        _mm512_set1_epi8(int8_t(0x80)), kFirstOrBoth);
        return {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)};
    }
};

// Whether keys lie by dimension and values by token, in pieces of 16.
INLINE bool lies_in_rows(const LayerCache& cache) {
    return cache.key.token == 1 && cache.value.dim == 1 && cache.block_size % 16 == 0 && cache.head_dim % 16 == 0;
}

}}  // namespace pagemill
#endif
