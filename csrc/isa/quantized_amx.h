// Products of integers on tiles (AMX): a tile product adds 64 k to 16 rows x 16 outputs. A step takes two, of x's high
// and low parts; a group ends in fp32.
#pragma once

#include "amx_tiles.h"
#include "quantized_panels.h"
#include "simd.h"

#include <type_traits>

#if defined(__AMX_INT8__)
namespace pagemill { namespace {

constexpr int kRowsInTile = 16;
constexpr int kRaised = 0;
constexpr int64_t kStepsAtOnce = int64_t(1) << 40;  // all of k
constexpr bool kFetchEvenly = false;
constexpr int64_t kExpandRows = 0;
constexpr int64_t kOwnOutputs8 = 0;  // cut_rows; each block expands the weights again

// So many that what a tile of rows writes lies together, and 8-bit steps stay in the second-level cache.
INLINE int64_t panels_together(int64_t tiles, int64_t steps) {
    constexpr int64_t kTogetherBytes = 192 << 10;
    return tiles == 1 ? 1 : greater<int64_t>(1, lesser<int64_t>(8, kTogetherBytes / (steps * kStepLines)));
}

struct alignas(64) TileGroup {
    struct { int8_t high[kRowsInTile][kStepK], low[kRowsInTile][kStepK]; } step[kGroupSteps];
    float scale[kRowsInTile];

    void put(const int32_t (*from)[kGroupK], int height, int length) {
        for (int r = 0; r < height; ++r)
            for (int s = 0; s < length / kStepK; ++s) {
                const int32_t* x = from[r] + s * kStepK;
                for (int i = 0; i < kStepK; ++i) step[s].high[r][i] = int8_t((x[i] + 128) >> 8);
                for (int i = 0; i < kStepK; ++i) step[s].low[r][i] = int8_t(x[i]);
            }
    }
};

// Tiles 0 to 3 take sums (high, low; of an even and an odd group), 4 and 5 hold x, 6 the panel's step.
// c [H][width] = a tile of rows times a panel.
template <int H> void panel_product(const TileGroup* rows, const Piece& piece, int64_t panel, float* c, int64_t width) {
    alignas(64) int32_t sums[2][2][H][kPanel];
    F acc[H];
    for (int r = 0; r < H; ++r) acc[r] = zero();
    const int8_t* of_panel = piece.lines + panel * piece.panel_bytes();
    const bf16* scales = piece.scales + panel * piece.scale_stride;
    const int64_t groups = groups_of(piece.steps);
    auto multiply = [&](int64_t g, auto second) {
        if constexpr (second) {
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        for (int64_t s = g * kGroupSteps; s < lesser((g + 1) * kGroupSteps, piece.steps); ++s) {
            const int8_t* lines = of_panel + s * kStepLines;
            const auto& x = rows[g].step[s - g * kGroupSteps];
            for (int64_t line = 0; piece.ahead && line < kStepLines; line += 64)
                __builtin_prefetch(lines + piece.ahead + line, 0, 2);
            _tile_loadd(4, x.high, 64);
            _tile_loadd(5, x.low, 64);
            _tile_loadd(6, lines, 64);
            if constexpr (second) {
                _tile_dpbssd(2, 4, 6);
                _tile_dpbssd(3, 5, 6);
            } else {
                _tile_dpbssd(0, 4, 6);
                _tile_dpbssd(1, 5, 6);
            }
        }
        if constexpr (second) {
            _tile_stored(2, sums[1][0], 64);
            _tile_stored(3, sums[1][1], 64);
        } else {
            _tile_stored(0, sums[0][0], 64);
            _tile_stored(1, sums[0][1], 64);
        }
    };
    auto add = [&](int64_t g) {
        const F scale = load(scales + g * kPanel);
        const float* x = rows[g].scale;
        for (int r = 0; r < H; ++r) {
            const __m512i high = _mm512_load_si512(sums[g % 2][0][r]), low = _mm512_load_si512(sums[g % 2][1][r]);
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
            acc[r] = fma({_mm512_cvtepi32_ps(sum)}, scale * broadcast(x[r]), acc[r]);
        }
    };
    multiply(0, std::false_type{});
    for (int64_t g = 0; g < groups; g += 2) {
        if (g + 1 < groups) multiply(g + 1, std::true_type{});
        add(g);
        if (g + 2 < groups) multiply(g + 2, std::false_type{});
        if (g + 1 < groups) add(g + 1);
    }
    for (int r = 0; r < H; ++r) store(c + r * width, acc[r]);
}

// The products of a tile of rows with `count` panels; c [height][count * kPanel] takes them. All tiles are as high as
// the highest, to the next even number; what the rows beyond give is dropped.
struct Products {
    int height;

    explicit Products(int highest) : height(highest == 1 ? 1 : (highest + 1) / 2 * 2) {
        const TileConfig config(height);
        _tile_loadconfig(&config);
    }
    ~Products() { _tile_release(); }

    void operator()(const TileGroup* x, int, const Piece& piece, int64_t count, float* c, bool,
                    const NextPiece&) const {
        run(x, piece, count, c, Upto<kRowsInTile / 2>{});
    }

    template <int... I> void run(const TileGroup* x, const Piece& piece, int64_t count, float* c,
                                 Sequence<I...>) const {
        static constexpr decltype(&panel_product<1>) table[] = {panel_product<1>, panel_product<I * 2 + 2>...};
        for (int64_t i = 0; i < count; ++i) table[height / 2](x, piece, i, c + i * kPanel, count * kPanel);
    }
};

}}  // namespace pagemill
#endif
