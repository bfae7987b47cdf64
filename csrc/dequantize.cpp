// GGUF's quantized formats widened to fp32, one rounding per product and per sum as the formats' definition has them.
#include "kernels.h"
#include "threads.h"

#include <cstdint>
#include <cstring>

namespace pagemill {

namespace {

using Byte = unsigned char;

float half(const Byte* p) {
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

uint32_t word(const Byte* p) {
    uint32_t bits;
    std::memcpy(&bits, p, 4);
    return bits;
}

// 32 weights, the first half of them in the low nibbles of the last 16 bytes; with `Fifth`, their fifth bits in a word
// before these. They are unsigned and have a minimum, or lie about zero.
template <bool Fifth, bool Minimum> struct Nibbles {
    static constexpr int kWeights = 32, kHeader = Minimum ? 4 : 2, kBytes = kHeader + (Fifth ? 20 : 16);
    static void widen(const Byte* b, float* y) {
        const float d = half(b), m = Minimum ? half(b + 2) : 0;
        const uint32_t fifth = Fifth ? word(b + kHeader) : 0;
        const Byte* nibbles = b + kBytes - 16;
        for (int i = 0; i < 32; ++i) {
            const int q = (nibbles[i % 16] >> i / 16 * 4 & 15) | (fifth >> i & 1) << 4;
            y[i] = Minimum ? d * float(q) + m : d * float(q - (Fifth ? 16 : 8));
        }
    }
};
using Q4_0 = Nibbles<false, false>;
using Q4_1 = Nibbles<false, true>;
using Q5_0 = Nibbles<true, false>;
using Q5_1 = Nibbles<true, true>;

struct Q8_0 {
    static constexpr int kWeights = 32, kBytes = 34;
    static void widen(const Byte* b, float* y) {
        const float d = half(b);
        for (int i = 0; i < 32; ++i) y[i] = d * float(static_cast<signed char>(b[2 + i]));
    }
};

// Scale and minimum of the j-th of eight groups of 32 weights, six bits each, in twelve bytes.
void group_scale(const Byte* packed, int j, int& scale, int& minimum) {
    if (j < 4) {
        scale = packed[j] & 63;
        minimum = packed[j + 4] & 63;
    } else {
        scale = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        minimum = (packed[j + 4] >> 4) | (packed[j] >> 6) << 4;
    }
}

// Eight groups of 32 weights, four bits each; with `Fifth`, a fifth bit of all groups in 32 bytes before them.
template <bool Fifth> struct ScaledGroups {
    static constexpr int kWeights = 256, kBytes = Fifth ? 176 : 144;
    static void widen(const Byte* b, float* y) {
        const float d = half(b), m = half(b + 2);
        for (int j = 0; j < 8; ++j) {
            int scale, minimum;
            group_scale(b + 4, j, scale, minimum);
            const float by = d * float(scale), less = m * float(minimum);
            const Byte *high = b + 16, *q = b + (Fifth ? 48 : 16) + j / 2 * 32;
            for (int i = 0; i < 32; ++i) {
                const int fifth = Fifth ? (high[i] >> j & 1) << 4 : 0;
                y[j * 32 + i] = by * float((q[i] >> j % 2 * 4 & 15) | fifth) - less;
            }
        }
    }
};
using Q4_K = ScaledGroups<false>;
using Q5_K = ScaledGroups<true>;

// Two halves of 128 weights: four rows of 32 share 64 low bytes and 32 high ones; a scale for each 16 weights.
struct Q6_K {
    static constexpr int kWeights = 256, kBytes = 210;
    static void widen(const Byte* b, float* y) {
        const float d = half(b + 208);
        const auto* scales = reinterpret_cast<const signed char*>(b + 192);
        for (int j = 0; j < 8; ++j) {
            const int part = j / 4, row = j % 4;
            const Byte *low = b + part * 64 + row % 2 * 32, *high = b + 128 + part * 32;
            for (int i = 0; i < 32; ++i) {
                const int q = (low[i] >> row / 2 * 4 & 15) | (high[i] >> row * 2 & 3) << 4;
                y[j * 32 + i] = d * float(scales[j * 2 + i / 16]) * float(q - 32);
            }
        }
    }
};

constexpr int64_t kWeightsInTask = 1 << 16;

template <class Format> bool widen_all(const void* blocks, float* out, int64_t weights) {
    constexpr int64_t kBlocks = kWeightsInTask / Format::kWeights;
    const int64_t count = weights / Format::kWeights;
    auto task = [&](int64_t i, int) {
        const int64_t last = (i + 1) * kBlocks < count ? (i + 1) * kBlocks : count;
        for (int64_t block = i * kBlocks; block < last; ++block)
            Format::widen(static_cast<const Byte*>(blocks) + block * Format::kBytes, out + block * Format::kWeights);
    };
    parallel((count + kBlocks - 1) / kBlocks, task);
    return true;
}

}  // namespace

bool dequantize(int format, const void* blocks, float* out, int64_t weights) {
    switch (format) {
        case 2: return widen_all<Q4_0>(blocks, out, weights);
        case 3: return widen_all<Q4_1>(blocks, out, weights);
        case 6: return widen_all<Q5_0>(blocks, out, weights);
        case 7: return widen_all<Q5_1>(blocks, out, weights);
        case 8: return widen_all<Q8_0>(blocks, out, weights);
        case 12: return widen_all<Q4_K>(blocks, out, weights);
        case 13: return widen_all<Q5_K>(blocks, out, weights);
        case 14: return widen_all<Q6_K>(blocks, out, weights);
        default: return false;
    }
}

}  // namespace pagemill
