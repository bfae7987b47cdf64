// Products of integers on tiles (AMX): a tile product adds 64 k to 16 rows x 16 outputs. Tiles take weights without
// sign and x with, as VNNI does. A row of x is two rows of a tile, of its upper bytes and of its lower ones, so 8 rows
// fill a tile. While a group is multiplied, the sums of the one before are scaled and added.
#pragma once

#include "amx_tiles.h"
#include "quantized_panels.h"
#include "simd.h"

#include <utility>

#if defined(__AMX_INT8__)
namespace pagemill { namespace {

constexpr int kRowsInTile = 8;
constexpr int kRaised = 128;
constexpr int64_t kExpandRows = 24;  // the expansion of a piece takes as long as the products of so many rows
constexpr int64_t kOwnOutputs8 = 0;  // cut_rows; each block expands the weights again

// Row 2 r of a step has the upper bytes of x's row r, and the next one the lower bytes.
struct alignas(64) TileGroup {
    int8_t step[kGroupSteps][2 * kRowsInTile][kStepK];
    int32_t correction[kRowsInTile];
    float scale[kRowsInTile];

    void put(const int32_t (*from)[kGroupK], int height, int length) {
        for (int r = 0; r < height; ++r) {
            __m512i sum = _mm512_setzero_si512();
            for (int i = 0; i < length; i += kStepK) {
                const Bytes bytes(from[r] + i, sum);
                _mm512_store_si512(step[i / kStepK][2 * r], bytes.upper);
                _mm512_store_si512(step[i / kStepK][2 * r + 1], bytes.lower);
            }
            correction[r] = -kRaised * _mm512_reduce_add_epi32(sum);
        }
    }
};

// The products of tiles of rows with pieces of up to kPanelsTogether panels. What one call multiplies, the next one or
// finish() adds to c. All tiles are as high as the highest, to the next even number: of c, [kRowsInTile][width], so
// many rows are written.
class Products {
  public:
    static constexpr bool kOneStream = false;

    explicit Products(int highest) : height((highest + 1) / 2 * 2) {
        const TileConfig config(2 * height);
        _tile_loadconfig(&config);
    }
    ~Products() { _tile_release(); }

    // `fetch` has a turn for each quad of each panel.
    void operator()(const TileGroup* x, int, const Piece& piece, int64_t count, float* c, bool add, NextPiece fetch) {
        with_count<kRowsInTile / 2>(height / 2, [&]<int Half>() {
            if (count == kPanelsTogether)
                return multiply<2 * Half, kPanelsTogether>(x, piece, 0, c, count * kPanel, add, fetch);
            for (int64_t i = 0; i < count; ++i)
                multiply<2 * Half, 1>(x, piece, i, c + i * kPanel, count * kPanel, add, fetch);
        });
    }

    void finish() {
        for (int p = 0; p < last.panels; ++p)
            for (int r = 0; r < height; ++r)
                last.add_row(sums[now][p], p, r, load(last.scales + p * last.scale_stride));
        last = {};
    }

  private:
    typedef int32_t TileSums[2 * kRowsInTile][kPanel];

    struct Multiplied {
        int panels;
        const TileGroup* x;
        const bf16* scales;
        int64_t scale_stride, width;
        float* c;
        bool add;

        INLINE void add_row(const TileSums& sum, int panel, int row, F scale) const {
            const __m512i upper = _mm512_load_si512(sum[2 * row]), lower = _mm512_load_si512(sum[2 * row + 1]);
            const __m512i both = _mm512_add_epi32(_mm512_slli_epi32(upper, 8), lower),
                          all = _mm512_add_epi32(both, _mm512_set1_epi32(x->correction[row]));
            float* out = c + row * width + panel * kPanel;
            store(out, fma({_mm512_cvtepi32_ps(all)}, scale * broadcast(x->scale[row]), add ? load(out) : zero()));
        }
    };

    const int height;
    alignas(64) TileSums sums[2][kPanelsTogether];
    int now = 0;
    Multiplied last{};

    template <int H, int P> void multiply(const TileGroup* x, const Piece& piece, int64_t panel, float* c,
                                          int64_t width, bool add, NextPiece& fetch) {
        const Multiplied before =
            std::exchange(last, {P, x, piece.scales + panel * piece.scale_stride, piece.scale_stride, width, c, add});
        const TileSums* const ready = sums[now];
        now ^= 1;
        F scale[P];
        for (int p = 0; before.panels && p < P; ++p) scale[p] = load(before.scales + p * before.scale_stride);
        auto between = [&](int s, int p) {
            for (int64_t at = 0; at < kStepK / 4 * fetch.stride; at += 64) fetch_line(fetch.at + at);
            fetch.at += kStepK / 4 * fetch.stride;
            if (!before.panels) return;
#pragma GCC unroll 8
            for (int r = s * H / kGroupSteps; r < (s + 1) * H / kGroupSteps; ++r)
                before.add_row(ready[p], p, r, scale[p]);
        };
        const int8_t* lines = piece.lines + panel * piece.stride;
        _tile_zero(0);
        if constexpr (P > 1) {
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
#pragma GCC unroll 3
        for (int s = 0; s < kGroupSteps; ++s) {
            const bool is_there = s < piece.steps;
            const int8_t* of_panel = lines + s * kStepK / 4 * piece.line_stride;
            if (is_there) {
                _tile_loadd(4, x->step[s], kStepK);
                _tile_loadd(6, of_panel, piece.line_stride);
                _tile_dpbsud(0, 4, 6);
            }
            between(s, 0);
            if constexpr (P > 1) {
                if (is_there) {
                    _tile_loadd(7, of_panel += piece.stride, piece.line_stride);
                    _tile_dpbsud(1, 4, 7);
                }
                between(s, 1);
                if (is_there) {
                    _tile_loadd(6, of_panel += piece.stride, piece.line_stride);
                    _tile_dpbsud(2, 4, 6);
                }
                between(s, 2);
                if (is_there) {
                    _tile_loadd(7, of_panel += piece.stride, piece.line_stride);
                    _tile_dpbsud(3, 4, 7);
                }
                between(s, 3);
            }
        }
        _tile_stored(0, sums[now][0], 64);
        if constexpr (P > 1) {
            _tile_stored(1, sums[now][1], 64);
            _tile_stored(2, sums[now][2], 64);
            _tile_stored(3, sums[now][3], 64);
        }
    }
};

}}  // namespace pagemill
#endif
