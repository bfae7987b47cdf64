// Panels of weights in integers (quantized.h): their parts, and 8-bit lines from those of 4 bits.
#pragma once

#include "linear_tiles.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int kPanel = 16;
constexpr int kStepK = 64;
constexpr int64_t kStepLines = kPanel * kStepK;  // bytes of an 8-bit step
constexpr int kPanelsTogether = 4;  // panels
constexpr int kHalfK = 32;
constexpr int kGroupSteps = 3;
constexpr int kGroupK = kGroupSteps * kStepK;

struct Half { uint16_t slope[kPanel], offset[kPanel]; };
struct PackedStep {
    Half half[2];
    uint16_t q[8][2 * kPanel];
};

constexpr int kMostX = 127 * 256;  // its upper byte, rounded, is at most 127

typedef uint16_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * W)));

INLINE int64_t steps_of(int64_t k) { return (k + kStepK - 1) / kStepK; }
INLINE int64_t groups_of(int64_t steps) { return (steps + kGroupSteps - 1) / kGroupSteps; }
INLINE int64_t step_bytes(const PackedLinear& weight) {
    return weight.format == Format::int4 ? int64_t(sizeof(PackedStep)) : kStepLines;
}

template <class V> INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V> INLINE void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }

// Both words of an output's dword.
INLINE Words twice(const uint16_t* p) {
    const Dwords wide = __builtin_convertvector(load_as<HalfWords>(p), Dwords);
    return (Words)(wide | wide << 16);
}

INLINE void fetch_line(const char* at) {
    if (fetches_to_second_level) __builtin_prefetch(at, 0, 2);
    else __builtin_prefetch(at, 0, 3);
}

// The next piece, which is fetched while this one is expanded and multiplied with: `stride` bytes at every turn, at
// most two lines.
struct NextPiece {
    const char* at;
    int64_t stride;

    static NextPiece evenly(const char* at, int64_t bytes, int64_t turns) { return {at, (bytes + turns - 1) / turns}; }
    INLINE void turn() {
        fetch_line(at);
        if (stride > 64) fetch_line(at + 64);
        at += stride;
    }
};

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

// A piece of neighbouring panels, in steps of 8 bits; the panels' scales lie scale_stride elements apart.
struct Piece {
    const int8_t* lines;
    const bf16* scales;  // the first group's
    int64_t scale_stride;
    int64_t steps;
    int64_t ahead;  // bytes that a product fetches ahead, or 0

    int64_t panel_bytes() const { return steps * kStepLines; }
};

}}  // namespace pagemill
