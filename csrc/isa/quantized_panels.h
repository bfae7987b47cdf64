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

#if defined(__AVX512VNNI__)
// The two bytes of each of a step's numbers of x, none beyond kMostX; adds the numbers to `sum`. They come in
// registers: what was stored in pieces of 16 bytes cannot be loaded as 64 until all pieces have reached the cache.
struct Bytes {
    __m512i lower, upper;

    Bytes(const int32_t* x, __m512i& sum) {
        // Packing takes lanes of 128 bits, four numbers of each vector in turn.
        const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
        const __m512i ones = _mm512_set1_epi16(1), half = _mm512_set1_epi16(128), byte = _mm512_set1_epi16(255);
        const __m512i a = _mm512_packs_epi32(_mm512_load_si512(x), _mm512_load_si512(x + 16)),
                      b = _mm512_packs_epi32(_mm512_load_si512(x + 32), _mm512_load_si512(x + 48));
        sum = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(sum, a, ones), b, ones);
        lower = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
        upper = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(a, half), 8),
                                   _mm512_srai_epi16(_mm512_add_epi16(b, half), 8));
        lower = _mm512_permutexvar_epi32(in_order, lower);
        upper = _mm512_permutexvar_epi32(in_order, upper);
    }
};
#endif

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
