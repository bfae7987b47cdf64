// One vector type `F` of W floats per instruction set, and the few operations the kernels need. Included once per
// translation unit inside an anonymous namespace, so that no code of one instruction set is ever linked into another.
// load_pairs takes the first and the second of W pairs. int8 is rounded to nearest, of magnitudes up to 127. fma() is
// one rounding where the hardware has it; the compiler contracts nothing by itself (-ffp-contract=off).
#pragma once

#include "../kernels.h"

#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// What a set has instructions for: products of bytes in fours, and of bf16 in pairs.
#if defined(__AVX512VNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define PRODUCTS_OF_BYTES
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PRODUCTS_OF_PAIRS
#endif

namespace pagemill { namespace {

#define INLINE inline __attribute__((always_inline))

// Of loops over accumulators, which GCC otherwise keeps in memory on ARM.
#if defined(__aarch64__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

// Fetches a line that is read soon.
INLINE void fetch_line(const void* at) {
    if (fetches_to_second_level) __builtin_prefetch(at, 0, 2);
    else __builtin_prefetch(at);
}

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
struct u4 { uint8_t bits; };  // two integers of 4 bits
struct e4m3 { uint8_t bits; };
struct e5m2 { uint8_t bits; };

INLINE uint32_t bits_of(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    return u;
}
INLINE float float_of(uint32_t u) {
    float x;
    std::memcpy(&x, &u, 4);
    return x;
}
template <class T> INLINE T lesser(T a, T b) { return b < a ? b : a; }
template <class T> INLINE T greater(T a, T b) { return a < b ? b : a; }
constexpr float kInf = __builtin_inff();

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Dwords __attribute__((vector_size(4 * W)));
typedef uint32_t Integers __attribute__((vector_size(4 * W)));

struct F { Floats v; };
INLINE F operator+(F a, F b) { return {a.v + b.v}; }
INLINE F operator-(F a, F b) { return {a.v - b.v}; }
INLINE F operator*(F a, F b) { return {a.v * b.v}; }
INLINE F operator/(F a, F b) { return {a.v / b.v}; }
INLINE F abs(F a) { return {(Floats)((Dwords)a.v & 0x7fffffff)}; }
INLINE F with_sign_of(F a, F s) { return {(Floats)(((Dwords)a.v & 0x7fffffff) | ((Dwords)s.v & ~0x7fffffff))}; }
INLINE F to_float(Dwords x) { return {__builtin_convertvector(x, Floats)}; }
// 2^(n - 1) for n whole, -125 <= n <= 128
INLINE F half_power_of_two(F n) { return {(Floats)((__builtin_convertvector(n.v, Dwords) + 126) << 23)}; }

#if defined(__AVX512F__)

INLINE F zero() { return {_mm512_setzero_ps()}; }
INLINE F broadcast(float x) { return {_mm512_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE F load(const bf16* p) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
INLINE void split_pairs(__m512i both, F& even, F& odd) {
    even = {_mm512_castsi512_ps(_mm512_slli_epi32(both, 16))};
    odd = {_mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))))};
}
INLINE void load_pairs(const bf16* p, F& even, F& odd) { split_pairs(_mm512_loadu_si512(p), even, odd); }
INLINE F load(const f16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
INLINE F load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
INLINE void store(bf16* p, F x) {
#if defined(__AVX512BF16__)
    // The instruction takes subnormals for zero.
    constexpr int kSubnormal = 0x20;
    if (__builtin_expect(_mm512_fpclass_ps_mask(x.v, kSubnormal) == 0, 1)) {
        _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
        return;
    }
#endif
    __m512i u = _mm512_castps_si512(x.v);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    r = _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(r));
}
INLINE void store(f16* p, F x) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }
INLINE void store(int8_t* p, F x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v))); }
INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F select_less(F a, F b, F yes, F no) {
    return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), yes.v)};
}
// By the lowest bit in the first lane, by the next in the second, …
INLINE F select_set(uint32_t bits, F yes, F no) { return {_mm512_mask_mov_ps(no.v, __mmask16(bits), yes.v)}; }
// The sum of lanes i and i + Half in the first of the two, their difference in the other.
template <int Half> INLINE F sums_and_differences(F x) {
    Dwords others;
    uint32_t second = 0;
    for (int i = 0; i < W; ++i) {
        others[i] = i ^ Half;
        second |= uint32_t(i & Half ? 1 : 0) << i;
    }
    const __m512 other = _mm512_permutexvar_ps((__m512i)others, x.v);
    return {_mm512_mask_sub_ps(_mm512_add_ps(x.v, other), __mmask16(second), other, x.v)};
}

