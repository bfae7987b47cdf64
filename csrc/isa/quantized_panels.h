// Panels of weights in integers (quantized.h): their parts, and 8-bit lines from those of fewer bits.
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

// Slope and offset of each output; with 6 bits, the slopes of its first and second 16 k.
struct Half { uint16_t first[kPanel], second[kPanel]; };
template <int Bits> struct PackedStep {
    static constexpr int kBits = Bits;
    Half half[2];
    uint16_t q[8][2 * kPanel];
    uint16_t above[2 * (Bits - 4)][2 * kPanel];  // the bits above the fourth
};
template <> struct PackedStep<4> {
    static constexpr int kBits = 4;
    Half half[2];
    uint16_t q[8][2 * kPanel];
};

// body(a step's type)
template <class Body> INLINE void with_steps(Format format, Body&& body) {
    if (format == Format::int4) body((PackedStep<4>*)nullptr);
    else if (format == Format::int5) body((PackedStep<5>*)nullptr);
    else body((PackedStep<6>*)nullptr);
}

// Where k `i` of a step's half `h` lies for the output `lane`: in a word of a line of q; n counts its words' values.
struct Place {
    int line, word, half, n;

    Place(int lane, int h, int i)
        : line(4 * h + i / 8), word(lane * 2 + i % 4 / 2), half(h), n(i / 8 * 4 + i % 8 / 4 * 2 + i % 2) {}
};

template <int Bits> INLINE void put(PackedStep<Bits>& step, Place at, int value) {
    step.q[at.line][at.word] |= uint16_t((value & 15) << at.n % 4 * 4);
    if constexpr (Bits > 4) {
        const int bit = at.n * (Bits - 4);
        step.above[at.half * (Bits - 4) + bit / 16][at.word] |= uint16_t(value >> 4 << bit % 16);
    }
}

template <int Bits> INLINE int get(const PackedStep<Bits>& step, Place at) {
    int value = step.q[at.line][at.word] >> at.n % 4 * 4 & 15;
    if constexpr (Bits > 4) {
        const int bit = at.n * (Bits - 4);
        value |= (step.above[at.half * (Bits - 4) + bit / 16][at.word] >> bit % 16 & ((1 << (Bits - 4)) - 1)) << 4;
    }
    return value;
}

constexpr int kMostX = 127 * 256;  // its upper byte, rounded, is at most 127

typedef uint16_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * W)));

INLINE int64_t steps_of(int64_t k) { return (k + kStepK - 1) / kStepK; }
INLINE int64_t groups_of(int64_t steps) { return (steps + kGroupSteps - 1) / kGroupSteps; }
INLINE int64_t step_bytes(const PackedLinear& weight) {
    int64_t bytes = kStepLines;
    if (weight.format != Format::int8) with_steps(weight.format, [&]<class Step>(Step*) { bytes = sizeof(Step); });
    return bytes;
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

using FirstAhead = Fetch<true>;

constexpr int kTurnsInStep = 2 * kPanel / W * 4;  // of expand_steps

// What the n-th value of each word of a half has above its fourth bit.
template <int Bits> INLINE Words above(const PackedStep<Bits>& step, int h, int v, int n) {
    if constexpr (Bits == 4) return Words{};
    else {
        constexpr int kAbove = Bits - 4;
        constexpr uint16_t kMask = ((1 << kAbove) - 1) << 4;
        const Words word = load_as<Words>(step.above[h * kAbove + n * kAbove / 16] + 2 * v);
        const int at = n * kAbove % 16;
        return (at < 4 ? word << (4 - at) : word >> (at - 4)) & kMask;
    }
}

// The 8-bit lines of packed steps. A weight of 0 in 6 bits becomes `middle` / 256.
template <int Bits> void expand_steps(const PackedStep<Bits>* from, int64_t steps, int8_t* lines, uint16_t middle,
                                      FirstAhead fetch) {
    for (int64_t s = 0; s < steps; ++s, ++from, lines += kStepLines) {
        for (int h = 0; h < 2; ++h)
            for (int v = 0; v < kPanel; v += W) {
                const Words first = twice(from->half[h].first + v), second = twice(from->half[h].second + v);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    fetch.turn();
                    const Words slope = Bits == 6 && i >= 2 ? second : first;
                    const Words offset = Bits == 6 ? middle - (slope << 5) : second;
                    const Words word = load_as<Words>(from->q[4 * h + i] + 2 * v);
                    const auto of = [&](Words low, int j) {
                        return (low | above(*from, h, v, 4 * i + j)) * slope + offset;
                    };
                    const Words a = of(word & 15, 0), b = of(word >> 4 & 15, 1);
                    const Words c = of(word >> 8 & 15, 2), d = of(word >> 12, 3);
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
