// Linear layers on integers: weights of 4 or 8 bits with a scale per output and group of 192 k, x of 8 to 16 bits with
// a scale per row and group (round_group). Sums over a group are exact, so an output is one chain of fused
// multiply-adds, one per group in ascending order, whatever multiplies the integers: instruction sets that fuse give
// each other's bits. quantized_amx.h multiplies them as bytes on tiles, quantized_bytes.h as bytes in vectors,
// quantized_words.h in words.
//
// A panel holds 16 outputs. A step of it is 16 lines of 64 bytes, in a line 4 neighbouring k of each output. That is
// how VNNI takes weights, and a tile of AMX too. With 4 bits a step is packed (quantized_steps.h, quantized_tables.h):
// values q, and for each of its two halves of 32 k a slope and an offset per output. The weight is (slope * q + offset)
// >> 8, modulo 2^16: the file's scale * q + min in units of the group's scale, rounded to 8 bits. quantized_direct.h
// multiplies few rows without writing them down as 8-bit lines. Four panels lie together, a group's steps of each after
// the other, or 8-bit lines of each after the other (kAlternate): so a task reads one stream. Where x86 multiplies
// bytes, which takes one side without sign, weights are held 128 higher, and so is what they expand to.
#pragma once

#include "../memory.h"
#include "../threads.h"
#include "below.h"
#include "linear_tiles.h"
#include "quantized_amx.h"
#include "quantized_bytes.h"
#include "quantized_direct.h"
#include "quantized_panels.h"
#include "quantized_steps.h"
#include "quantized_tables.h"
#include "quantized_words.h"
#include "simd.h"

namespace pagemill { namespace {

// The groups of all tiles, in the order in which a task passes over them.
struct Rows {
    TileGroup* data;
    int64_t tiles;

    Rows(int64_t tiles, int64_t steps)
        : data((TileGroup*)caller_scratch(0, tiles * groups_of(steps) * sizeof(TileGroup))), tiles(tiles) {}
    TileGroup& at(int64_t tile, int64_t group) const { return data[group * tiles + tile]; }
};

// A row's group of x rounded to whole steps, at most kMostX up or down; returns the step. It is a 127th of 4 times the
// mean magnitude, so that most of x has 8 bits and a few outliers have more; if none has, it is a 127th of the largest.
// Where the sum of magnitudes is not finite, the step is NaN, and so are the row's outputs.
template <class T> INLINE float round_group(const T* x, int length, int32_t* whole) {
    constexpr float kMeans = 4;
    constexpr int kParts = 16;  // sums that run side by side, the same on all instruction sets
    alignas(64) float wide[kGroupK];
    F part[kParts / W], most = zero();
    for (F& each : part) each = zero();
    for (int i = 0; i < length; i += kParts)
        for (int j = 0; j < kParts; j += W) {
            const F value = load(x + i + j);
            store(wide + i + j, value);
            part[j / W] = part[j / W] + abs(value);
            most = max(most, abs(value));
        }
    for (int half = kParts / W / 2; half; half /= 2)
        for (int j = 0; j < half; ++j) part[j] = part[j] + part[j + half];
    const float all = sum(part[0]), largest = maximum(most);
    float step = greater(largest * (1.0f / kMostX), lesser(largest * (1.0f / 127), all * (kMeans / (127 * kGroupK))));
    float inverse = 1 / step;
    if (!(all < kInf)) {
        step = float_of(0x7fc00000u);
        inverse = 0;
        for (int i = 0; i < length; ++i) wide[i] = 0;
    } else if (largest < 0x1p-100f) {
        step = inverse = 0;
    }
    // Adding 1.5 * 2^23 rounds to the nearest whole, ties to even, in the lowest bits.
    for (int i = 0; i < length; i += W)
        store_as(whole + i, (Dwords)(load(wide + i) * broadcast(inverse) + broadcast(12582912.0f)).v - 0x4b400000);
    return step;
}

// The tile's rows x [height][k].
template <class T> void quantize_tile(const T* x, int64_t x_row, int height, int64_t k, const Rows& rows,
                                      int64_t tile) {
    alignas(64) int32_t whole[kRowsInTile][kGroupK];
    for (int64_t first = 0; first < k; first += kGroupK) {
        TileGroup& group = rows.at(tile, first / kGroupK);
        const int64_t left = k - first;
        const int length = int(lesser<int64_t>(kGroupK, steps_of(left) * kStepK));
        for (int r = 0; r < height; ++r) {
            const T* from = x + r * x_row + first;
            T padded[kGroupK];
            if (left < length) {
                std::memset((void*)padded, 0, sizeof padded);
                std::memcpy(padded, from, left * sizeof(T));
                from = padded;
            }
            group.scale[r] = round_group(from, length, whole[r]);
        }
        group.put(whole, height, length);
    }
}

INLINE int64_t step_bytes(const PackedLinear& weight) {
    return weight.format == Format::int4 ? int64_t(sizeof(PackedStep)) : kStepLines;
}

// A panel's place among those that lie together.
struct Place {
    int64_t first, count;

