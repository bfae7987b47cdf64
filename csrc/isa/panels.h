// Panels of neighbouring outputs, which linear layers read weights in, and what instructions take of them at a time.
#pragma once

#include "../kernels.h"
#include "simd.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagemill {
namespace {

constexpr int NR = 2 * W;  // outputs in a panel

// Two neighbouring k of one output, or of one row of x: what bf16 instructions take.
struct Pair { bf16 even, odd; };

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#if defined(__AMX_BF16__)
constexpr int64_t kPairedStep = 32;  // a tile's
#else
constexpr int64_t kPairedStep = 2;
#endif

INLINE F load(const Pair* p) { return load((const float*)p); }
INLINE F multiply_add(F x, F w, F sum, const Pair*) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(x.v), (__m512bh)_mm512_castps_si512(w.v))};
}

#else
constexpr bool kHasPairs = false;
constexpr int64_t kPairedStep = 1;
#endif

template <class T> INLINE F multiply_add(F x, F w, F sum, const T*) { return fma(x, w, sum); }

// Length of a packed weight's rows: bf16 in pairs has zeros up to whole steps.
INLINE int64_t packed_k(const PackedLinear& weight) {
    return kHasPairs && weight.type == DType::bf16 ? (weight.k + kPairedStep - 1) / kPairedStep * kPairedStep
                                                   : weight.k;
}

INLINE int64_t panels_of(const PackedLinear& weight) { return (weight.n + NR - 1) / NR; }

// Padded with zeros to so many outputs; false: out of memory.
bool pack_bias(PackedLinear& packed, const float* bias, int64_t outputs) {
    if (!bias) return true;
    const size_t bytes = (outputs * sizeof(float) + 63) / 64 * 64;
    packed.bias = (float*)std::aligned_alloc(64, bytes);
    if (!packed.bias) return false;
    packed.bytes += bytes;
    std::memset(packed.bias, 0, bytes);
    std::memcpy(packed.bias, bias, packed.n * sizeof(float));
    return true;
}

}  // namespace
}  // namespace pagemill
