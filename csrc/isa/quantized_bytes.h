// Products of integers in bytes (VNNI): an instruction adds 4 k to 16 outputs of a row, weights without sign and x
// with. A group's sum is 256 * that of x's upper bytes + that of its lower bytes - kRaised * the sum of x. Nearly all
// upper bytes are 0: only where 4 neighbouring k have others are they multiplied.
#pragma once

#include "quantized_panels.h"
#include "simd.h"

#if defined(__AVX512VNNI__) && !defined(__AMX_INT8__)
namespace pagemill { namespace {

constexpr int kRowsInTile = 4;
constexpr int kRaised = 128;
constexpr int64_t kStepsAtOnce = kGroupSteps;
// The next piece is fetched evenly over a piece's expansion, which takes as long as the products of kExpandRows rows,
// and all its products: fetches in bursts hold them up.
constexpr bool kFetchEvenly = true;
constexpr int64_t kExpandRows = 6;
constexpr int64_t kOwnOutputs8 = 24;  // cut_rows; each block expands the weights again

INLINE int64_t panels_together(int64_t, int64_t) { return kPanelsTogether; }

// Upper bytes follow each other by rows, in ascending k: threads read what others wrote, so the fewer lines the better.
struct alignas(64) TileGroup {
    int8_t low[kRowsInTile][kGroupK];
    int32_t correction[kRowsInTile];
    float scale[kRowsInTile];
    uint64_t has_high[kRowsInTile];  // a bit per 4 k: their upper bytes are not all 0
    int32_t high[kRowsInTile * kGroupK / 4 + 16];

    void put(const int32_t (*from)[kGroupK], int height, int length) {
        int32_t* to = high;
        for (int r = 0; r < height; ++r) {
            alignas(64) int8_t upper[kGroupK];
            __m512i sum = _mm512_setzero_si512();
            for (int i = 0; i < length; i += 16) {
                const __m512i x = _mm512_load_si512(from[r] + i), above = _mm512_add_epi32(x, _mm512_set1_epi32(128));
                sum = _mm512_add_epi32(sum, x);
                _mm_store_si128((__m128i*)(low[r] + i), _mm512_cvtepi32_epi8(x));
                _mm_store_si128((__m128i*)(upper + i), _mm512_cvtepi32_epi8(_mm512_srai_epi32(above, 8)));
            }
            correction[r] = -kRaised * _mm512_reduce_add_epi32(sum);
            has_high[r] = 0;
            for (int i = 0; i < length; i += kStepK) {
                const __m512i bytes = _mm512_load_si512(upper + i);
                const __mmask16 found = _mm512_test_epi32_mask(bytes, bytes);
                has_high[r] |= uint64_t(found) << i / 4;
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(found, bytes));
                to += __builtin_popcount(found);
            }
        }
    }
};

// c [H][width] (+)= a tile of rows times a group of P panels. Fetches: lines at every quad.
template <int H, int P, int Fetches>
void group_product(const TileGroup& x, const Piece& piece, int64_t panel, float* c, int64_t width, bool add,
                   FirstAhead& fetch) {
    const int64_t stride = piece.panel_bytes();
    const int8_t* lines = piece.lines + panel * stride;
    Dwords sum[H][P];
    for (int r = 0; r < H; ++r)
        for (int p = 0; p < P; ++p) sum[r][p] = Dwords{} + x.correction[r];
    const int64_t quads = piece.steps * kStepK / 4;
    for (int64_t quad = 0; quad < quads; ++quad) {
        __m512i weight[P];
        for (int p = 0; p < P; ++p) weight[p] = _mm512_loadu_si512(lines + p * stride + quad * 64);
        for (int i = 0; i < Fetches; ++i) __builtin_prefetch(fetch.at + i * 64, 0, 3);
        fetch.at += P * fetch.stride;
        for (int r = 0; r < H; ++r) {
            const __m512i four = _mm512_set1_epi32(load_as<int32_t>(x.low[r] + quad * 4));
            for (int p = 0; p < P; ++p) sum[r][p] = (Dwords)_mm512_dpbusd_epi32((__m512i)sum[r][p], weight[p], four);
        }
    }
    const int32_t* high = x.high;
    F scale[P];
    for (int p = 0; p < P; ++p) scale[p] = load(piece.scales + (panel + p) * piece.scale_stride);
#pragma GCC unroll 8
    for (int r = 0; r < H; ++r) {
        if (x.has_high[r]) {
            Dwords upper[P] = {};
            for (uint64_t left = x.has_high[r]; left; left &= left - 1) {
                const int8_t* line = lines + __builtin_ctzll(left) * 64;
                const __m512i four = _mm512_set1_epi32(*high++);
                for (int p = 0; p < P; ++p)
                    upper[p] =
                        (Dwords)_mm512_dpbusd_epi32((__m512i)upper[p], _mm512_loadu_si512(line + p * stride), four);
            }
            for (int p = 0; p < P; ++p) sum[r][p] += upper[p] << 8;
        }
        for (int p = 0; p < P; ++p) {
            float* out = c + r * width + p * W;
            store(out, fma(to_float(sum[r][p]), scale[p] * broadcast(x.scale[r]), add ? load(out) : zero()));
        }
    }
}

// The products of a tile of rows with a piece of `count` panels; c [height][count * kPanel] takes them, or adds them.
struct Products {
    explicit Products(int) {}

    // `fetch` has a turn for each quad of each panel.
    void operator()(const TileGroup* x, int height, const Piece& piece, int64_t count, float* c, bool add,
                    FirstAhead fetch) const {
        with_count<kRowsInTile>(height, [&]<int H>() {
            constexpr int P = kPanelsTogether;
            if (count < P)
                for (int64_t i = 0; i < count; ++i)
                    group_product<H, 1, 1>(*x, piece, i, c + i * kPanel, count * kPanel, add, fetch);
            else if (P * fetch.stride <= 64) group_product<H, P, 1>(*x, piece, 0, c, P * kPanel, add, fetch);
            else if (P * fetch.stride <= 128) group_product<H, P, 2>(*x, piece, 0, c, P * kPanel, add, fetch);
            else group_product<H, P, P>(*x, piece, 0, c, P * kPanel, add, fetch);
        });
    }
};

}}  // namespace pagemill
#endif
