// Packed linear layers with bf16 weight and x on tiles (AMX). A tile product adds 32 k to 16 rows x 16 outputs; an
// output is one chain of them over k in ascending order, and its bits depend on its own row and column of the operands
// only. The panels are those of pairs: 16 lines of a panel, two tiles wide, are 32 k.
#pragma once

#include "../threads.h"
#include "amx_tiles.h"
#include "coded.h"
#include "linear_tiles.h"
#include "simd.h"

#if defined(__AMX_BF16__)
namespace pagemill { namespace {

constexpr int64_t kPieceSteps = 9;  // a piece of a panel of so many stays in the first-level cache for all tiles,
constexpr int64_t kShortPieceSteps = 6;  // of so many with two passes, whose rows of x it then shares that cache with
constexpr int64_t kBlockTiles = 16;  // at most so many tiles' rows of x pass over a panel together,
constexpr int64_t kBlockBytes = 1 << 20;  // or so many bytes of them: they stay in the second-level cache

// Products with coded weights on tiles: a piece of a panel is decoded into the first-level cache while the first rows
// are multiplied by it, a little before each step is used; further rows find it there.
constexpr int64_t kLead = 2, kRing = 4;  // steps from decoding to use; decoded steps kept with one pass over a panel
constexpr int64_t kDecodedSteps = 9;  // of a piece with one panel at a time,
constexpr int64_t kDecodedSteps2 = 3;  // and with two
constexpr int64_t kTwoPanelTiles =
    8;  // 3 to so many tiles of rows meet two panels at a time: x is then read half as often

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

struct AmxRun {
    const PackedLinear& weight;
    TileRows x;
    int64_t tile_bytes;  // between tiles of packed rows; 0: rows lie where they were given
    bf16* y;
    int64_t y_row, group, block;  // panels and tiles in a task
    Tiles tiles;
    TileConfig config;
    Argmax* argmax;

    int64_t panels() const { return panels_of(weight); }
    int height() const { return config.rows[0]; }
    TileRows rows(int64_t tile) const {
        return {x.data + (tile_bytes ? tile * tile_bytes : tiles.begin(tile) * x.row), x.row, x.step};
    }

    void operator()(int64_t task, int thread) {
        const int64_t groups = (panels() + group - 1) / group;
        const int64_t first = task % groups * group, last = lesser(first + group, panels());
        const int64_t tile_begin = task / groups * block, tile_end = lesser(tile_begin + block, tiles.count);
        const int64_t sums = greater<int64_t>(2 * kTwoPanelTiles, block) * kTileHeight * NR;
        float* c = (float*)thread_scratch(thread, sizeof(float) * sums + kDecodedSteps * kStepBytes);
        _tile_loadconfig(&config);
        char* decoded = (char*)(c + sums);
        const bool coded = weight.format == Format::coded;
        if (coded && tile_end - tile_begin <= 2) coded_few_rows(first, last, tile_begin, tile_end, c, decoded);
        else if (coded) coded_many_rows(first, last, tile_begin, tile_end, c, decoded);
        else if (tiles.count == 1) few_rows(first, last, c);
        else
            for (int64_t panel = first; panel < last; ++panel) many_rows(panel, tile_begin, tile_end, c);
        _tile_release();
    }

    const char* panel_at(int64_t panel) const { return (const char*)weight.panels + panel * packed_k(weight) * NR * 2; }

    void few_rows(int64_t first, int64_t last, float* c) const {
        const int64_t steps = packed_k(weight) / kStep, panel_bytes = steps * kStepBytes;
        for (int64_t panel = first; panel < last;) {
            const int np = panel + 2 <= last ? 2 : 1;
            const char* b = panel_at(panel);
            const TilesAhead<2> ahead{b + kAheadTiles, kStepBytes, panel_bytes};
            if (np == 2) amx_one_tile<2>(rows(0), b, panel_bytes, steps, c, false, ahead);
            else amx_one_tile<1>(rows(0), b, 0, steps, c, false, TilesAhead<1>{ahead.at, kStepBytes});
            write(c, np * NR, panel, 0);
            panel += np;
        }
    }