    Place(const PackedLinear& weight, int64_t panel)
        : first(panel / kPanelsTogether * kPanelsTogether),
          count(lesser<int64_t>(kPanelsTogether, (weight.n + kPanel - 1) / kPanel - first)) {}
};

// Where a panel's step lies, in steps, unless lines alternate.
INLINE int64_t place_of(const PackedLinear& weight, int64_t panel, int64_t step) {
    const Place place(weight, panel);
    const int64_t steps = steps_of(weight.k), before = step - step % kGroupSteps;
    return place.first * steps + before * place.count +
           (panel - place.first) * lesser<int64_t>(steps - before, kGroupSteps) + step - before;
}

// Where a panel's line of 8-bit weights lies, in lines.
INLINE int64_t line_of(const PackedLinear& weight, int64_t panel, int64_t line) {
    if (!kAlternate) return place_of(weight, panel, line / kLinesInStep) * kLinesInStep + line % kLinesInStep;
    const Place place(weight, panel);
    return place.first * steps_of(weight.k) * kLinesInStep + line * place.count + panel - place.first;
}

INLINE const bf16* scales_of(const PackedLinear& weight, int64_t panel) {
    return (const bf16*)weight.scales + panel * groups_of(steps_of(weight.k)) * kPanel;
}

constexpr int64_t kBlockRows8 = 512;

struct QuantizedRun {
    const PackedLinear& weight;
    Rows x;
    void* y;
    int64_t y_row;
    DType type;
    Tiles tiles;
    int64_t group, block;  // panels and tiles in a task
    bool direct;
    Argmax* argmax;  // takes the outputs instead of y, if given

    int64_t panels() const { return (weight.n + kPanel - 1) / kPanel; }

    void operator()(int64_t task, int thread) {
        if (direct) return run_direct(task * group, lesser((task + 1) * group, panels()), thread);
        const int64_t tasks = (panels() + group - 1) / group;
        const int64_t first = task % tasks * group, last = lesser(first + group, panels());
        const int64_t tile_begin = task / tasks * block, tile_end = tile_begin + block;
        Products products(int((tiles.rows + tiles.count - 1) / tiles.count));
        for (int64_t panel = first; panel < last; panel += kPanelsTogether)
            run_panels(products, panel, lesser<int64_t>(kPanelsTogether, last - panel), tile_begin, tile_end, thread);
    }

    void run_direct(int64_t first, int64_t end, int thread) {
        const int64_t steps = steps_of(weight.k);
        float* c = (float*)thread_scratch(thread, tiles.rows * kPanelsTogether * kPanel * sizeof(float));
        for (int64_t panel = first, count; panel < end; panel += count) {
            count = lesser(kPanelsTogether - panel % kPanelsTogether, end - panel);
            for (int64_t step = 0; step < steps; step += kGroupSteps)
                for (int64_t i = 0; i < count; ++i)
                    direct_product(x.at(0, step / kGroupSteps), int(tiles.rows),
                                   (const PackedStep*)weight.panels + place_of(weight, panel + i, step),
                                   lesser<int64_t>(kGroupSteps, steps - step),
                                   scales_of(weight, panel + i) + step / kGroupSteps * kPanel, c + i * kPanel,
                                   count * kPanel, step > 0);
            write(c, panel, count, 0);
        }
    }

