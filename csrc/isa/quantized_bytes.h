// Products of integers in bytes: an instruction adds 4 k to W outputs of a row. VNNI takes weights without sign and x
// with, ARM both with. A group's sum is 256 * that of x's upper bytes + that of its lower bytes - kRaised * the sum of
// x. Nearly all upper bytes are 0: only where 4 neighbouring k have others are they multiplied. Where ARM multiplies
// matrices of 2 x 8 bytes (i8mm), pairs of rows take lower bytes that way.
#pragma once

#include "quantized_panels.h"
#include "simd.h"

#if defined(PRODUCTS_OF_BYTES) && !defined(__AMX_INT8__)
namespace pagemill { namespace {

#if defined(__aarch64__)
constexpr int kRowsInTile = 6;
constexpr int kRaised = 0;
constexpr int kPanelsAtOnce = 1;  // in registers
#else
constexpr int kRowsInTile = 4;
constexpr int kRaised = 128;
constexpr int kPanelsAtOnce = kPanelsTogether;
#endif
constexpr int kVectors = kPanel / W;  // of a panel
// The next piece is fetched evenly over a piece's expansion, which takes as long as the products of kExpandRows rows,
// and all its products: fetches in bursts hold them up.
constexpr int64_t kExpandRows = 6;
constexpr int64_t kOwnOutputs8 = 24;  // cut_rows; each block expands the weights again

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
            has_high[r] = 0;
#if defined(__aarch64__)
            int8_t upper[kGroupK];
            correction[r] = 0;
            for (int i = 0; i < length; ++i) {
                low[r][i] = int8_t(from[r][i]);
                upper[i] = int8_t((from[r][i] + 128) >> 8);
            }
            for (int i = 0; i < length; i += 4)
                if (const auto four = load_as<int32_t>(upper + i)) {
                    has_high[r] |= uint64_t(1) << i / 4;
                    *to++ = four;
                }
#else
            __m512i sum = _mm512_setzero_si512();
            for (int i = 0; i < length; i += kStepK) {
                const Bytes bytes(from[r] + i, sum);
                _mm512_store_si512(low[r] + i, bytes.lower);
                const __mmask16 found = _mm512_test_epi32_mask(bytes.upper, bytes.upper);
                has_high[r] |= uint64_t(found) << i / 4;
                _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(found, bytes.upper));
                to += __builtin_popcount(found);
            }
            correction[r] = -kRaised * _mm512_reduce_add_epi32(sum);
#endif
        }
    }
};