#elif defined(__AVX2__)

INLINE F zero() { return {_mm256_setzero_ps()}; }
INLINE F broadcast(float x) { return {_mm256_set1_ps(x)}; }
INLINE F load(const float* p) { return {_mm256_loadu_ps(p)}; }
INLINE F load(const bf16* p) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
INLINE void load_pairs(const bf16* p, F& even, F& odd) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)p);
    even = {_mm256_castsi256_ps(_mm256_slli_epi32(both, 16))};
    odd = {_mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32(int(0xffff0000u))))};
}
INLINE F load(const f16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
INLINE F load(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
INLINE void store(bf16* p, F x) {
    __m256i u = _mm256_castps_si256(x.v);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
    __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
    r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
    r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(r));
}
INLINE void store(f16* p, F x) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT)); }
INLINE void store(int8_t* p, F x) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(half, half));
}
INLINE F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
INLINE F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
INLINE F select_less(F a, F b, F yes, F no) {
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ))};
}
INLINE F select_set(uint32_t bits, F yes, F no) {
    const __m256i lanes = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(int(bits)), lanes), lanes);
    return {_mm256_blendv_ps(no.v, yes.v, _mm256_castsi256_ps(set))};
}

#else  // compiler vectors: SSE2 on x86-64, NEON on ARM

typedef uint16_t Halves __attribute__((vector_size(8)));
INLINE F zero() { return {Floats{}}; }
INLINE F broadcast(float x) { return {Floats{x, x, x, x}}; }
INLINE F load(const float* p) {
    F x;
    std::memcpy(&x.v, p, 16);
    return x;
}
INLINE Dwords load_halves(const void* p) {
    Halves bits;
    std::memcpy(&bits, p, 8);
    return __builtin_convertvector(bits, Dwords);
}
INLINE F load(const bf16* p) { return {(Floats)(load_halves(p) << 16)}; }
INLINE void load_pairs(const bf16* p, F& even, F& odd) {
    Dwords both;
    std::memcpy(&both, p, 16);
    even = {(Floats)(both << 16)};
    odd = {(Floats)(both & Dwords{-65536, -65536, -65536, -65536})};
}
#if defined(__aarch64__)
INLINE F load(const f16* p) { return {(Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p)))}; }
INLINE void store(f16* p, F x) { vst1_u16((uint16_t*)p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x.v))); }
#else
INLINE f16 narrow(float x) {
    const uint32_t u = bits_of(x), sign = u >> 16 & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // rounds beyond 65504
    if (magnitude < 0x38800000)  // subnormal: let the adder round at 2^-24
        return {uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000))};
    return {uint16_t(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13)};
}
INLINE F load(const f16* p) {
    const Dwords half = load_halves(p), magnitude = (half & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
    const Dwords infinite = exponent == 0x0f800000, subnormal = exponent == 0;
    const Dwords moved = magnitude + 0x38000000 + (infinite & 0x38000000) + (subnormal & 0x00800000);
    const Floats wide = (Floats)moved - (Floats)(subnormal & 0x38800000);  // 2^-14
    return {(Floats)((Dwords)wide | (half & 0x8000) << 16)};
}
INLINE void store(f16* p, F x) {
    for (int i = 0; i < W; ++i) p[i] = narrow(x.v[i]);
}
#endif
INLINE F load(const int8_t* p) { return {Floats{float(p[0]), float(p[1]), float(p[2]), float(p[3])}}; }
INLINE void store(float* p, F x) { std::memcpy(p, &x.v, 16); }
INLINE void store(bf16* p, F x) {
    for (int i = 0; i < W; ++i) {
        const uint32_t u = bits_of(x.v[i]);
        p[i].bits = x.v[i] != x.v[i] ? 0x7fc0 : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
    }
}
INLINE void store(int8_t* p, F x) {
    const Floats whole = x.v + 0x1.8p23f - 0x1.8p23f;  // the adder rounds
    for (int i = 0; i < W; ++i) p[i] = int8_t(whole[i]);
}
#if defined(__aarch64__)
INLINE F fma(F a, F b, F c) { return {(Floats)vfmaq_f32((float32x4_t)c.v, (float32x4_t)a.v, (float32x4_t)b.v)}; }
#else
INLINE F fma(F a, F b, F c) { return {a.v * b.v + c.v}; }
#endif
INLINE Floats blend(Dwords mask, Floats yes, Floats no) {
    return (Floats)((mask & (Dwords)yes) | (~mask & (Dwords)no));
}
INLINE F max(F a, F b) { return {blend(a.v > b.v, a.v, b.v)}; }
INLINE F min(F a, F b) { return {blend(a.v < b.v, a.v, b.v)}; }
INLINE F select_less(F a, F b, F yes, F no) { return {blend(a.v < b.v, yes.v, no.v)}; }
INLINE F select_set(uint32_t bits, F yes, F no) {
    return {blend((int32_t(bits) & Dwords{1, 2, 4, 8}) != 0, yes.v, no.v)};
}

#endif

// Each element adds the products of its four bytes, or of its two bf16. x86 takes weights without sign; ARM rounds sums
// of pairs to odd.
#if defined(__AVX512VNNI__)
INLINE Dwords add_fours(Dwords sum, Dwords weights, int32_t x) {
    return (Dwords)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}
#elif defined(__ARM_FEATURE_DOTPROD)
INLINE Dwords add_fours(Dwords sum, Dwords weights, int32_t x) {
    return (Dwords)vdotq_s32((int32x4_t)sum, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(x)));
}
#endif
#if defined(__AVX512BF16__)
INLINE F add_pairs(F sum, F x, F y) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(x.v), (__m512bh)_mm512_castps_si512(y.v))};
}
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
INLINE F add_pairs(F sum, F x, F y) {
    return {(Floats)vbfdotq_f32((float32x4_t)sum.v, (bfloat16x8_t)x.v, (bfloat16x8_t)y.v)};
}
#endif