    void run_panels(Products& products, int64_t panel, int64_t count, int64_t tile_begin, int64_t tile_end,
                    int thread) {
        const int64_t steps = steps_of(weight.k), groups = groups_of(steps), width = count * kPanel;
        const bool packed = weight.format == Format::int4;
        const int64_t sums = (tile_end - tile_begin) * kRowsInTile * width;
        char* scratch = (char*)thread_scratch(thread, sums * sizeof(float) + packed * count * kGroupSteps * kStepLines);
        float* c = (float*)scratch;
        int8_t* expanded = (int8_t*)(c + sums);
        const auto of_tile = [&](int64_t t) { return c + (t - tile_begin) * kRowsInTile * width; };
        const char* from = (const char*)weight.panels + panel * steps * step_bytes(weight);
        const int64_t begin = tiles.begin(tile_begin),
                      rows = tiles.begin(tile_end) - begin + (packed ? kExpandRows : 0);
        const bool foreseen = Products::kOneStream && foresees_streams && !packed && tile_end - tile_begin == 1;
        for (int64_t step = 0; step < steps; step += kGroupSteps) {
            const int64_t here = lesser<int64_t>(kGroupSteps, steps - step), g = step / kGroupSteps;
            Piece piece{(const int8_t*)from,
                        here * kStepLines,
                        kLine,
                        scales_of(weight, panel) + g * kPanel,
                        groups * kPanel,
                        here};
            // While this piece is expanded and multiplied with rows, the next one is fetched: for each row as much.
            const int64_t bytes = count * here * step_bytes(weight), turns = count * here * kLinesInStep,
                          each = (bytes + rows - 1) / rows;
            const char* next = from + bytes;
            if (packed) {
                expand_steps((const PackedStep*)from, count * here, expanded,
                             NextPiece::evenly(next, each * kExpandRows, count * here * kTurnsInStep));
                __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
                piece.lines = expanded;
                next += each * kExpandRows;
            } else if (kAlternate) {
                piece.stride = kLine;
                piece.line_stride = count * kLine;
            }
            from += bytes;
            for (int64_t t = tile_begin, row = begin, end; t < tile_end; ++t, row = end) {
                end = tiles.begin(t + 1);
                const int height = int(end - row);
                const auto fetch = NextPiece::evenly(next, foreseen ? 0 : each * height, turns);
                products(&x.at(t, g), height, piece, count, of_tile(t), step > 0, fetch);
                next += each * height;
                if (step + here == steps && t > tile_begin) write(of_tile(t - 1), panel, count, t - 1);
            }
        }
        products.finish();
        write(of_tile(tile_end - 1), panel, count, tile_end - 1);
    }