// sum [H] += lower bytes of rows from `first` on times P panels. Fetches: lines at every quad. Alternate: whether a
// line of each panel follows the other.
template <int H, int P, int Fetches, bool Alternate>
INLINE void add_low(const TileGroup& x, int first, const int8_t* lines, const Piece& piece, Dwords (*sum)[P * kVectors],
                    NextPiece& fetch) {
    constexpr int V = P * kVectors;
    const int64_t quads = piece.steps * kStepK / 4;
    // The piece's strides, as constants where they are known.
    const int64_t stride = Alternate ? kLine : piece.stride;
    const int64_t line_stride = P == 1 ? piece.line_stride : (Alternate ? P : 1) * kLine;
    for (int64_t quad = 0; quad < quads; ++quad) {
        Dwords weight[V];
        for (int v = 0; v < V; ++v)
            weight[v] = load_as<Dwords>(lines + quad * line_stride + v / kVectors * stride + v % kVectors * 4 * W);
        for (int i = 0; i < Fetches; ++i) fetch_line(fetch.at + i * 64);
        fetch.at += P * fetch.stride;
        for (int r = 0; r < H; ++r) {
            const auto four = load_as<int32_t>(x.low[first + r] + quad * 4);
            for (int v = 0; v < V; ++v) sum[r][v] = add_fours(sum[r][v], weight[v], four);
        }
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// The same for pairs of rows and one panel; what two quads have of an output is brought together.
template <int Pairs>
INLINE void add_low_of_pairs(const TileGroup& x, const int8_t* lines, int64_t quads, Dwords (*sum)[kVectors],
                             NextPiece& fetch) {
    int32x4_t both[Pairs][kVectors][2] = {};  // two outputs of two rows
    for (int64_t quad = 0; quad < quads; quad += 2, lines += 128) {
        int8x16_t rows[Pairs];
        for (int r = 0; r < Pairs; ++r)
            rows[r] = vcombine_s8(vld1_s8(x.low[2 * r] + quad * 4), vld1_s8(x.low[2 * r + 1] + quad * 4));
        fetch.turn();
        fetch.turn();
        for (int v = 0; v < kVectors; ++v) {
            const auto a = load_as<int32x4_t>(lines + v * 16), b = load_as<int32x4_t>(lines + 64 + v * 16);
            const auto first = (int8x16_t)vzip1q_s32(a, b), second = (int8x16_t)vzip2q_s32(a, b);
            for (int r = 0; r < Pairs; ++r) {
                both[r][v][0] = vmmlaq_s32(both[r][v][0], first, rows[r]);
                both[r][v][1] = vmmlaq_s32(both[r][v][1], second, rows[r]);
            }
        }
    }
    for (int r = 0; r < Pairs; ++r)
        for (int v = 0; v < kVectors; ++v) {
            sum[2 * r][v] += (Dwords)vuzp1q_s32(both[r][v][0], both[r][v][1]);
            sum[2 * r + 1][v] += (Dwords)vuzp2q_s32(both[r][v][0], both[r][v][1]);
        }
}
#endif

// c [H][width] (+)= a tile of rows times a group of P panels. Fetches, Alternate: as of add_low.
template <int H, int P, int Fetches, bool Alternate>
void group_product(const TileGroup& x, const Piece& piece, int64_t panel, float* c, int64_t width, bool add,
                   NextPiece& fetch) {
    constexpr int V = P * kVectors;
    const int8_t* lines = piece.lines + panel * piece.stride;
    Dwords sum[H][V];
    for (int r = 0; r < H; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = Dwords{} + x.correction[r];
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (H > 1) add_low_of_pairs<H / 2>(x, lines, piece.steps * kStepK / 4, sum, fetch);
    if constexpr (H % 2) add_low<1, P, Fetches, Alternate>(x, H - 1, lines, piece, sum + H - 1, fetch);
#else
    add_low<H, P, Fetches, Alternate>(x, 0, lines, piece, sum, fetch);
#endif
    const int32_t* high = x.high;
    F scale[V];
    for (int v = 0; v < V; ++v)
        scale[v] = load(piece.scales + (panel + v / kVectors) * piece.scale_stride + v % kVectors * W);
#pragma GCC unroll 8
    for (int r = 0; r < H; ++r) {
        if (x.has_high[r]) {
            Dwords upper[V] = {};
            for (uint64_t left = x.has_high[r]; left; left &= left - 1) {
                const int8_t* line = lines + __builtin_ctzll(left) * piece.line_stride;
                const int32_t four = *high++;
                for (int v = 0; v < V; ++v) {
                    const int8_t* at = line + v / kVectors * piece.stride + v % kVectors * 4 * W;
                    upper[v] = add_fours(upper[v], load_as<Dwords>(at), four);
                }
            }
            for (int v = 0; v < V; ++v) sum[r][v] += upper[v] << 8;
        }
        for (int v = 0; v < V; ++v) {
            float* out = c + r * width + v * W;
            store(out, fma(to_float(sum[r][v]), scale[v] * broadcast(x.scale[r]), add ? load(out) : zero()));
        }
    }
}

// The products of a tile of rows with a piece of `count` panels; c [height][count * kPanel] takes them, or adds them.
struct Products {
    static constexpr bool kOneStream = kAlternate;  // is what a tile by itself reads of 8-bit weights

    explicit Products(int) {}
    void finish() const {}

    // `fetch` has a turn for each quad of each panel.
    void operator()(const TileGroup* x, int height, const Piece& piece, int64_t count, float* c, bool add,
                    NextPiece fetch) const {
        with_count<kRowsInTile>(height, [&]<int H>() {
            constexpr int P = kPanelsAtOnce;
            if (P == 1 || count < P)
                for (int64_t i = 0; i < count; ++i)
                    group_product<H, 1, 1, false>(*x, piece, i, c + i * kPanel, count * kPanel, add, fetch);
            else if (piece.stride != kLine) together<H, P, false>(x, piece, c, add, fetch);
            else if (fetch.stride) together<H, P, true>(x, piece, c, add, fetch);
            else group_product<H, P, 0, true>(*x, piece, 0, c, P * kPanel, add, fetch);
        });
    }

  private:
    template <int H, int P, bool Alternate>
    void together(const TileGroup* x, const Piece& piece, float* c, bool add, NextPiece& fetch) const {
        if (P * fetch.stride <= 64) group_product<H, P, 1, Alternate>(*x, piece, 0, c, P * kPanel, add, fetch);
        else if (P * fetch.stride <= 128) group_product<H, P, 2, Alternate>(*x, piece, 0, c, P * kPanel, add, fetch);
        else group_product<H, P, P, Alternate>(*x, piece, 0, c, P * kPanel, add, fetch);
    }
};

}}  // namespace pagemill
#endif
