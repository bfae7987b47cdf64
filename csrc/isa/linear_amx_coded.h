// Products with coded weights on tiles: a piece of a panel is decoded into the first-level cache while the first rows
// are multiplied by it, a little before each step is used; further rows find it there.
#pragma once

#include "amx_tiles.h"
#include "coded.h"
#include "panels.h"
#include "simd.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>

namespace pagemill {
namespace {

constexpr int64_t kLead = 2, kRing = 4;  // steps from decoding to use; decoded steps kept with one pass over a panel
constexpr int64_t kDecodedSteps = 9;     // of a piece with one panel at a time,
constexpr int64_t kDecodedSteps2 = 3;    // and with two
constexpr int64_t kTwoPanelTiles =
    8;    // 3 to so many tiles of rows meet two panels at a time: x is then read half as often

// Coded weights to decode and to fetch during a first product with a piece of NP panels; `apart`: between decoded
// pieces.
template <int NP> struct DecodingAhead {
    Decoder* decoders;
    char* piece;
    int64_t apart, steps;
    TilesAhead<NP> ahead;

    INLINE void fetch(int64_t step, int part, int parts) const {
        ahead.fetch(step, part, parts);
        if (step + kLead >= steps) return;
        for (int p = 0; p < NP; ++p) {
            char* to = piece + p * apart + (step + kLead) * kStepBytes;
            for (int64_t u = kUnits * part / parts; u < kUnits * (part + 1) / parts; ++u)
                decoders[p].unit(to + unit_place(u));
            if (part + 1 == parts) decoders[p].patch(to);
        }
    }
};

// c [2 * height][NR] = one or two tiles of rows times a panel, which comes out of the decoder into a ring of steps.
// `step`: of the decoder's run; `left`: steps in it that are not decoded yet.
template <int Tiles>
void amx_coded_panel(TileRows first, TileRows second, Decoder& decoder, char* ring, int64_t& step, int64_t& left,
                     int64_t steps, float* c, int height) {
    constexpr int64_t kRow = NR * sizeof(float);
    float* below = c + height * NR;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps; ++s, ++step) {
        const char* b = ring + step % kRing * kStepBytes;
        char* to = ring + (step + kLead) % kRing * kStepBytes;
        const bool more = left > 0;
        const auto decode = [&](int64_t begin) {
            if (!more) return;
            for (int64_t u = begin; u < begin + 2; ++u) {
                for (int64_t line = 0; line < kUnitBytes; line += 64)
                    __builtin_prefetch(decoder.from + kAheadTiles + line, 0, 2);
                decoder.unit(to + unit_place(u));
            }
        };
        _tile_loadd(6, b, kLineBytes);
        _tile_loadd(4, first.data + s * first.step, first.row);
        decode(0);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + 64, kLineBytes);
        decode(2);
        _tile_dpbf16ps(1, 4, 7);
        if (Tiles == 2) _tile_loadd(5, second.data + s * second.step, second.row);
        decode(4);
        if (Tiles == 2) _tile_dpbf16ps(2, 5, 6);
        decode(6);
        if (Tiles == 2) _tile_dpbf16ps(3, 5, 7);
        if (more) decoder.patch(to), --left;
    }
    _tile_stored(0, c, kRow);
    _tile_stored(1, c + W, kRow);
    if (Tiles == 2) _tile_stored(2, below, kRow);
    if (Tiles == 2) _tile_stored(3, below + W, kRow);
}

}  // namespace
}  // namespace pagemill
#endif
