// Packed linear layers. Each output is one chain of fused multiply-adds over k in ascending order, whatever the number of
// rows, the tile it falls in, or the thread: tiles differ only in which chains they run side by side.

constexpr int NR = 2 * W;  // outputs in a panel
#if defined(__AVX512F__)
constexpr int kMaxTile = 14;  // rows x 2 vectors: 28 accumulators of 32 registers
constexpr int kMaxWide = 6;   // rows x 4 vectors, two panels at once
#else
constexpr int kMaxTile = 6;
constexpr int kMaxWide = 2;
#endif
constexpr int kChunk = 512;      // k in a panel's piece, which then stays in the second-level cache for all tiles
constexpr int kBlockRows = 252;  // rows whose piece of x stays there too; a multiple of both kMaxTile

// Weights that a tile fetches into the cache while it computes: `rows` panel rows from `at` on, one per step of k.
struct Ahead {
    const char* at;
    int64_t rows;
};

constexpr int64_t kAheadBytes = 8192;  // with a single tile: how far ahead in the panel, to hide memory's latency

template <int MR, int NP, class T>
INLINE void product_step(F (&acc)[MR][2 * NP], const float* a, const T* b, int64_t b_panel, int64_t i) {
    F w[2 * NP];
    for (int v = 0; v < 2 * NP; ++v) w[v] = load(b + v / 2 * b_panel + i * NR + v % 2 * W);
    for (int r = 0; r < MR; ++r) {
        const F x = broadcast(a[r]);
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = fma(x, w[v], acc[r][v]);
    }
}

// c [MR][NP * NR] (+)= a [k][MR] times NP panels b [k][NR], which lie b_panel apart.
template <int MR, int NP, class T>
void tile_product(const float* a, const T* b, int64_t b_panel, int64_t k, float* c, bool add, Ahead ahead) {
    F acc[MR][2 * NP];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) acc[r][v] = add ? load(c + (r * NP * 2 + v) * W) : zero();
    // One flat loop: nested ones make the compiler keep the accumulators in memory.
    const int64_t fetched = lesser(k, ahead.rows);
    for (int64_t i = 0; i < fetched; ++i) {
        for (int p = 0; p < NP; ++p)
            for (int64_t line = 0; line < int64_t(NR * sizeof(T)); line += 64)
                __builtin_prefetch(ahead.at + (p * b_panel + i * NR) * sizeof(T) + line, 0, 2);
        product_step<MR, NP>(acc, a + i * MR, b, b_panel, i);
    }
    for (int64_t i = fetched; i < k; ++i) {
        product_step<MR, NP>(acc, a + i * MR, b, b_panel, i);
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2 * NP; ++v) store(c + (r * NP * 2 + v) * W, acc[r][v]);
}

template <class T> using TileProduct = void (*)(const float*, const T*, int64_t, int64_t, float*, bool, Ahead);

template <int NP, class T, int... R> TileProduct<T> choose_tile(int rows, Sequence<R...>) {
    static constexpr TileProduct<T> table[] = {tile_product<R + 1, NP, T>...};
    return table[rows - 1];
}

// Rows cut into tiles of nearly equal height.
struct Tiles {
    int64_t rows, count;

    Tiles(int64_t rows, int highest) : rows(rows), count((rows + highest - 1) / highest) {}
    int64_t begin(int64_t tile) const { return rows * tile / count; }
    int height(int64_t tile) const { return int(begin(tile + 1) - begin(tile)); }
};

// out[j * stride + i] = row i's lane j.
INLINE void store_transposed(float* out, int64_t stride, const float* const (&row)[4]) {
#if defined(__x86_64__)
    __m128 a = _mm_loadu_ps(row[0]), b = _mm_loadu_ps(row[1]), c = _mm_loadu_ps(row[2]), d = _mm_loadu_ps(row[3]);
    _MM_TRANSPOSE4_PS(a, b, c, d);
    _mm_storeu_ps(out, a);
    _mm_storeu_ps(out + stride, b);
    _mm_storeu_ps(out + 2 * stride, c);
    _mm_storeu_ps(out + 3 * stride, d);
#else
    for (int j = 0; j < 4; ++j)
        for (int i = 0; i < 4; ++i) out[j * stride + i] = row[i][j];
#endif
}

