// Packed linear layers. Each output is one chain of fused multiply-adds over k in ascending order, whatever the number
// of rows, the tile it falls in, or the thread: tiles differ only in which chains they run side by side. Where the CPU
// multiplies bf16 pairs, a link of the chain is two neighbouring k, if both weight and x are bf16 (linear_amx.h: 32 k).
#pragma once

#include "../threads.h"
#include "affine.h"
#include "coded.h"
#include "linear_amx.h"
#include "linear_tiles.h"
#include "math.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int64_t kNearRows = 12;  // how far ahead a tile fetches from the second-level cache to the first
// With a single tile: how far ahead in the panel, to hide memory's latency.
constexpr int64_t kAheadBytes = kFetchFirst ? 8192 : 4096;

// `wide` takes the weights as fp32, if given.
template <int MR, int NP, class T>
INLINE void product_step(F (&acc)[MR][2 * NP], const float* a, const T* b, int64_t b_panel, float* wide) {
    F w[2 * NP];
    for (int v = 0; v < 2 * NP; ++v) w[v] = load(b + v / 2 * b_panel + v % 2 * W);
    if (wide)
        for (int v = 0; v < 2 * NP; ++v) store(wide + v * W, w[v]);
    for (int r = 0; r < MR; ++r) {
        const F x = broadcast(a[r]);
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = multiply_add(x, w[v], acc[r][v], b);
    }
}

// Whether T is not what the products take.
template <class T, bool Unpair> constexpr bool kNarrow = Unpair || sizeof(T) == 2;

// Two steps, whose weights are pairs; with an odd k the last is one.
template <int MR, int NP>
INLINE void unpaired_steps(F (&acc)[MR][2 * NP], const float* a, const Pair* b, int64_t b_panel, bool both,
                           float* wide) {
    F even[2 * NP], odd[2 * NP];
    for (int v = 0; v < 2 * NP; ++v) load_pairs((const bf16*)(b + v / 2 * b_panel + v % 2 * W), even[v], odd[v]);
    if (wide)
        for (int v = 0; v < 2 * NP; ++v) store(wide + v * W, even[v]), store(wide + (2 * NP + v) * W, odd[v]);
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = fma(broadcast(a[r]), even[v], acc[r][v]);
    if (!both) return;
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = fma(broadcast(a[MR + r]), odd[v], acc[r][v]);
}

// c [MR][NP * NR] (+)= a [k][MR] times NP panels b [k][NR], which lie b_panel apart. `wide`, if given, takes b as fp32,
// with one k more if that is odd and they are pairs.
template <int MR, int NP, class T, bool Unpair>
void tile_product(const float* a, const T* b, int64_t b_panel, int64_t k, float* c, bool add, Ahead ahead,
                  float* wide) {
    F acc[MR][2 * NP];
    UNROLL
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = add ? load(c + (r * NP * 2 + v) * W) : zero();
    constexpr int64_t step = Unpair ? 2 : 1;
    for (int64_t i = 0; i < k; i += step, b += NR) {
        for (int64_t j = 0; j < step; ++j) ahead.turn();
        if (!kFetchFirst && MR > kMaxWide)
            for (int v = 0; v < 2; ++v) __builtin_prefetch(b + kNearRows * NR + v * W);
        float* kept = kNarrow<T, Unpair> && NP == 1 && wide ? wide + i * NR : nullptr;
        if constexpr (Unpair) unpaired_steps<MR, NP>(acc, a + i * MR, b, b_panel, i + 1 < k, kept);
        else product_step<MR, NP>(acc, a + i * MR, b, b_panel, kept);
    }
    UNROLL
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) store(c + (r * NP * 2 + v) * W, acc[r][v]);
}

template <class T> using TileProduct = void (*)(const float*, const T*, int64_t, int64_t, float*, bool, Ahead, float*);

template <int NP, class T, bool Unpair, int... R> TileProduct<T> choose_tile(int rows, Sequence<R...>) {
    static constexpr TileProduct<T> table[] = {tile_product<R + 1, NP, T, Unpair>...};
    return table[rows - 1];
}