    void many_rows(int64_t panel, int64_t tile_begin, int64_t tile_end, float* c) const {
        const int64_t steps = packed_k(weight) / kStep, count = tile_end - tile_begin;
        const int64_t passes = (count + 1) / 2, most = passes == 1   ? steps
                                                       : passes == 2 ? kShortPieceSteps
                                                                     : kPieceSteps;
        const int64_t pieces = (steps + most - 1) / most;
        // Each pass over a piece fetches its share of what follows in memory.
        const int64_t share = (kStepBytes / passes + 63) / 64 * 64;
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const int64_t begin = steps * piece / pieces, length = steps * (piece + 1) / pieces - begin;
            const char* b = panel_at(panel) + begin * kStepBytes;
            TilesAhead<1> ahead{b + (passes == 1 ? kAheadTiles : length * kStepBytes), share};
            for (int64_t t = tile_begin; t < tile_end; t += 2, ahead.at += length * share) {
                const bool two = t + 1 < tile_end;
                float* sums = c + (pieces == 1 ? 0 : (t - tile_begin) * kTileHeight * NR);
                const TileRows first = piece_of(rows(t), begin);
                if (two)
                    amx_two_tiles(first, piece_of(rows(t + 1), begin), b, length, sums, height(), piece > 0, ahead);
                else amx_one_tile<1>(first, b, 0, length, sums, piece > 0, ahead);
                if (piece + 1 < pieces) continue;
                write(sums, NR, panel, t);
                if (two) write(sums + height() * NR, NR, panel, t + 1);
            }
        }
    }

    void coded_few_rows(int64_t first, int64_t last, int64_t tile, int64_t tile_end, float* c, char* ring) const {
        const int64_t steps = packed_k(weight) / kStep, all = (last - first) * steps, lead = lesser(kLead, all);
        Decoder decoder(weight, first);
        decoder.steps(ring, lead);
        int64_t step = 0, left = all - lead;
        for (int64_t panel = first; panel < last; ++panel) {
            const bool two = tile + 1 < tile_end;
            if (two) amx_coded_panel<2>(rows(tile), rows(tile + 1), decoder, ring, step, left, steps, c, height());
            else amx_coded_panel<1>(rows(tile), {}, decoder, ring, step, left, steps, c, height());
            write(c, NR, panel, tile);
            if (two) write(c + height() * NR, NR, panel, tile + 1);
        }
    }

    void coded_many_rows(int64_t first, int64_t last, int64_t tile_begin, int64_t tile_end, float* c,
                         char* decoded) const {
        int64_t panel = first;
        if (tile_end - tile_begin <= kTwoPanelTiles)
            for (; panel + 2 <= last; panel += 2) coded_panels<2>(panel, tile_begin, tile_end, c, decoded);
        for (; panel < last; ++panel) coded_panels<1>(panel, tile_begin, tile_end, c, decoded);
    }

