// Products of bf16 on tiles (AMX): two tiles or one of rows with a panel, step by step.
#pragma once

#include "coded.h"
#include "linear_tiles.h"
#include "simd.h"

#if defined(__AMX_BF16__)
namespace pagemill { namespace {

constexpr int64_t kStep = 32;  // k in a tile product
constexpr int kTileHeight = 16;

constexpr int64_t kAheadTiles = 8192;  // with one pass over a panel: how far ahead in it, to hide memory's latency

// Tiles 0-3 accumulate, 4 and 5 hold x, 6 and 7 a panel's step.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};

    explicit TileConfig(int height) {
        for (int tile = 0; tile < 8; ++tile) rows[tile] = uint8_t(tile < 6 ? height : 16);
    }
};

// Rows of x as tiles read them: row r, step s at data + r * row + s * step bytes.
struct TileRows {
    const char* data;
    int64_t row, step;
};

// Weights to fetch during a product: `bytes` in each of its steps, from `at` on; at once, or in parts between the
// tiles' loads, which need the same few buffers. What products take as `Ahead` may decode there, too.
template <int NP> struct TilesAhead {
    const char* at;
    int64_t bytes, panel = 0;  // bytes between NP panels

    INLINE void fetch(int64_t step, int part = 0, int parts = 1) const {
        for (int p = 0; p < NP; ++p)
            for (int64_t line = part * 64; line < bytes; line += parts * 64)
                __builtin_prefetch(at + p * panel + step * bytes + line, 0, 2);
    }
};

// c [2 * height][NR] (+)= two tiles of rows times `steps` steps of a panel.
template <class Ahead>
void amx_two_tiles(TileRows first, TileRows second, const char* b, int64_t steps, float* c, int height, bool add,
                   const Ahead& ahead) {
    constexpr int64_t kRow = NR * sizeof(float);
    float* below = c + height * NR;
    if (add) {
        _tile_loadd(0, c, kRow);
        _tile_loadd(1, c + W, kRow);
        _tile_loadd(2, below, kRow);
        _tile_loadd(3, below + W, kRow);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, b += kStepBytes) {
        ahead.fetch(s, 0, 4);
        _tile_loadd(6, b, kLineBytes);
        _tile_loadd(4, first.data + s * first.step, first.row);
        _tile_dpbf16ps(0, 4, 6);
        ahead.fetch(s, 1, 4);
        _tile_loadd(7, b + 64, kLineBytes);
        _tile_dpbf16ps(1, 4, 7);
        ahead.fetch(s, 2, 4);
        _tile_loadd(5, second.data + s * second.step, second.row);
        _tile_dpbf16ps(2, 5, 6);
        ahead.fetch(s, 3, 4);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, kRow);
    _tile_stored(1, c + W, kRow);
    _tile_stored(2, below, kRow);
    _tile_stored(3, below + W, kRow);
}

// c [height][NP * NR] (+)= one tile of rows times NP panels, which lie b_panel bytes apart.
template <int NP, class Ahead>
void amx_one_tile(TileRows x, const char* b, int64_t b_panel, int64_t steps, float* c, bool add, const Ahead& ahead) {
    constexpr int64_t kRow = NP * NR * sizeof(float);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (add) {
        _tile_loadd(0, c, kRow);
        _tile_loadd(1, c + W, kRow);
        if (NP == 2) _tile_loadd(2, c + 2 * W, kRow);
        if (NP == 2) _tile_loadd(3, c + 3 * W, kRow);
    }
    for (int64_t s = 0; s < steps; ++s, b += kStepBytes) {
        ahead.fetch(s, 0, 4);
        _tile_loadd(4, x.data + s * x.step, x.row);
        _tile_loadd(6, b, kLineBytes);
        _tile_dpbf16ps(0, 4, 6);
        ahead.fetch(s, 1, 4);
        _tile_loadd(7, b + 64, kLineBytes);
        _tile_dpbf16ps(1, 4, 7);
        ahead.fetch(s, 2, 4);
        if (NP == 2) {
            _tile_loadd(6, b + b_panel, kLineBytes);
            _tile_dpbf16ps(2, 4, 6);
        }
        ahead.fetch(s, 3, 4);
        if (NP == 2) {
            _tile_loadd(7, b + b_panel + 64, kLineBytes);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, c, kRow);
    _tile_stored(1, c + W, kRow);
    if (NP == 2) _tile_stored(2, c + 2 * W, kRow);
    if (NP == 2) _tile_stored(3, c + 3 * W, kRow);
}

}}  // namespace pagemill
#endif
