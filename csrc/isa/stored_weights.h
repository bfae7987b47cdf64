// GGUF's quantized formats, as they are stored: widened to fp32, one rounding per product and per sum as the formats'
// definition has them; rounded to 8 bits from there, a row at a time; or, those of 4 bits, taken apart for quantized.h.
#pragma once

#include "../threads.h"
#include "quantized_panels.h"
#include "round_weights.h"
#include "simd.h"

namespace pagemill { namespace {

using Byte = unsigned char;

INLINE float stored_half(const Byte* p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    const uint32_t magnitude = h & 0x7fffu, sign = uint32_t(h & 0x8000u) << 16;
    uint32_t bits = magnitude << 13;
    float x;
    std::memcpy(&x, &bits, 4);
    x *= 0x1p112f;  // exact, for subnormal halves too
    std::memcpy(&bits, &x, 4);
    if (magnitude >= 0x7c00u) bits = 0x7f800000u | magnitude << 13;
    bits |= sign;
    std::memcpy(&x, &bits, 4);
    return x;
}

INLINE void lower_halves(const Byte* from, int count, uint8_t* q) {
    for (int i = 0; i < count; ++i) q[i] = from[i] & 15;
}

INLINE void upper_halves(const Byte* from, int count, uint8_t* q) {
    for (int i = 0; i < count; ++i) q[i] = from[i] >> 4;
}

// 32 weights, the first half of them in the low nibbles of the last 16 bytes; with `Fifth`, their fifth bits in a word
// before these. They are unsigned and have a minimum, or lie about zero.
template <bool Fifth, bool Minimum> struct Nibbles {
    static constexpr int kWeights = 32, kHeader = Minimum ? 4 : 2, kBytes = kHeader + (Fifth ? 20 : 16);

    static void values(const Byte* b, uint8_t* q) {
        lower_halves(b + kBytes - 16, 16, q);
        upper_halves(b + kBytes - 16, 16, q + 16);
        if (!Fifth) return;
        uint32_t fifth;
        std::memcpy(&fifth, b + kHeader, 4);
        for (int i = 0; i < 32; ++i) q[i] |= uint8_t((fifth >> i & 1) << 4);
    }
    static void widen(const Byte* b, float* y) {
        const float d = stored_half(b), m = Minimum ? stored_half(b + 2) : 0;
        uint8_t q[32];
        values(b, q);
        for (int i = 0; i < 32; ++i) y[i] = Minimum ? d * float(q[i]) + m : d * float(q[i] - (Fifth ? 16 : 8));
    }
    static void take_apart(const Byte* b, uint8_t* q, float* scale, float* low) {
        values(b, q);
        *scale = stored_half(b);
        *low = Minimum ? stored_half(b + 2) : -8 * *scale;
    }
};
using Q4_0 = Nibbles<false, false>;
using Q4_1 = Nibbles<false, true>;
using Q5_0 = Nibbles<true, false>;
using Q5_1 = Nibbles<true, true>;

struct Q8_0 {
    static constexpr int kWeights = 32, kBytes = 34;
    static void widen(const Byte* b, float* y) {
        const float d = stored_half(b);
        for (int i = 0; i < 32; ++i) y[i] = d * float(static_cast<signed char>(b[2 + i]));
    }
};

// Eight groups of 32 weights, four bits each; with `Fifth`, a fifth bit of all groups in 32 bytes before them.
template <bool Fifth> struct ScaledGroups {
    static constexpr int kWeights = 256, kBytes = Fifth ? 176 : 144;

    // Scale and minimum of the j-th group, six bits each, in twelve bytes.
    static void group_scale(const Byte* packed, int j, int& scale, int& minimum) {
        if (j < 4) {
            scale = packed[j] & 63;
            minimum = packed[j + 4] & 63;
        } else {
            scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
            minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
        }
    }
    static void values(const Byte* b, int j, uint8_t* q) {
        const Byte* from = b + (Fifth ? 48 : 16) + j / 2 * 32;
        if (j % 2) upper_halves(from, 32, q);
        else lower_halves(from, 32, q);
        if (!Fifth) return;
        const Byte* high = b + 16;
        for (int i = 0; i < 32; ++i) q[i] |= uint8_t((high[i] >> j & 1) << 4);
    }
    static void scales(const Byte* b, int j, float& by, float& less) {
        int scale, minimum;
        group_scale(b + 4, j, scale, minimum);
        by = stored_half(b) * float(scale);
        less = stored_half(b + 2) * float(minimum);
    }
    static void widen(const Byte* b, float* y) {
        for (int j = 0; j < 8; ++j, y += 32) {
            float by, less;
            uint8_t q[32];
            scales(b, j, by, less);
            values(b, j, q);
            for (int i = 0; i < 32; ++i) y[i] = by * float(q[i]) - less;
        }
    }
    static void take_apart(const Byte* b, uint8_t* q, float* scale, float* low) {
        for (int j = 0; j < 8; ++j) {
            float less;
            scales(b, j, scale[j], less);
            low[j] = -less;
            values(b, j, q + 32 * j);
        }
    }
};
using Q4_K = ScaledGroups<false>;
using Q5_K = ScaledGroups<true>;

// Two halves of 128 weights: four rows of 32 share 64 low bytes and 32 high ones; a scale for each 16 weights.
struct Q6_K {
    static constexpr int kWeights = 256, kBytes = 210;
    static void widen(const Byte* b, float* y) {
        const float d = stored_half(b + 208);
        const auto* scales = reinterpret_cast<const signed char*>(b + 192);
        for (int part = 0; part < 2; ++part)
            for (int row = 0; row < 4; ++row, y += 32, scales += 2) {
                const Byte *low = b + part * 64 + row % 2 * 32, *high = b + 128 + part * 32;
                const int up = row / 2 * 4, higher = row * 2;
                int8_t q[32];
                for (int i = 0; i < 32; ++i) q[i] = int8_t(((low[i] >> up & 15) | (high[i] >> higher & 3) << 4) - 32);
                for (int half = 0; half < 2; ++half) {
                    const float by = d * float(scales[half]);
                    for (int i = 16 * half; i < 16 * half + 16; ++i) y[i] = by * float(q[i]);
                }
            }
    }
};

// Calls body with the format of that number, if there is one here.
template <class Body> bool with_format(int number, Body&& body) {
    switch (number) {
        case 2: return body(Q4_0()), true;
        case 3: return body(Q4_1()), true;
        case 6: return body(Q5_0()), true;
        case 7: return body(Q5_1()), true;
        case 8: return body(Q8_0()), true;
        case 12: return body(Q4_K()), true;
        case 13: return body(Q5_K()), true;
        case 14: return body(Q6_K()), true;
        default: return false;
    }
}

template <class Body> bool with_format_of_4_bits(int number, Body&& body) {
    switch (number) {
        case 2: return body(Q4_0()), true;
        case 3: return body(Q4_1()), true;
        case 12: return body(Q4_K()), true;
        default: return false;
    }
}

template <class Format> void widen_blocks(const void* blocks, int64_t first, int64_t count, float* out) {
    const Byte* from = (const Byte*)blocks + first * Format::kBytes;
    for (int64_t i = 0; i < count; ++i) Format::widen(from + i * Format::kBytes, out + i * Format::kWeights);
}

bool dequantize(int format, const void* blocks, float* out, int64_t weights) {
    constexpr int64_t kWeightsInTask = 1 << 16;
    return with_format(format, [&]<class Format>(Format) {
        constexpr int64_t kBlocks = kWeightsInTask / Format::kWeights;
        const int64_t count = weights / Format::kWeights;
        auto widen = [&](int64_t i, int) {
            const int64_t first = i * kBlocks;
            widen_blocks<Format>(blocks, first, lesser(kBlocks, count - first), out + first * Format::kWeights);
        };
        parallel((count + kBlocks - 1) / kBlocks, widen);
    });
}

int64_t stored_bytes(int format, int64_t k) {
    int64_t bytes = 0;
    with_format(format, [&]<class Format>(Format) {
        if (k % Format::kWeights == 0) bytes = k / Format::kWeights * Format::kBytes;
    });
    return bytes;
}

// Whether all are finite.
INLINE bool are_finite(const float* x, int64_t n) {
    F sum_of_zeros = zero();
    for_vectors(n, [&](int64_t i, auto part) { sum_of_zeros = sum_of_zeros + part.load(x + i) * zero(); });
    return sum(sum_of_zeros) == 0;
}

bool round_stored(const StoredWeight& weight, int8_t* values, uint16_t* scales, bool* finite) {
    const int64_t k = weight.k, groups = groups_of(steps_of(k));
    return with_format(weight.format, [&]<class Format>(Format) {
        auto round = [&](int64_t row, int thread) {
            const int64_t blocks = k / Format::kWeights;
            auto* wide = (float*)thread_scratch(thread, k * sizeof(float));
            widen_blocks<Format>(weight.blocks, row * blocks, blocks, wide);
            finite[row] = are_finite(wide, k);
            round_row(wide, k, values + row * k, scales + row * groups);
        };
        parallel(weight.n, round);
    });
}

// A group of up to 192 k: its scale, and what its values are in units of it; see QuantizedSource.
INLINE uint16_t group_in_units(const uint8_t* q, const float* scale, const float* low, int64_t halves, int16_t* slopes,
                               int16_t* offsets) {
    float largest = 0;
    for (int64_t half = 0; half < halves; ++half) {
        uint8_t least = 15, most = 0;
        for (int i = 0; i < kHalfK; ++i) {
            const uint8_t value = q[half * kHalfK + i];
            least = value < least ? value : least;
            most = value > most ? value : most;
        }
        for (const uint8_t end : {least, most}) {
            const float magnitude = __builtin_fabsf(scale[half] * float(end) + low[half]);
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    const uint32_t bits = (bits_of(largest * (1.0f / 127)) + 0xffff) >> 16;
    const float wide = float_of(bits << 16), units = 256 * (wide > 0 ? 1 / wide : 0.0f);
    for (int64_t half = 0; half < halves; ++half) {
        slopes[half] = int16_t(int64_t(__builtin_rintf(scale[half] * units)));
        offsets[half] = int16_t(int64_t(__builtin_rintf(low[half] * units)) + 128);
    }
    return uint16_t(bits);
}

bool keep_int4(const StoredWeight& weight, uint8_t* values, int16_t* slopes, int16_t* offsets, uint16_t* scales,
               bool* finite) {
    const int64_t k = weight.k, halves = k / kHalfK, groups = groups_of(steps_of(k));
    constexpr int64_t kInGroup = kGroupK / kHalfK;
    return with_format_of_4_bits(weight.format, [&]<class Format>(Format) {
        auto keep = [&](int64_t row, int thread) {
            auto *scale = (float*)thread_scratch(thread, 2 * halves * sizeof(float)), *low = scale + halves;
            uint8_t* q = values + row * k;
            const Byte* from = (const Byte*)weight.blocks + row * (k / Format::kWeights) * Format::kBytes;
            for (int64_t i = 0; i < k / Format::kWeights; ++i) {
                const int64_t first = i * (Format::kWeights / kHalfK);
                Format::take_apart(from + i * Format::kBytes, q + i * Format::kWeights, scale + first, low + first);
            }
            finite[row] = are_finite(scale, 2 * halves);
            for (int64_t g = 0; g < groups; ++g) {
                const int64_t first = g * kInGroup, count = finite[row] ? lesser(kInGroup, halves - first) : 0;
                scales[row * groups + g] =
                    group_in_units(q + first * kHalfK, scale + first, low + first, count, slopes + row * halves + first,
                                   offsets + row * halves + first);
            }
        };
        parallel(weight.n, keep);
    });
}

}}  // namespace pagemill