// activation(gate) * up of two tiles' sums [height][NR], packed as x is: [NR][height]. It is written over up's sums
// first.
template <Activation A>
void pack_gated(const float* gate, float* up, int height, const float* gate_bias, const float* up_bias, float* packed) {
    for (int r = 0; r < height; ++r)
        for (int v = 0; v < NR; v += W) {
            F g = load(gate + r * NR + v), u = load(up + r * NR + v);
            if (gate_bias) g = g + load(gate_bias + v), u = u + load(up_bias + v);
            store(up + r * NR + v, activate<A>(g) * u);
        }
    pack_rows<float>(up, NR * sizeof(float), NR, height, packed);
}

INLINE int most_wide(const PackedLinear& weight) { return is_affine(weight) ? 0 : kMaxWide; }

// With a gate, y is activation(first half of the outputs) * second half as packed rows, and each half has `panels`
// panels; 0: none.
struct Gate {
    int64_t panels = 0;
    Activation activation = Activation::silu;
};

// T: element of the panels, Pair if they hold pairs. With `Unpair` the products are of fp32 all the same.
template <class T, bool Unpair> struct LinearRun {
    const PackedLinear& weight;
    const float* x;  // packed rows
    void* y;
    int64_t y_row, k, group;  // k: links of a chain; group: panels in a task
    DType type;
    Tiles tiles;
    Gate gate;
    Argmax* argmax;  // takes the outputs instead of y, if given

    int64_t panels() const { return gate.panels ? gate.panels : panels_of(weight); }

    void operator()(int64_t task, int thread) {
        const int64_t groups = (panels() + group - 1) / group;
        const int64_t first = task % groups * group, last = lesser(first + group, panels());
        const int64_t in_block = tiles.count / tiles.blocks, tile_begin = task / groups * in_block,
                      tile_end = tile_begin + in_block;
        for (int64_t panel = first; panel < last;) {
            const bool wide = tiles.count == 1 && tiles.height(0) <= most_wide(weight) && panel + 2 <= last;
            const int np = wide ? 2 : 1;
            run_panels(panel, np, tile_begin, tile_end, thread);
            if (gate.panels) run_panels(gate.panels + panel, np, tile_begin, tile_end, thread);
            panel += np;
        }
    }

    void run_panels(int64_t panel, int np, int64_t tile_begin, int64_t tile_end, int thread) {
        const int64_t panel_size = (Unpair ? packed_k(weight) / 2 : k) * NR, count = tile_end - tile_begin;
        const T* b = (const T*)weight.panels + panel * panel_size;
        const int64_t row_begin = tiles.begin(tile_begin), rows = tiles.begin(tile_end) - row_begin;
        const int width = np * NR;
        // A narrow weight is widened on its way into the registers; of many rows, the first tile keeps it for the
        // others.
        const bool widen = kNarrow<T, Unpair> && count > 2;
        const bool second = gate.panels && panel >= gate.panels;
        const int64_t sums = rows * width, all_sums = gate.panels ? 2 * sums : sums;
        const bool affine = is_affine(weight);
        const int64_t floats = all_sums + (affine ? kAffinePiece * NR : widen ? kChunk * NR : 0);
        const bool coded = Unpair && weight.format == Format::coded;
        float* scratch =
            (float*)thread_scratch(thread, sizeof(float) * floats + (coded ? np * panel_size * sizeof(T) : 0));
        float* wide_piece = scratch + all_sums;
#if defined(__AMX_BF16__)
        if (coded) {
            b = (const T*)(scratch + floats);
            Decoder(weight, panel).steps((char*)b, np * packed_k(weight) / kPairedStep);
        }
#endif
        float* c = second ? scratch + sums : scratch;
        const int height = tiles.height(tile_begin);
        if (affine && count == 1 && height <= kFewAffine) {
            few_rows_affine(weight, panel, height, x + row_begin * k, c);
            if (second) write_product(scratch, c, height, panel, row_begin);
            else if (!gate.panels) write(c, width, height, panel, row_begin);
            return;
        }
        // Into the second-level cache, two tiles fetch faster than memory follows: they begin with less of a piece
        // missing.
        const int64_t most = affine ? kAffinePiece : count == 1 ? k : count == 2 && !kFetchFirst ? kChunk / 4 : kChunk;
        const int64_t pieces = (k + most - 1) / most, unit = affine ? kAffineK : 2;
        const int64_t chunk = ((k + pieces - 1) / pieces + unit - 1) / unit * unit;
        for (int64_t k0 = 0; k0 < k; k0 += chunk) {
            const int64_t length = lesser(chunk, k - k0);
            const T* piece = b + (Unpair ? k0 / 2 : k0) * NR;
            // What is read next follows in memory, be it this panel's next piece or the next panel, unless that is the
            // gate's counterpart: each tile fetches its share of it.
            const int64_t piece_bytes = length * NR * int64_t(sizeof(T)) / (Unpair ? 2 : 1);
            const char* next = (const char*)piece + (count > 1 ? piece_bytes : kAheadBytes);
            if (gate.panels && k0 + length == k)
                next += (second ? -gate.panels : gate.panels - 1) * panel_size * int64_t(sizeof(T));
            if (affine) widen_affine(weight, panel, k0, length, wide_piece);
            const int64_t share = (piece_bytes + count - 1) / count, stride = (share + length - 1) / length;
            for (int64_t t = tile_begin; t < tile_end; ++t) {
                const int height = tiles.height(t);
                const float* a = x + tiles.begin(t) * k + k0 * height;
                float* out = c + (tiles.begin(t) - row_begin) * width;
                const Ahead ahead{next + (t - tile_begin) * share, stride};
                if (affine) {
                    choose_tile<1, float, false>(height, Upto<kMaxTile>{})(a, wide_piece, 0, length, out, k0 > 0,
                                                                           {(const char*)wide_piece, 0}, nullptr);
                } else if (widen && t > tile_begin)
                    choose_tile<1, float, false>(height, Upto<kMaxTile>{})(a, wide_piece, 0, length, out, k0 > 0, ahead,
                                                                           nullptr);
                else if (np == 1)
                    choose_tile<1, T, Unpair>(height, Upto<kMaxTile>{})(a, piece, 0, length, out, k0 > 0, ahead,
                                                                        widen ? wide_piece : nullptr);
                else if constexpr (kMaxWide > 0)
                    choose_tile<2, T, Unpair>(height, Upto<kMaxWide>{})(a, piece, panel_size, length, out, k0 > 0,
                                                                        {(const char*)piece, 0}, nullptr);
                if (k0 + length < k) continue;
                if (second) write_product(out - sums, out, height, panel, tiles.begin(t));
                else if (!gate.panels) write(out, width, height, panel, tiles.begin(t));
            }
        }
    }

    void write_product(const float* gated, float* up, int height, int64_t panel, int64_t row) {
        const float* up_bias = weight.bias ? weight.bias + panel * NR : nullptr;
        const float* gate_bias = weight.bias ? up_bias - gate.panels * NR : nullptr;
        float* to = (float*)y + (row * gate.panels + (panel - gate.panels) * height) * NR;
        if (gate.activation == Activation::silu)
            pack_gated<Activation::silu>(gated, up, height, gate_bias, up_bias, to);
        else pack_gated<Activation::gelu_tanh>(gated, up, height, gate_bias, up_bias, to);
    }

    void write(const float* c, int width, int height, int64_t panel, int64_t row) {
        const float* bias = weight.bias ? weight.bias + panel * NR : nullptr;
        if (argmax) return argmax->take(c, width, height, bias, panel * NR, weight.n, panel / group, row);
        const int64_t at = row * y_row + panel * NR;
        with_type(type,
                  [&]<class Y>(Y*) { write_tile(c, width, height, bias, (Y*)y + at, y_row, weight.n - panel * NR); });
    }
};