// Floating point of 8 bits comes by way of f16, and goes to the nearest, of halves to the even, of what is too large to
// the largest; what is not finite becomes NaN.
typedef uint8_t Octets __attribute__((vector_size(W)));
typedef uint16_t Shorts __attribute__((vector_size(2 * W)));
INLINE Shorts load_octets(const void* p) {
    Octets bytes;
    std::memcpy(&bytes, p, W);
    return __builtin_convertvector(bytes, Shorts);
}
INLINE F load(const e5m2* p) {
    const Shorts half = load_octets(p) << 8;
    return load((const f16*)&half);
}
INLINE F load(const e4m3* p) {
    const Shorts x = load_octets(p), magnitude = x & 0x7f;
    const Shorts nan = (Shorts)(magnitude == 0x7f) & 0x7e00, half = (x & 0x80) << 8 | magnitude << 7 | nan;
    return load((const f16*)&half) * broadcast(256.0f);
}
template <int Mantissa, int Bias> INLINE uint8_t narrow_to_byte(float x, float largest) {
    const uint8_t sign = bits_of(x) >> 24 & 0x80;
    uint32_t u = bits_of(x) & 0x7fffffff;
    if (u >= 0x7f800000) return 0x7f;
    if (u > bits_of(largest)) u = bits_of(largest);
    constexpr uint32_t normal = uint32_t(128 - Bias) << 23, shift = 23 - Mantissa;
    if (u < normal) {  // let the adder round
        constexpr uint32_t adder = uint32_t(127 + 24 - Bias - Mantissa) << 23;
        return sign | uint8_t(bits_of(float_of(u) + float_of(adder)) - adder);
    }
    return sign | uint8_t((u - (uint32_t(127 - Bias) << 23) + (1u << (shift - 1)) - 1 + (u >> shift & 1)) >> shift);
}
INLINE void store(e4m3* p, F x) {
    for (int i = 0; i < W; ++i) p[i].bits = narrow_to_byte<3, 7>(x.v[i], 448.0f);
}
INLINE void store(e5m2* p, F x) {
    for (int i = 0; i < W; ++i) p[i].bits = narrow_to_byte<2, 15>(x.v[i], 57344.0f);
}