// A tile's rows of x as fp32 [k][height].
template <class T> void pack_rows(const T* x, int64_t x_row, int64_t k, int height, float* out) {
    int r = 0;
    for (; r + 4 <= height; r += 4) {
        int64_t i = 0;
        for (; i + W <= k; i += W) {
            float wide[4][W];
            const float* row[4];
            for (int j = 0; j < 4; ++j) {
                store(wide[j], load(x + (r + j) * x_row + i));
                row[j] = wide[j];
            }
            for (int v = 0; v < W; v += 4) {
                const float* part[4] = {row[0] + v, row[1] + v, row[2] + v, row[3] + v};
                store_transposed(out + (i + v) * height + r, height, part);
            }
        }
        for (; i < k; ++i)
            for (int j = 0; j < 4; ++j) out[i * height + r + j] = widen_one(x + (r + j) * x_row + i);
    }
    for (; r < height; ++r)
        for (int64_t i = 0; i < k; ++i) out[i * height + r] = widen_one(x + r * x_row + i);
}

template <class Y> void write_tile(const float* c, int width, int height, const float* bias, Y* y, int64_t y_row, int64_t left) {
    for (int r = 0; r < height; ++r)
        for (int v = 0; v * W < width && v * W < left; ++v) {
            F x = load(c + r * width + v * W);
            if (bias) x = x + load(bias + v * W);
            if (left - v * W >= W) store(y + r * y_row + v * W, x);
            else store_first(y + r * y_row + v * W, x, int(left - v * W));
        }
}

template <class T> struct LinearRun {
    const PackedLinear& weight;
    const float* x;  // packed rows
    void* y;
    int64_t y_row, m, group;  // group: panels in a task
    DType type;
    Tiles tiles;

    int64_t panels() const { return (weight.n + NR - 1) / NR; }

    void operator()(int64_t task, int thread) {
        const int64_t groups = (panels() + group - 1) / group;
        const int64_t first = task % groups * group, last = lesser(first + group, panels());
        const int64_t tiles_per_block = greater<int64_t>(1, kBlockRows / kMaxTile);
        const int64_t tile_begin = task / groups * tiles_per_block;
        const int64_t tile_end = lesser(tile_begin + tiles_per_block, tiles.count);
        for (int64_t panel = first; panel < last;) {
            const bool wide = tiles.count == 1 && tiles.height(0) <= kMaxWide && panel + 2 <= last;
            const int np = wide ? 2 : 1;
            run_panels(panel, np, tile_begin, tile_end, thread);
            panel += np;
        }
    }

    void run_panels(int64_t panel, int np, int64_t tile_begin, int64_t tile_end, int thread) {
        const int64_t k = weight.k, panel_size = k * NR, count = tile_end - tile_begin;
        const T* b = (const T*)weight.panels + panel * panel_size;
        const int64_t row_begin = tiles.begin(tile_begin), rows = tiles.begin(tile_end) - row_begin;
        const int width = np * NR;
        // With few rows the weight is widened on its way into the registers, with many once per piece.
        const bool widen = sizeof(T) == 2 && count > 2;
        float* c = (float*)thread_scratch(thread, sizeof(float) * (rows * width + (widen ? kChunk * NR : 0)));
        float* wide_piece = c + rows * width;
        const int64_t chunk = count > 1 ? kChunk : k;
        for (int64_t k0 = 0; k0 < k; k0 += chunk) {
            const int64_t length = lesser(chunk, k - k0);
            const T* piece = b + k0 * NR;
            if (widen)
                for (int64_t i = 0; i < length * NR; i += W) store(wide_piece + i, load(piece + i));
            for (int64_t t = tile_begin; t < tile_end; ++t) {
                const int height = tiles.height(t);
                const float* a = x + tiles.begin(t) * k + k0 * height;
                float* out = c + (tiles.begin(t) - row_begin) * width;
                // What is read next follows in memory, be it this panel's next piece or the next panel: each tile fetches
                // its share of it. A few rows' worth of arithmetic does not outrun the hardware's own prefetching.
                Ahead ahead{(const char*)piece + kAheadBytes, height > kMaxWide ? k : 0};
                if (count > 1) {
                    const int64_t share = (lesser<int64_t>(kChunk, k) + count - 1) / count;
                    ahead = {(const char*)(piece + (length + (t - tile_begin) * share) * NR), share};
                }
                if (widen) choose_tile<1, float>(height, Upto<kMaxTile>{})(a, wide_piece, 0, length, out, k0 > 0, {nullptr, 0});
                else if (np == 1) choose_tile<1, T>(height, Upto<kMaxTile>{})(a, piece, 0, length, out, k0 > 0, ahead);
                else choose_tile<2, T>(height, Upto<kMaxWide>{})(a, piece, panel_size, length, out, k0 > 0, ahead);
                if (k0 + length == k) write(out, width, height, panel, tiles.begin(t));
            }
        }
    }

    void write(const float* c, int width, int height, int64_t panel, int64_t row) {
        const float* bias = weight.bias ? weight.bias + panel * NR : nullptr;
        const int64_t at = row * y_row + panel * NR;
        with_type(type, [&](auto* t) {
            using Y = Pointee<decltype(t)>;
            write_tile(c, width, height, bias, (Y*)y + at, y_row, weight.n - panel * NR);
        });
    }
};

