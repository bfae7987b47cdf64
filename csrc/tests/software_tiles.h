// Tiles of AMX in software, included before everything else of amx_bf16's kernels (PAGEMILL_SOFTWARE_TILES): so their
// checks run on processors that have AVX-512 but no tiles, and sanitizers see what tiles read and write. Sums of bf16
// are rounded in another order than the processor's.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#undef _tile_dpbf16ps

namespace pagemill::software_tiles {

constexpr int kTiles = 8, kMostRows = 16, kRowBytes = 64;

struct Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

struct State {
    Config config;
    uint8_t tile[kTiles][kMostRows][kRowBytes];
};
inline thread_local State state;

template <class T> T get(int tile, int row, int at) {
    T value;
    std::memcpy(&value, state.tile[tile][row] + at * sizeof(T), sizeof value);
    return value;
}
template <class T> void put(int tile, int row, int at, T value) {
    std::memcpy(state.tile[tile][row] + at * sizeof(T), &value, sizeof value);
}
inline float widened(uint16_t value) {
    const uint32_t bits = uint32_t(value) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return wide;
}

inline void load_config(const void* from) {
    std::memset(&state, 0, sizeof state);
    std::memcpy(&state.config, from, sizeof state.config);
}
inline void zero(int tile) { std::memset(state.tile[tile], 0, sizeof state.tile[tile]); }
inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < state.config.rows[tile]; ++row)
        std::memcpy(state.tile[tile][row], (const char*)from + row * stride, state.config.row_bytes[tile]);
}
inline void store(int tile, void* to, int64_t stride) {
    for (int row = 0; row < state.config.rows[tile]; ++row)
        std::memcpy((char*)to + row * stride, state.tile[tile][row], state.config.row_bytes[tile]);
}

// sum += a times b: in each 32 bits of a's row m and of b's row k, neighbouring elements of T and U.
template <class Sum, class T, class U, class Product> void multiply(int sum, int a, int b, const Product& product) {
    const Config& of = state.config;
    if (of.palette != 1 || of.rows[sum] != of.rows[a] || of.row_bytes[sum] != of.row_bytes[b] ||
        of.row_bytes[a] > 4 * of.rows[b])
        __builtin_trap();
    constexpr int kEach = 4 / sizeof(T);
    for (int m = 0; m < state.config.rows[sum]; ++m)
        for (int n = 0; n < state.config.row_bytes[sum] / 4; ++n) {
            Sum all = get<Sum>(sum, m, n);
            for (int k = 0; k < state.config.row_bytes[a] / 4; ++k)
                for (int i = 0; i < kEach; ++i)
                    all += product(get<T>(a, m, k * kEach + i), get<U>(b, k, n * kEach + i));
            put(sum, m, n, all);
        }
}

}  // namespace pagemill::software_tiles

#define _tile_loadconfig(from) pagemill::software_tiles::load_config(from)
#define _tile_release() std::memset(&pagemill::software_tiles::state, 0, sizeof(pagemill::software_tiles::State))
#define _tile_zero(tile) pagemill::software_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) pagemill::software_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) pagemill::software_tiles::store(tile, to, stride)
#define _tile_dpbsud(sum, a, b) \
    pagemill::software_tiles::multiply<int32_t, int8_t, uint8_t>(sum, a, b, [](int8_t x, uint8_t y) { return x * y; })
#define _tile_dpbf16ps(sum, a, b)                                                                         \
    pagemill::software_tiles::multiply<float, uint16_t, uint16_t>(sum, a, b, [](uint16_t x, uint16_t y) { \
        return pagemill::software_tiles::widened(x) * pagemill::software_tiles::widened(y);               \
    })
