// Panels of weights in integers (quantized.h): their parts, and what is fetched of them ahead.
#pragma once

#include "linear_tiles.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int kPanel = 16;
constexpr int kStepK = 64;
constexpr int kLine = 64;  // bytes: 4 neighbouring k of each of a panel's outputs
constexpr int64_t kLinesInStep = kStepK / 4;
constexpr int64_t kStepLines = kLinesInStep * kLine;  // bytes of an 8-bit step
constexpr int kPanelsTogether = 4;
// Whether 8-bit lines of panels that lie together alternate: where a product takes all of them at once.
#if defined(PRODUCTS_OF_BYTES) && defined(__x86_64__)
constexpr bool kAlternate = true;
#else
constexpr bool kAlternate = false;
#endif
constexpr int kHalfK = 32;
constexpr int kGroupSteps = 3;
constexpr int kGroupK = kGroupSteps * kStepK;

constexpr int kMostX = 127 * 256;  // its upper byte, rounded, is at most 127

INLINE int64_t steps_of(int64_t k) { return (k + kStepK - 1) / kStepK; }
INLINE int64_t groups_of(int64_t steps) { return (steps + kGroupSteps - 1) / kGroupSteps; }
template <class V> INLINE V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V> INLINE void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }

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

// A piece of neighbouring panels, in steps of 8 bits. Strides lead from a panel to the next, in bytes and, for scales,
// in elements; and from a line of a panel to its next.
struct Piece {
    const int8_t* lines;
    int64_t stride, line_stride;
    const bf16* scales;  // the first group's
    int64_t scale_stride;
    int64_t steps;
};

}}  // namespace pagemill