// The first n (0 < n < W) elements; the others are 0 when loaded and untouched when stored.
template <class T> INLINE F load_first(const T* p, int n) {
    T all[W] = {};
    for (int i = 0; i < n; ++i) all[i] = p[i];
    return load(all);
}
template <class T> INLINE void store_first(T* p, F x, int n) {
    T all[W];
    store(all, x);
    for (int i = 0; i < n; ++i) p[i] = all[i];
}

// x where `left` elements are left: all of it, or so many.
template <class T> INLINE F load_upto(const T* p, int64_t left) {
    return left >= W ? load(p) : load_first(p, int(left));
}
template <class T> INLINE void store_upto(T* p, F x, int64_t left) {
    if (left >= W) store(p, x);
    else store_first(p, x, int(left));
}

// A vector's elements, or the first of them.
struct AllLanes {
    template <class T> INLINE F load(const T* p) const { return pagemill::load(p); }
    template <class T> INLINE void store(T* p, F x) const { pagemill::store(p, x); }
};
struct FirstLanes {
    int count;

    template <class T> INLINE F load(const T* p) const { return load_first(p, count); }
    template <class T> INLINE void store(T* p, F x) const { store_first(p, x, count); }
};

// body(i, part) for the vectors of n elements that begin at i.
template <class Body> INLINE void for_vectors(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, AllLanes{});
    if (i < n) body(i, FirstLanes{int(n - i)});
}

// Sums and maxima across lanes, always in the same order.
#if defined(__AVX512F__)
INLINE float sum(F x) { return _mm512_reduce_add_ps(x.v); }
INLINE float maximum(F x) { return _mm512_reduce_max_ps(x.v); }
#else
INLINE float sum(F x) {
    float lane[W];
    store(lane, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}
INLINE float maximum(F x) {
    float lane[W];
    store(lane, x);
    for (int width = W / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
    return lane[0];
}
#endif

// One element as a vector operation would convert it.
template <class T> INLINE float widen_one(const T* p) {
    T all[W] = {};
    all[0] = *p;
    float wide[W];
    store(wide, load(all));
    return wide[0];
}
template <class T> INLINE void narrow_one(T* p, float x) { store_first(p, broadcast(x), 1); }
// Pairs of bf16 come as floats that are only aligned as bf16.
INLINE float widen_one(const float* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
INLINE void narrow_one(float* p, float x) { *p = x; }
INLINE float widen_one(const bf16* p) { return float_of(uint32_t(p->bits) << 16); }

INLINE Integers load_integers(const uint32_t* p) {
    Integers x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// The number in the lowest bits of each element.
template <int Bits> INLINE F lowest_bits(Integers x) {
#if defined(__AVX512F__)
    if (Bits == 4) {
        const __m512 numbers = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        return {_mm512_permutexvar_ps((__m512i)x, numbers)};
    }
#endif
    return to_float((Dwords)(x & ((1u << Bits) - 1)));
}

// body.operator()<n>() for n of 1 .. N.
template <int N, class Body> INLINE void with_count(int n, Body&& body) {
    if (n == N) body.template operator()<N>();
    else if constexpr (N > 1) with_count<N - 1>(n, body);
}

template <int... I> using Sequence = std::integer_sequence<int, I...>;
template <int N> using Upto = std::make_integer_sequence<int, N>;  // Sequence<0, ..., N - 1>

// Calls body(T*) with the element type of `type`, one of floating point of 16 bits or more.
template <class Body> INLINE void with_type(DType type, Body&& body) {
    switch (type) {
        case DType::f32: body((float*)nullptr); break;
        case DType::bf16: body((bf16*)nullptr); break;
        case DType::f16: body((f16*)nullptr); break;
        default: break;
    }
}
// The same for a cache's.
template <class Body> INLINE void with_float_type(DType type, Body&& body) {
    if (type == DType::e4m3) body((e4m3*)nullptr);
    else if (type == DType::e5m2) body((e5m2*)nullptr);
    else with_type(type, body);
}
// Integers of any width are written as int8_t.
template <class Body> INLINE void with_written_type(DType type, Body&& body) {
    if (is_integer(type)) body((int8_t*)nullptr);
    else with_float_type(type, body);
}

}}  // namespace pagemill