template <class T>
void linear_typed(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type, int64_t m) {
    const Tiles tiles(m, kMaxTile);
    const int64_t k = weight.k;
    const float* packed = (const float*)x;
    if (!(m == 1 && type == DType::f32)) {
        float* rows = (float*)caller_scratch(0, sizeof(float) * m * k);
        auto pack = [&](int64_t tile, int) {
            with_type(type, [&](auto* t) {
                using X = Pointee<decltype(t)>;
                pack_rows((const X*)x + tiles.begin(tile) * x_row, x_row, k, tiles.height(tile),  rows + tiles.begin(tile) * k);
            });
        };
        if (tiles.count > 1) parallel(tiles.count, pack);
        else pack(0, 0);
        packed = rows;
    }
    const int64_t panels = (weight.n + NR - 1) / NR;
    const int64_t blocks = (tiles.count + kBlockRows / kMaxTile - 1) / (kBlockRows / kMaxTile);
    // Enough tasks that no thread waits long for the last; whole pairs of panels; small enough to share evenly.
    int64_t group = panels * blocks / (int64_t(num_threads()) * 8);
    group = group < 2 ? (tiles.count == 1 && tiles.height(0) <= kMaxWide && panels > 2 * num_threads() ? 2 : 1)
                      : lesser<int64_t>(group, 64) & ~int64_t(1);
    LinearRun<T> run{weight, packed, y, y_row, m, group, type, tiles};
    parallel((panels + group - 1) / group * blocks, run);
}

void linear(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type, int64_t m) {
    if (m <= 0) return;
    with_type(weight.type, [&](auto* t) { linear_typed<Pointee<decltype(t)>>(weight, x, x_row, y, y_row, type, m); });
}

bool pack_linear(PackedLinear& packed, const void* weight, const float* bias) {
    const int64_t n = packed.n, k = packed.k, panels = (n + NR - 1) / NR;
    const size_t bytes = (panels * NR * k * item_size(packed.type) + 4095) / 4096 * 4096;
    const size_t bias_bytes = bias ? (panels * NR * sizeof(float) + 63) / 64 * 64 : 0;
    packed.panels = std::aligned_alloc(4096, bytes);
    packed.bias = bias ? (float*)std::aligned_alloc(64, bias_bytes) : nullptr;
    packed.bytes = bytes + bias_bytes;
    if (!packed.panels || (bias && !packed.bias)) return false;
    if (bias) {
        std::memset(packed.bias, 0, bias_bytes);
        std::memcpy(packed.bias, bias, n * sizeof(float));
    }
    with_type(packed.type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        auto pack = [&](int64_t panel, int) {
            T* out = (T*)packed.panels + panel * NR * k;
            const int64_t filled = lesser<int64_t>(NR, n - panel * NR);
            if (filled < NR) std::memset(out, 0, NR * k * sizeof(T));
            for (int64_t i = 0; i < filled; ++i) {
                const T* row = (const T*)weight + (panel * NR + i) * k;
                for (int64_t j = 0; j < k; ++j) out[j * NR + i] = row[j];
            }
        };
        parallel(panels, pack);
    });
    return true;
}