template <class T, bool Unpair = false>
void linear_packed(const PackedLinear& weight, const float* x, int64_t k, void* y, int64_t y_row, DType type,
                   Tiles tiles, Gate gate = {}, Argmax* argmax = nullptr) {
    const int64_t panels = gate.panels ? gate.panels : panels_of(weight);
    const int64_t group =
        panels_in_task(panels, tiles.blocks, tiles.count == 1 && tiles.height(0) <= most_wide(weight));
    LinearRun<T, Unpair> run{weight, x, y, y_row, k, group, type, tiles, gate, argmax};
    run_panels(run, tiles.rows, tiles.blocks);
}

template <class T, bool Unpair = false>
void linear_typed(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type,
                  int64_t m, Gate gate = {}, Argmax* argmax = nullptr) {
    constexpr bool kPairs = sizeof(T) == sizeof(Pair) && !Unpair;
    const Tiles tiles = cut_rows(m, weight.n);
    const bool pairs = weight.type == DType::bf16 && kPairs;
    const int64_t k = pairs ? (weight.k + 1) / 2 : weight.k;
    const float* packed = (const float*)x;
    if (!(m == 1 && (pairs ? weight.k % 2 == 0 : type == DType::f32))) {
        float* rows = (float*)caller_scratch(0, sizeof(float) * m * k);
        const int64_t row_bytes = x_row * int64_t(item_size(type));
        auto pack = [&](int64_t tile, int) {
            const char* from = (const char*)x + tiles.begin(tile) * row_bytes;
            float* to = rows + tiles.begin(tile) * k;
            const int height = tiles.height(tile);
            if (pairs) pack_pairs(from, row_bytes, weight.k, height, to);
            else with_type(type, [&]<class X>(X*) { pack_rows<X>(from, row_bytes, k, height, to); });
        };
        if (tiles.count > 1) parallel(tiles.count, pack);
        else pack(0, 0);
        packed = rows;
    }
    linear_packed<T, Unpair>(weight, packed, k, y, y_row, type, tiles, gate, argmax);
}