    void write(const float* c, int64_t panel, int64_t count, int64_t tile) const {
        const int width = int(count) * kPanel, height = tiles.height(tile);
        const int64_t at = panel * kPanel;
        const float* bias = weight.bias ? weight.bias + at : nullptr;
        if (argmax) return argmax->take(c, width, height, bias, at, weight.n, panel / group, tiles.begin(tile));
        with_type(type, [&]<class Y>(Y*) {
            Y* out = (Y*)y + tiles.begin(tile) * y_row + at;
            write_tile(c, width, height, bias, out, y_row, weight.n - at);
        });
    }
};

void linear_quantized(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type,
                      int64_t m, Argmax* argmax = nullptr) {
#if defined(__AMX_INT8__) && defined(PAGEMILL_BELOW)
    // Tiles take as long for a few rows as for many. The set below holds these weights alike.
    constexpr int64_t kFewRows = 4;
    if (m <= kFewRows && argmax)
        return below().linear_argmax(weight, x, x_row, type, m, argmax->allowed, argmax->tokens);
    if (m <= kFewRows) return below().linear(weight, x, x_row, y, y_row, type, m);
#endif
    const Tiles tiles = cut_rows(m, weight.n, kRowsInTile, kBlockRows8, kOwnOutputs8);
    const int64_t steps = steps_of(weight.k);
    const Rows rows(tiles.count, steps);
    with_type(type, [&](auto* t) {
        auto quantize = [&](int64_t tile, int) {
            quantize_tile((decltype(t))x + tiles.begin(tile) * x_row, x_row, tiles.height(tile), weight.k, rows, tile);
        };
        if (tiles.count > 1) parallel(tiles.count, quantize);
        else quantize(0, 0);
    });
    const int64_t panels = (weight.n + kPanel - 1) / kPanel;
    const bool direct = weight.format == Format::int4 && m <= kDirectRows;
    const int64_t together = direct ? 1 : kPanelsTogether;
    const int64_t wanted = lesser<int64_t>(64, panels * tiles.blocks / (int64_t(num_threads()) * 8));
    const int64_t group = greater<int64_t>(1, (wanted + together - 1) / together) * together;
    QuantizedRun run{weight, rows, y, y_row, type, tiles, group, tiles.count / tiles.blocks, direct, argmax};
    run_panels(run, m, tiles.blocks);
}

// The weight at (i, j), in units of its group's scale.
INLINE int whole_weight(const PackedLinear& packed, int64_t i, int64_t j) {
    const int64_t panel = i / kPanel;
    const int lane = int(i % kPanel);
    if (packed.format == Format::int8)
        return int8_t(((const uint8_t*)packed.panels)[line_of(packed, panel, j / 4) * kLine + lane * 4 + j % 4] ^
                      kRaised);
    const auto& step = ((const PackedStep*)packed.panels)[place_of(packed, panel, j / kStepK)];
    return int8_t(step.weight(lane, int(j % kStepK)) ^ kRaised);
}

PackedBytes quantized_bytes(const PackedLinear& packed) {
    const int64_t steps = steps_of(packed.k), panels = (packed.n + kPanel - 1) / kPanel;
    return {.panels = whole_pages(panels * steps * step_bytes(packed)),
            .scales = panels * groups_of(steps) * kPanel * sizeof(bf16),
            .bias = bias_bytes(panels * kPanel)};
}

// A panel's 8-bit lines, 4 neighbouring k of an output at a time. Where they have no values they are 0.
void pack_lines(const PackedLinear& packed, const QuantizedSource& from, int64_t panel) {
    constexpr uint32_t kAllRaised = 0x01010101u * uint8_t(kRaised);
    const int64_t k = packed.k, filled = lesser<int64_t>(kPanel, packed.n - panel * kPanel),
                  stride = kAlternate ? Place(packed, panel).count * kLine : kLine;
    for (int64_t step = 0; step < steps_of(k); ++step) {
        char* const lines = (char*)packed.panels + line_of(packed, panel, step * kLinesInStep) * kLine;
        const int64_t length = lesser<int64_t>(kStepK, k - step * kStepK);
        if (filled < kPanel || length < kStepK)
            for (int64_t line = 0; line < kLinesInStep; ++line) std::memset(lines + line * stride, 0, kLine);
        for (int64_t lane = 0; lane < filled; ++lane) {
            const char* values = (const char*)from.values + (panel * kPanel + lane) * k + step * kStepK;
            char* to = lines + lane * 4;
            int64_t j = 0;
            for (; j + 4 <= length; j += 4, to += stride) store_as(to, load_as<uint32_t>(values + j) ^ kAllRaised);
            for (int64_t i = 0; j + i < length; ++i) to[i] = char(values[j + i] ^ kRaised);
        }
    }
}

bool pack_quantized(PackedLinear& packed, const QuantizedSource& from) {
    const int64_t n = packed.n, k = packed.k, steps = steps_of(k), groups = groups_of(steps),
                  panels = (n + kPanel - 1) / kPanel;
    const PackedBytes bytes = quantized_bytes(packed);
    packed.panels = allocate_shared(bytes.panels);
    packed.scales = allocate_shared(bytes.scales);
    packed.bytes = bytes.panels + bytes.scales;
    if (!packed.panels || !packed.scales || !pack_bias(packed, from.bias, panels * kPanel)) return false;
    std::memset(packed.scales, 0, bytes.scales);
    auto pack = [&](int64_t panel, int) {
        const auto at = [&](int64_t step) {
            return (char*)packed.panels + place_of(packed, panel, step) * step_bytes(packed);
        };
        const int64_t filled = lesser<int64_t>(kPanel, n - panel * kPanel);
        for (int64_t lane = 0; lane < filled; ++lane)
            for (int64_t g = 0; g < groups; ++g)
                ((uint16_t*)packed.scales)[(panel * groups + g) * kPanel + lane] =
                    from.scales[(panel * kPanel + lane) * groups + g];
        if (packed.format == Format::int8) return pack_lines(packed, from, panel);
        for (int64_t step = 0; step < steps; ++step) std::memset(at(step), 0, step_bytes(packed));
        for (int64_t lane = 0; lane < filled; ++lane) {
            const int64_t first = (panel * kPanel + lane) * (k / kHalfK);
            for (int64_t half = 0; half < k / kHalfK; ++half)
                ((PackedStep*)at(half / 2))
                    ->put_half(int(lane), int(half % 2), (const uint8_t*)from.values + (first + half) * kHalfK,
                               uint16_t(from.slopes[first + half]),
                               uint16_t(from.offsets[first + half] + kRaised * 256));
        }
    };
    parallel(panels, pack);
    return true;
}

void embed_quantized(const PackedLinear& packed, const int64_t* ids, float factor, void* y, DType type,
                     int64_t tokens) {
    with_type(type, [&]<class T>(T*) {
        const int64_t k = packed.k;
        auto unpack = [&](int64_t token, int) {
            T* out = (T*)y + token * k;
            for (int64_t j = 0; j < k; j += W) {
                float row[W];
                const int left = int(lesser<int64_t>(W, k - j));
                const float scale =
                    widen_one(scales_of(packed, ids[token] / kPanel) + j / kGroupK * kPanel + ids[token] % kPanel);
                for (int i = 0; i < left; ++i) row[i] = float(whole_weight(packed, ids[token], j + i)) * scale;
                store_upto(out + j, load(row), left);
                // Rounded to the dtype before it is multiplied, as a table's rows are.
                if (factor != 1) store_upto(out + j, load_upto(out + j, left) * broadcast(factor), left);
            }
        };
        parallel(tokens, unpack);
    });
}

}}  // namespace pagemill
