// Tiles of AMX in software, included before everything else of amx_bf16's kernels (PAGEMILL_SOFTWARE_TILES): so their
// checks run on processors that have AVX-512 but no tiles, and sanitizers see what tiles read and write. With the
// processor's bits: the kernels' vectors repeat them (attention_bf16.h).
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

inline void check_shapes(int sum, int a, int b) {
    const Config& of = state.config;
    if (of.palette != 1 || of.rows[sum] != of.rows[a] || of.row_bytes[sum] != of.row_bytes[b] ||
        of.row_bytes[a] > 4 * of.rows[b])
        __builtin_trap();
}

// sum += a times b: in each 32 bits of a's row m and of b's row k, four neighbouring bytes.
inline void multiply_bytes(int sum, int a, int b) {
    check_shapes(sum, a, b);
    for (int m = 0; m < state.config.rows[sum]; ++m)
        for (int n = 0; n < state.config.row_bytes[sum] / 4; ++n) {
            auto all = get<int32_t>(sum, m, n);
            for (int k = 0; k < state.config.row_bytes[a]; ++k)
                all += get<int8_t>(a, m, k) * get<uint8_t>(b, k / 4, n * 4 + k % 4);
            put(sum, m, n, all);
        }
}

// The same of two neighbouring bf16 numbers: each has a chain of its own, and subnormal numbers are taken for zero.
inline void multiply_bf16(int sum, int a, int b) {
    check_shapes(sum, a, b);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    for (int m = 0; m < state.config.rows[sum]; ++m)
        for (int n = 0; n < state.config.row_bytes[sum] / 4; ++n) {
            float chain[2] = {0, 0};
            for (int k = 0; k < state.config.row_bytes[a] / 2; ++k)
                chain[k % 2] = __builtin_fmaf(widened(get<uint16_t>(a, m, k)),
                                              widened(get<uint16_t>(b, k / 2, n * 2 + k % 2)), chain[k % 2]);
            put(sum, m, n, get<float>(sum, m, n) + (chain[0] + chain[1]));
        }
    _mm_setcsr(before);
}

}  // namespace pagemill::software_tiles

#define _tile_loadconfig(from) pagemill::software_tiles::load_config(from)
#define _tile_release() std::memset(&pagemill::software_tiles::state, 0, sizeof(pagemill::software_tiles::State))
#define _tile_zero(tile) pagemill::software_tiles::zero(tile)
#define _tile_loadd(tile, from, stride) pagemill::software_tiles::load(tile, from, stride)
#define _tile_stored(tile, to, stride) pagemill::software_tiles::store(tile, to, stride)
#define _tile_dpbsud(sum, a, b) pagemill::software_tiles::multiply_bytes(sum, a, b)
#define _tile_dpbf16ps(sum, a, b) pagemill::software_tiles::multiply_bf16(sum, a, b)
