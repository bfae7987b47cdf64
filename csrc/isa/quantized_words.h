// Products of integers in words: a vector instruction adds 2 k to an output of a row.
#pragma once

#include "quantized_panels.h"
#include "simd.h"

#if !defined(PRODUCTS_OF_BYTES)
namespace pagemill { namespace {

#if defined(__AVX512F__)
constexpr int kRowsInTile = 16;
#elif defined(__AVX2__)
constexpr int kRowsInTile = 4;
#else
constexpr int kRowsInTile = 2;
#endif
constexpr int kRaised = 0;
constexpr int64_t kExpandRows = 2;
constexpr int64_t kOwnOutputs8 = 24;  // cut_rows; each block expands the weights again

typedef int16_t SignedWords __attribute__((vector_size(4 * W)));

// x of a tile's rows: of each four k, 0, 2, 1, 3.
struct TileGroup {
    int16_t values[kRowsInTile][kGroupK];
    float scale[kRowsInTile];

    void put(const int32_t (*from)[kGroupK], int height, int length) {
        for (int r = 0; r < height; ++r)
            for (int i = 0; i < length; i += 4) {
                values[r][i] = int16_t(from[r][i]);
                values[r][i + 1] = int16_t(from[r][i + 2]);
                values[r][i + 2] = int16_t(from[r][i + 1]);
                values[r][i + 3] = int16_t(from[r][i + 3]);
            }
    }
};

// sum + the products of pairs of words; x is one pair.
INLINE Dwords multiply_pairs(Dwords sum, SignedWords weight, int32_t x) {
#if defined(__AVX512F__)
    return sum + (Dwords)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return sum + (Dwords)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(x));
#elif defined(__x86_64__)
    return sum + (Dwords)_mm_madd_epi16((__m128i)weight, _mm_set1_epi32(x));
#else
    return sum + ((Dwords)weight << 16 >> 16) * int16_t(x) + ((Dwords)weight >> 16) * (x >> 16);
#endif
}

// c [H][width] (+)= a tile of rows times a panel's group.
template <int H>
void group_product(const TileGroup& x, const Piece& piece, int64_t panel, float* c, int64_t width, bool add,
                   NextPiece& fetch) {
    constexpr int kVectors = kPanel / W;
    const int8_t* line = piece.lines + panel * piece.stride;
    Dwords sum[H][kVectors];
    for (int r = 0; r < H; ++r)
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Dwords{};
    for (int64_t k = 0; k < piece.steps * kStepK; k += 4, line += piece.line_stride) {
        fetch.turn();
        for (int v = 0; v < kVectors; ++v) {
            const SignedWords both = load_as<SignedWords>(line + v * W * 4), even = both << 8 >> 8, odd = both >> 8;
            for (int r = 0; r < H; ++r) {
                sum[r][v] = multiply_pairs(sum[r][v], even, load_as<int32_t>(x.values[r] + k));
                sum[r][v] = multiply_pairs(sum[r][v], odd, load_as<int32_t>(x.values[r] + k + 2));
            }
        }
    }
    for (int v = 0; v < kVectors; ++v) {
        const F scale = load(piece.scales + panel * piece.scale_stride + v * W);
        for (int r = 0; r < H; ++r) {
            float* out = c + r * width + v * W;
            store(out, fma(to_float(sum[r][v]), scale * broadcast(x.scale[r]), add ? load(out) : zero()));
        }
    }
}

// The products of a tile of rows with a piece of `count` panels; c [height][count * kPanel] takes them, or adds them.
struct Products {
    static constexpr bool kOneStream = false;

    explicit Products(int) {}
    void finish() const {}

    void operator()(const TileGroup* x, int height, const Piece& piece, int64_t count, float* c, bool add,
                    NextPiece fetch) const {
        with_count<kRowsInTile>(height, [&]<int H>() {
            for (int64_t i = 0; i < count; ++i)
                group_product<H>(*x, piece, i, c + i * kPanel, count * kPanel, add, fetch);
        });
    }
};

}}  // namespace pagemill
#endif