#if defined(PRODUCTS_OF_PAIRS) && !defined(__AMX_BF16__)
void linear_pairs(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, int64_t m,
                  Argmax* argmax) {
    linear_typed<Pair>(weight, x, x_row, y, y_row, DType::bf16, m, {}, argmax);
}
#endif

// body.operator()<T, Unpair>() as sums in fp32 take a weight's panels (LinearRun).
template <class Body> INLINE void with_panels(DType type, Body&& body) {
    if constexpr (kHasPairs)
        if (type == DType::bf16) return body.template operator()<Pair, true>();
    with_type(type, [&]<class T>(T*) { body.template operator()<T, false>(); });
}

void linear(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type, int64_t m,
            Argmax* argmax = nullptr) {
#if defined(PRODUCTS_OF_PAIRS)
    if (weight.type == DType::bf16 && type == DType::bf16) return linear_pairs(weight, x, x_row, y, y_row, m, argmax);
#endif
    with_panels(weight.type, [&]<class T, bool Unpair>() {
        linear_typed<T, Unpair>(weight, x, x_row, y, y_row, type, m, {}, argmax);
    });
}

// For rows in several tiles: with fewer, what passes between the operators stays in the caches. What comes out of the
// activation is packed for `down` at once, which therefore takes the same tiles.
bool mlp(const PackedLinear& gate_up, const PackedLinear& down, const void* x, int64_t x_row, void* y, int64_t y_row,
         DType type, Activation activation, int64_t m) {
    const auto in_fp32 = [](const PackedLinear& weight) { return weight.format == Format::dense || is_affine(weight); };
    if (type != DType::f32 || !in_fp32(gate_up) || !in_fp32(down)) return false;
    if (m <= kMaxTile || gate_up.n % (2 * NR) || gate_up.n != 2 * down.k) return false;
    float* gated = (float*)caller_scratch(1, sizeof(float) * m * down.k);
    with_panels(gate_up.type, [&]<class T, bool Unpair>() {
        linear_typed<T, Unpair>(gate_up, x, x_row, gated, 0, type, m, {down.k / NR, activation});
    });
    with_panels(down.type, [&]<class T, bool Unpair>() {
        linear_packed<T, Unpair>(down, gated, down.k, y, y_row, type, cut_rows(m, gate_up.n));
    });
    return true;
}

}}  // namespace pagemill
