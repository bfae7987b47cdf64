// A step of 4-bit weights, and the 8-bit lines that it stands for, made in words. For each half of 32 k it has a slope
// and an offset per output, then 8 lines of 64 bytes, in each word four values q, lowest bits first: k 0 and k 1 of a
// line of the 8-bit step, then the same of the next line; the next word has k 2 and 3. quantized_tables.h has the same
// for AVX-512.
#pragma once

#include "quantized_panels.h"
#include "simd.h"

#if !defined(__AVX512BW__)
namespace pagemill { namespace {

struct PackedStep {
    struct { uint16_t slope[kPanel], offset[kPanel]; } half[2];
    uint16_t q[8][2 * kPanel];

    // The 32 k of a half.
    void put_half(int lane, int h, const uint8_t* values, uint16_t slope, uint16_t offset) {
        half[h].slope[lane] = slope;
        half[h].offset[lane] = offset;
        for (int i = 0; i < 4; ++i, values += 8)
            for (int j = 0; j < 2; ++j) {
                const uint8_t* v = values + 2 * j;
                q[4 * h + i][lane * 2 + j] = uint16_t(v[0] | v[1] << 4 | v[4] << 8 | v[5] << 12);
            }
    }
    int weight(int lane, int k) const {
        const int value = q[k / 8][lane * 2 + k % 4 / 2] >> shift(k) & 15;
        return uint16_t(half[k / kHalfK].slope[lane] * value + half[k / kHalfK].offset[lane]) >> 8;
    }
    static int shift(int k) { return k / 4 % 2 * 8 + k % 2 * 4; }
};

typedef uint16_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * W)));

// Both words of an output's dword.
INLINE Words twice(const uint16_t* p) {
    const Dwords wide = __builtin_convertvector(load_as<HalfWords>(p), Dwords);
    return (Words)(wide | wide << 16);
}

constexpr int kTurnsInStep = 2 * kPanel / W * 4;  // of expand_steps

// The 8-bit lines of packed steps.
void expand_steps(const PackedStep* from, int64_t steps, int8_t* lines, NextPiece fetch) {
    for (int64_t s = 0; s < steps; ++s, ++from, lines += kStepLines) {
        for (int h = 0; h < 2; ++h)
            for (int v = 0; v < kPanel; v += W) {
                const Words slope = twice(from->half[h].slope + v), offset = twice(from->half[h].offset + v);
                for (int i = 0; i < 4; ++i) {
                    fetch.turn();
                    const Words word = load_as<Words>(from->q[4 * h + i] + 2 * v);
                    const Words a = (word & 15) * slope + offset, b = (word >> 4 & 15) * slope + offset;
                    const Words c = (word >> 8 & 15) * slope + offset, d = (word >> 12) * slope + offset;
                    int8_t* line = lines + (8 * h + 2 * i) * 64 + 4 * v;
                    store_as(line, (Words)(a >> 8 | (b & 0xff00)));
                    store_as(line + 64, (Words)(c >> 8 | (d & 0xff00)));
                }
            }
    }
}

}}  // namespace pagemill
#endif