    // A pass is of one tile of rows with two panels, of two with one.
    template <int NP> void coded_panels(int64_t panel, int64_t tile_begin, int64_t tile_end, float* c,
                                        char* decoded) const {
        constexpr int64_t kTilesInPass = NP == 2 ? 1 : 2;
        const int64_t steps = packed_k(weight) / kStep, panel_bytes = steps * kCodedStepBytes;
        const int64_t passes = (tile_end - tile_begin + kTilesInPass - 1) / kTilesInPass;
        const int64_t most = NP == 2 ? kDecodedSteps2 : kDecodedSteps, pieces = (steps + most - 1) / most;
        const int64_t share = (kCodedStepBytes / passes + 63) / 64 * 64;
        Decoder decoders[2] = {{weight, panel}, {weight, panel + NP - 1}};
        for (int64_t piece = 0; piece < pieces; ++piece) {
            const int64_t begin = steps * piece / pieces, length = steps * (piece + 1) / pieces - begin;
            const int64_t following = length * kCodedStepBytes + (NP == 2 && piece + 1 == pieces ? panel_bytes : 0);
            TilesAhead<NP> ahead{decoders[0].from + following, share, panel_bytes};
            for (int p = 0; p < NP; ++p) decoders[p].steps(decoded + p * most * kStepBytes, lesser(kLead, length));
            for (int64_t t = tile_begin; t < tile_end; t += kTilesInPass, ahead.at += length * share) {
                float* sums = c + (t - tile_begin) * kTileHeight * NP * NR;
                const auto multiply = [&](const auto& ahead) {
                    const TileRows x = piece_of(rows(t), begin);
                    if constexpr (NP == 2)
                        amx_one_tile<2>(x, decoded, most * kStepBytes, length, sums, piece > 0, ahead);
                    else if (const TileRows below = piece_of(rows(t + 1), begin); t + 1 < tile_end)
                        amx_two_tiles(x, below, decoded, length, sums, height(), piece > 0, ahead);
                    else amx_one_tile<1>(x, decoded, 0, length, sums, piece > 0, ahead);
                };
                DecodingAhead<NP> decoding{decoders, decoded, most * kStepBytes, length, ahead};
                if (t == tile_begin) multiply(decoding);
                else multiply(ahead);
                if (piece + 1 < pieces) continue;
                write(sums, NP * NR, panel, t);
                if (NP == 1 && t + 1 < tile_end) write(sums + height() * NR, NR, panel, t + 1);
            }
        }
    }

    static TileRows piece_of(TileRows x, int64_t step) { return {x.data + step * x.step, x.row, x.step}; }

    void write(const float* c, int width, int64_t panel, int64_t tile) const {
        const float* bias = weight.bias ? weight.bias + panel * NR : nullptr;
        const int height = tiles.height(tile);
        if (argmax) return argmax->take(c, width, height, bias, panel * NR, weight.n, panel / group, tiles.begin(tile));
        bf16* to = y + tiles.begin(tile) * y_row + panel * NR;
        write_tile(c, width, height, bias, to, y_row, weight.n - panel * NR);
    }
};

// Tiles are as high as the highest: a lower one takes the next tile's first row in, and its result is dropped. The last
// is one of the highest. Rows that end within a step, or whose distance would put a tile's rows in the same lines of
// the first-level cache, are copied.
void linear_pairs(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, int64_t m,
                  Argmax* argmax) {
    const Tiles tiles(m, kTileHeight);
    const int height = int((m + tiles.count - 1) / tiles.count);
    const int64_t padded = packed_k(weight), row_bytes = x_row * 2;
    AmxRun run{weight, {(const char*)x, row_bytes, kStep * 2}, 0, (bf16*)y, y_row, 0, 0, tiles, TileConfig(height),
               argmax};
    if (padded > weight.k || (height > 8 && row_bytes % 1024 == 0)) {
        run.tile_bytes = height * padded * 2;
        run.x = {(const char*)caller_scratch(0, tiles.count * run.tile_bytes), kStep * 2, height * kStep * 2};
        auto pack = [&](int64_t tile, int) {
            for (int r = 0; r < tiles.height(tile); ++r) {
                const char* from = (const char*)x + (tiles.begin(tile) + r) * row_bytes;
                char* to = (char*)run.x.data + tile * run.tile_bytes + r * run.x.row;
                int64_t i = 0;
                for (; i + kStep <= weight.k; i += kStep, from += 64, to += run.x.step)
                    _mm512_storeu_si512(to, _mm512_loadu_si512(from));
                if (i < weight.k) {
                    const __mmask32 rest = (1u << (weight.k - i)) - 1;
                    _mm512_storeu_si512(to, _mm512_maskz_loadu_epi16(rest, from));
                }
            }
        };
        if (tiles.count > 1) parallel(tiles.count, pack);
        else pack(0, 0);
    }
    run.block = lesser(kBlockTiles, greater<int64_t>(2, kBlockBytes / (height * padded * 2) / 2 * 2));
    const int64_t blocks = (tiles.count + run.block - 1) / run.block;
    run.group = panels_in_task(run.panels(), blocks, tiles.count == 1);
    __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
    run_panels(run, m, blocks);
}

}}  // namespace pagemill
#endif
