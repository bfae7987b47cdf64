// Keys and values as integers of 8 and 4 bits: how vectors become them, and come back. The bits are those of
// attention/quantize.py.
#pragma once

#include "simd.h"

namespace pagemill { namespace {

constexpr float kLeastMagnitude = 0x1p-100f, kMostMagnitude = 0x1p126f;

// Dimensions that are rotated together: the greatest power of 2 that divides the head's.
INLINE int rotated_together(int head_dim) { return head_dim & -head_dim; }

// Multiplies a head [head_dim] by Hadamard's matrix (entries 1 and -1), piece by piece. It spreads a few large
// dimensions over all of them, so that a scale fits all. Two rotated vectors' product is rotated_together times theirs.
inline void rotate_head(float* x, int head_dim) {
    const int together = rotated_together(head_dim);
    int half = 1;
#if defined(__AVX512F__)
    for (int i = 0; together >= W && i < head_dim; i += W) {
        const F ones = sums_and_differences<1>(load(x + i)), twos = sums_and_differences<2>(ones);
        store(x + i, sums_and_differences<8>(sums_and_differences<4>(twos)));
        half = W;
    }
#endif
    for (; half < together; half *= 2)
        for (int begin = 0; begin < head_dim; begin += 2 * half)
            for (int i = begin; i < begin + half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

// A vector as int8; returns its scale.
template <class S> INLINE float quantize_int8(const S* from, int8_t* to, int head_dim) {
    F top = zero(), spoilt = zero();  // `spoilt` becomes NaN by infinities and NaN, which max passes over
    for (int d = 0; d < head_dim; d += W) {
        const F x = load_upto(from + d, head_dim - d);
        top = max(abs(x), top);
        spoilt = fma(x, zero(), spoilt);
    }
    const float largest = maximum(top);
    const bool finite = sum(spoilt) == 0.0f, usable = finite && largest >= kLeastMagnitude;
    const F factor = broadcast(usable ? 127.0f / largest : 0.0f);
    for (int d = 0; d < head_dim; d += W) {
        const F x = load_upto(from + d, head_dim - d);
        store_upto(to + d, usable ? x * factor : zero(), head_dim - d);
    }
    return usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
}

INLINE F scale_in(Integers words) { return {(Floats)(words & 0xffff0000u)}; }
INLINE F low_in(Integers words) { return {(Floats)(words << 16)}; }

// A byte's place in a vector of 4-bit integers, and whether a dimension is in its upper half.
INLINE int byte_of(int d) { return d / 32 * 16 + d % 16; }
INLINE bool in_upper_half(int d) { return d / 16 % 2; }

// A group [length] of a vector, length % 16 = 0, as integers of 4 bits; returns their word.
inline uint32_t quantize_group(const float* x, uint8_t* to, int length) {
    F high = load(x), least = high, spoilt = zero();
    for (int d = 0; d < length; d += W) {
        const F each = load(x + d);
        high = max(high, each);
        least = min(least, each);
        spoilt = fma(each, zero(), spoilt);
    }
    const float most = maximum(high), low = 0.0f - maximum(zero() - least);
    if (!(sum(spoilt) == 0.0f && greater(most, -low) <= kMostMagnitude)) {
        std::memset(to, 0, length);
        return 0x7fc00000;
    }
    const float range = most - low;
    bf16 narrow[2];
    narrow_one(narrow, low);
    narrow_one(narrow + 1, range >= kLeastMagnitude ? range / 15.0f : 0.0f);
    const F base = broadcast(widen_one(narrow)), step = broadcast(widen_one(narrow + 1));
    const F factor = range >= kLeastMagnitude ? broadcast(1.0f) / step : zero();
    for (int d = 0; d < length; d += W) {
        int8_t lanes[W];
        store(lanes, min(max((load(x + d) - base) * factor, zero()), broadcast(15.0f)));
        std::memcpy(to + d, lanes, W);
    }
    return uint32_t(narrow[1].bits) << 16 | narrow[0].bits;
}

// A vector [head_dim], keys rotated, in 4 bits [head_dim / 2] and its groups' words, `apart` from each other. It
// becomes what is left out.
inline void quantize_int4(float* x, uint8_t* to, int head_dim, bool is_key, uint32_t* words, int64_t apart) {
    uint8_t each[kMostNarrowDims];
    const int length = is_key ? kKeyGroup : head_dim;
    for (int begin = 0; begin < head_dim; begin += length) {
        const uint32_t word = words[begin / length * apart] = quantize_group(x + begin, each + begin, length);
        const float low = float_of(word << 16), scale = float_of(word & 0xffff0000u);
        for (int d = begin; d < begin + length; ++d) x[d] = x[d] - (low + float(each[d]) * scale);
    }
    for (int i = 0; i < head_dim / 2; ++i) {
        const int lower = i / 16 * 32 + i % 16;
        to[i] = uint8_t(each[lower] | each[lower + 16] << 4);
    }
}

}}  // namespace pagemill
