// Linear layers on integers: weights of 4 or 8 bits, x of 15, both with a scale per row and group of 192 k. 8 bits of x would
// be too few beside its outliers (docs/kernels.md). Tiles multiply x as two integers of 8 bits, v = 128 * high + low, other
// instruction sets in words. Sums over a group are exact, so an output is one chain of fused multiply-adds, one per group
// in ascending order, whatever multiplies the integers: instruction sets that fuse give each other's bits.
//
// A panel holds 16 outputs. A step of it is 16 lines of 64 bytes, in a line 4 neighbouring k of each output. That is how
// VNNI takes weights, and a tile of AMX too. With 4 bits a step is packed: for each of its two halves of 32 k a slope and
// an offset per output (Half), then 8 lines of 64 bytes, in each 16-bit word four values q, lowest bits first: k 0 and k 1
// of a line of the 8-bit step, then the same of the next line; the next word has k 2 and 3. The weight is
// (slope * q + offset) >> 8, modulo 2^16: the file's scale * q + min in units of the group's scale, rounded to 8 bits.

constexpr int kPanel = 16;
constexpr int kStepK = 64;
constexpr int64_t kStepLines = kPanel * kStepK;  // bytes of an 8-bit step
constexpr int kHalfK = 32;
constexpr int kGroupSteps = 3;
constexpr int kGroupK = kGroupSteps * kStepK;

struct Half { uint16_t slope[kPanel], offset[kPanel]; };
struct PackedStep {
    Half half[2];
    uint16_t q[8][2 * kPanel];
};

constexpr int kMostX = 127 * 128;
#if defined(__AVX512F__)
constexpr int kRowsInTile = 16;
#elif defined(__AVX2__)
constexpr int kRowsInTile = 4;
#else
constexpr int kRowsInTile = 2;
#endif
constexpr int64_t kTileStep = int64_t(kRowsInTile) * kStepK * 2;  // bytes of a tile's step of x

typedef uint16_t Words __attribute__((vector_size(4 * W)));
typedef int16_t SignedWords __attribute__((vector_size(4 * W)));
typedef int32_t Dwords __attribute__((vector_size(4 * W)));
typedef uint16_t HalfWords __attribute__((vector_size(2 * W)));

INLINE int64_t steps_of(int64_t k) { return (k + kStepK - 1) / kStepK; }
INLINE int64_t groups_of(int64_t steps) { return (steps + kGroupSteps - 1) / kGroupSteps; }
INLINE int64_t step_bytes(const PackedLinear& weight) {
    return weight.format == Format::int4 ? int64_t(sizeof(PackedStep)) : kStepLines;
}

template <class V> INLINE V load_as(const void* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
template <class V> INLINE void store_as(void* p, V v) { std::memcpy(p, &v, sizeof v); }

// Both words of an output's dword.
INLINE Words twice(const uint16_t* p) {
    const Dwords wide = __builtin_convertvector(load_as<HalfWords>(p), Dwords);
    return (Words)(wide | wide << 16);
}

// The 8-bit lines of packed steps. `ahead`: bytes to fetch ahead, or 0.
void expand_steps(const PackedStep* from, int64_t steps, int8_t* lines, int64_t ahead) {
    for (int64_t s = 0; s < steps; ++s, ++from, lines += kStepLines) {
        for (int64_t line = 0; ahead && line < int64_t(sizeof(PackedStep)); line += 64)
            __builtin_prefetch((const char*)from + ahead + line, 0, 3);
        for (int h = 0; h < 2; ++h)
            for (int v = 0; v < kPanel; v += W) {
                const Words slope = twice(from->half[h].slope + v), offset = twice(from->half[h].offset + v);
                for (int i = 0; i < 4; ++i) {
                    const Words word = load_as<Words>(from->q[4 * h + i] + 2 * v);
                    const Words a = (word & 15) * slope + offset, b = (word >> 4 & 15) * slope + offset;
                    const Words c = (word >> 8 & 15) * slope + offset, d = (word >> 12) * slope + offset;
                    int8_t* line = lines + (8 * h + 2 * i) * 64 + 4 * v;
                    store_as(line, (Words)(a >> 8 | (b & 0xff00)));
                    store_as(line + 64, (Words)(c >> 8 | (d & 0xff00)));
                }
            }
    }
}

// Rows of x as integers, cut into tiles: tile, step, then for AMX high and low, row, k; else row, k in words, k 0, 2, 1, 3 of
// each four. scales [tile, group, row].
struct QuantizedRows {
    char* values;
    float* scales;
    int64_t steps;

    char* step(int64_t tile, int64_t s) const { return values + (tile * steps + s) * kTileStep; }
    float* scale(int64_t tile, int64_t g) const { return scales + (tile * groups_of(steps) + g) * kRowsInTile; }
};

// What is not finite makes the scale NaN, and with it the row's outputs.
template <class T> void quantize_row(const T* x, int64_t k, const QuantizedRows& rows, int64_t tile, int r) {
    for (int64_t first = 0; first < rows.steps; first += kGroupSteps) {
        alignas(64) float wide[kGroupK];
        alignas(64) int32_t whole[kGroupK];
        const int64_t last = lesser(first + kGroupSteps, rows.steps);
        const int length = int(last - first) * kStepK;
        for (int i = 0; i < length; i += W) {
            const int64_t left = k - first * kStepK - i;
            const T* from = x + first * kStepK + i;
            store(wide + i, left >= W ? load(from) : left > 0 ? load_first(from, int(left)) : zero());
        }
        int32_t most = 0;
        for (int i = 0; i < length; ++i) most = greater(most, int32_t(bits_of(wide[i]) & 0x7fffffffu));
        float scale = float_of(most) * (1.0f / kMostX), inverse = kMostX / float_of(most);
        if (most >= 0x7f800000) {
            scale = float_of(0x7fc00000u);
            inverse = 0;
        } else if (float_of(most) < 0x1p-100f) {
            scale = inverse = 0;
        }
        // Adding 1.5 * 2^23 rounds to the nearest whole, ties to even, in the lowest bits.
        for (int i = 0; i < length; ++i) whole[i] = int32_t(bits_of(wide[i] * inverse + 12582912.0f)) - 0x4b400000;
        rows.scale(tile, first / kGroupSteps)[r] = scale;
        for (int64_t s = first; s < last; ++s) {
            const int32_t* from = whole + (s - first) * kStepK;
#if defined(__AMX_INT8__)
            int8_t* high = (int8_t*)rows.step(tile, s) + r * kStepK;
            int8_t* low = high + kRowsInTile * kStepK;
            for (int i = 0; i < kStepK; ++i) high[i] = int8_t((from[i] + 64) >> 7);
            for (int i = 0; i < kStepK; ++i) low[i] = int8_t(from[i] - high[i] * 128);
#else
            int16_t* words = (int16_t*)rows.step(tile, s) + r * kStepK;
            for (int i = 0; i < kStepK; i += 4, words += 4) {
                words[0] = int16_t(from[i]);
                words[1] = int16_t(from[i + 2]);
                words[2] = int16_t(from[i + 1]);
                words[3] = int16_t(from[i + 3]);
            }
#endif
        }
    }
}

// A panel's 8-bit steps, and their scales per output.
struct Panel {
    const int8_t* lines;
    const bf16* scales;
};

#if defined(__AMX_INT8__)
#include "quantized_amx.h"
#else

// sum + the products of pairs of words; x is one pair.
INLINE Dwords multiply_pairs(Dwords sum, SignedWords weight, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Dwords)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX512F__)
    return sum + (Dwords)_mm512_madd_epi16((__m512i)weight, _mm512_set1_epi32(x));
#elif defined(__AVX2__)
    return sum + (Dwords)_mm256_madd_epi16((__m256i)weight, _mm256_set1_epi32(x));
#elif defined(__x86_64__)
    return sum + (Dwords)_mm_madd_epi16((__m128i)weight, _mm_set1_epi32(x));
#else
    return sum + ((Dwords)weight << 16 >> 16) * int16_t(x) + ((Dwords)weight >> 16) * (x >> 16);
#endif
}

INLINE F whole_to_float(Dwords v) {
#if defined(__AVX512F__)
    return {_mm512_cvtepi32_ps((__m512i)v)};
#elif defined(__AVX2__)
    return {_mm256_cvtepi32_ps((__m256i)v)};
#else
    return {__builtin_convertvector(v, Floats)};
#endif
}

// c [H][16] = a tile of rows times a panel. `ahead`: bytes to fetch ahead, or 0.
template <int H> void panel_product(const QuantizedRows& rows, int64_t tile, Panel panel, float* c, int64_t ahead) {
    constexpr int kVectors = kPanel / W;
    for (int i = 0; i < H * kPanel; i += W) store(c + i, zero());
    const int8_t* line = panel.lines;
    for (int64_t first = 0; first < rows.steps; first += kGroupSteps) {
        Dwords sum[H][kVectors];
        for (int r = 0; r < H; ++r)
            for (int v = 0; v < kVectors; ++v) sum[r][v] = Dwords{};
        for (int64_t s = first; s < lesser(first + kGroupSteps, rows.steps); ++s) {
            const char* x = rows.step(tile, s);
            for (int i = 0; i < kStepK / 4; ++i, line += 64, x += 8) {
                if (ahead) __builtin_prefetch(line + ahead, 0, 3);
                for (int v = 0; v < kVectors; ++v) {
                    const SignedWords both = load_as<SignedWords>(line + v * W * 4), even = both << 8 >> 8, odd = both >> 8;
                    for (int r = 0; r < H; ++r) {
                        const char* of_row = x + r * kStepK * 2;
                        sum[r][v] = multiply_pairs(sum[r][v], even, load_as<int32_t>(of_row));
                        sum[r][v] = multiply_pairs(sum[r][v], odd, load_as<int32_t>(of_row + 4));
                    }
                }
            }
        }
        const int64_t g = first / kGroupSteps;
        const float* of_rows = rows.scale(tile, g);
        for (int v = 0; v < kVectors; ++v) {
            const F scale = load(panel.scales + g * kPanel + v * W);
            for (int r = 0; r < H; ++r) {
                float* out = c + r * kPanel + v * W;
                store(out, fma(whole_to_float(sum[r][v]), scale * broadcast(of_rows[r]), load(out)));
            }
        }
    }
}

struct Products {
    explicit Products(int) {}
};
#endif

using PanelProduct = void (*)(const QuantizedRows&, int64_t, Panel, float*, int64_t);

// The products for tiles of at least `height` rows; what the rows beyond give is dropped.
template <int... I> PanelProduct choose_product(int height, int& rows, Sequence<I...>) {
    static constexpr PanelProduct table[] = {panel_product<1>, panel_product<I * 2 + 2>...};
    rows = height == 1 ? 1 : (height + 1) / 2 * 2;
    return table[rows / 2];
}

INLINE const bf16* scales_of(const PackedLinear& weight, int64_t panel) {
    return (const bf16*)weight.scales + panel * groups_of(steps_of(weight.k)) * kPanel;
}

struct QuantizedRun {
    const PackedLinear& weight;
    QuantizedRows rows;
    void* y;
    int64_t y_row;
    DType type;
    Tiles tiles;
    int64_t group, block;  // panels and tiles in a task
    int64_t together;      // panels that a tile passes over, so that what it writes lies together
    int height;            // of all tiles as multiplied
    PanelProduct product;
    Likeliest* likeliest;  // takes the outputs instead of y, if given

    static constexpr int64_t kAhead = 8192;

    int64_t panels() const { return (weight.n + kPanel - 1) / kPanel; }

    void operator()(int64_t task, int thread) {
        const int64_t groups = (panels() + group - 1) / group;
        const int64_t first = task % groups * group, last = lesser(first + group, panels());
        const int64_t tile_begin = task / groups * block, tile_end = lesser(tile_begin + block, tiles.count);
        const int64_t panel_lines = rows.steps * kStepLines;
        const bool packed = weight.format == Format::int4;
        char* scratch = (char*)thread_scratch(thread, kRowsInTile * kPanel * sizeof(float) + packed * together * panel_lines);
        float* c = (float*)scratch;
        scratch += kRowsInTile * kPanel * sizeof(float);
        const Products with(height);
        for (int64_t begin = first; begin < last; begin += together) {
            const int64_t end = lesser(begin + together, last);
            const char* from = (const char*)weight.panels + begin * rows.steps * step_bytes(weight);
            if (packed) {
                expand_steps((const PackedStep*)from, (end - begin) * rows.steps, (int8_t*)scratch, kAhead);
                from = scratch;
                __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
            }
            for (int64_t t = tile_begin; t < tile_end; ++t)
                for (int64_t panel = begin; panel < end; ++panel) {
                    const Panel operand{(const int8_t*)from + (panel - begin) * panel_lines, scales_of(weight, panel)};
                    product(rows, t, operand, c, !packed && t == tile_begin ? kAhead : 0);
                    write(c, panel, t);
                }
        }
    }

    void write(const float* c, int64_t panel, int64_t tile) const {
        if (likeliest) {
            const float* bias = weight.bias ? weight.bias + panel * kPanel : nullptr;
            const int64_t row = tiles.begin(tile);
            return likeliest->take(c, kPanel, tiles.height(tile), bias, panel * kPanel, weight.n, panel / group, row);
        }
        const int64_t left = weight.n - panel * kPanel, at = tiles.begin(tile) * y_row + panel * kPanel;
        with_type(type, [&](auto* t) {
            auto* out = (Pointee<decltype(t)>*)y + at;
            for (int r = 0; r < tiles.height(tile); ++r, out += y_row)
                for (int v = 0; v < kPanel && v < left; v += W) {
                    F sum = load(c + r * kPanel + v);
                    if (weight.bias) sum = sum + load(weight.bias + panel * kPanel + v);
                    store_upto(out + v, sum, left - v);
                }
        });
    }
};

void linear_quantized(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type, int64_t m,
                      Likeliest* likeliest = nullptr) {
    constexpr int64_t kBlockRows8 = 512, kTogetherBytes = 192 << 10;
    const Tiles tiles(m, kRowsInTile);
    const int64_t steps = steps_of(weight.k);
    QuantizedRows rows{nullptr, nullptr, steps};
    rows.values = (char*)caller_scratch(0, tiles.count * steps * kTileStep);
    rows.scales = (float*)caller_scratch(1, tiles.count * groups_of(steps) * kRowsInTile * sizeof(float));
    with_type(type, [&](auto* t) {
        auto quantize = [&](int64_t tile, int) {
            for (int r = 0; r < tiles.height(tile); ++r)
                quantize_row((decltype(t))x + (tiles.begin(tile) + r) * x_row, weight.k, rows, tile, r);
        };
        if (tiles.count > 1) parallel(tiles.count, quantize);
        else quantize(0, 0);
    });
    QuantizedRun run{weight, rows, y, y_row, type, tiles, 0, 0, 1, 0, nullptr, likeliest};
    run.product = choose_product(int((m + tiles.count - 1) / tiles.count), run.height, Upto<kRowsInTile / 2>{});
    run.block = kBlockRows8 / kRowsInTile;
    if (tiles.count > 1) run.together = greater<int64_t>(1, lesser<int64_t>(8, kTogetherBytes / (steps * kStepLines)));
    const int64_t blocks = (tiles.count + run.block - 1) / run.block;
    run.group = greater<int64_t>(1, lesser<int64_t>(64, run.panels() * blocks / (int64_t(num_threads()) * 8)));
    run_panels(run, m, blocks);
}

// The weight at (i, j), in units of its group's scale.
INLINE int whole_weight(const PackedLinear& packed, int64_t i, int64_t j) {
    const int64_t s = i / kPanel * steps_of(packed.k) + j / kStepK;
    const int lane = int(i % kPanel), line = int(j % kStepK) / 4, byte = int(j % 4);
    if (packed.format == Format::int8) return ((const int8_t*)packed.panels)[s * kStepLines + line * 64 + lane * 4 + byte];
    const PackedStep& step = ((const PackedStep*)packed.panels)[s];
    const Half& half = step.half[line / 8];
    const int q = step.q[line / 2][lane * 2 + byte / 2] >> (line % 2 * 8 + byte % 2 * 4) & 15;
    return int8_t(uint16_t(half.slope[lane] * q + half.offset[lane]) >> 8);
}

bool pack_quantized(PackedLinear& packed, const QuantizedSource& from) {
    const int64_t n = packed.n, k = packed.k, steps = steps_of(k), groups = groups_of(steps), panels = (n + kPanel - 1) / kPanel;
    const size_t bytes = (panels * steps * step_bytes(packed) + 4095) / 4096 * 4096;
    const size_t scale_bytes = panels * groups * kPanel * sizeof(bf16), bias_bytes = panels * kPanel * sizeof(float);
    packed.panels = allocate_shared(bytes);
    packed.scales = allocate_shared(scale_bytes);
    packed.bias = from.bias ? (float*)std::aligned_alloc(64, bias_bytes) : nullptr;
    packed.bytes = bytes + scale_bytes + (from.bias ? bias_bytes : 0);
    if (!packed.panels || !packed.scales || (from.bias && !packed.bias)) return false;
    std::memset(packed.scales, 0, scale_bytes);
    if (from.bias) {
        std::memset(packed.bias, 0, bias_bytes);
        std::memcpy(packed.bias, from.bias, n * sizeof(float));
    }
    auto pack = [&](int64_t panel, int) {
        char* out = (char*)packed.panels + panel * steps * step_bytes(packed);
        std::memset(out, 0, steps * step_bytes(packed));
        for (int lane = 0; lane < lesser<int64_t>(kPanel, n - panel * kPanel); ++lane) {
            const int64_t row = panel * kPanel + lane;
            for (int64_t g = 0; g < groups; ++g)
                ((uint16_t*)packed.scales)[(panel * groups + g) * kPanel + lane] = from.scales[row * groups + g];
            for (int64_t j = 0; j < k; ++j) {
                const int line = int(j % kStepK) / 4, byte = int(j % 4);
                if (packed.format == Format::int8) {
                    out[j / kStepK * kStepLines + line * 64 + lane * 4 + byte] = ((const char*)from.values)[row * k + j];
                } else {
                    PackedStep& step = ((PackedStep*)out)[j / kStepK];
                    const int q = ((const uint8_t*)from.values)[row * k + j];
                    step.q[line / 2][lane * 2 + byte / 2] |= uint16_t(q << (line % 2 * 8 + byte % 2 * 4));
                    step.half[line / 8].slope[lane] = uint16_t(from.slopes[row * (k / kHalfK) + j / kHalfK]);
                    step.half[line / 8].offset[lane] = uint16_t(from.offsets[row * (k / kHalfK) + j / kHalfK]);
                }
            }
        }
    };
    parallel(panels, pack);
    return true;
}

void embed_quantized(const PackedLinear& packed, const int64_t* ids, float factor, void* y, DType type, int64_t tokens) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        const int64_t k = packed.k;
        auto unpack = [&](int64_t token, int) {
            T* out = (T*)y + token * k;
            for (int64_t j = 0; j < k; j += W) {
                float row[W];
                const int left = int(lesser<int64_t>(W, k - j));
                const float scale = widen_one(scales_of(packed, ids[token] / kPanel) + j / kGroupK * kPanel + ids[token] % kPanel);
                for (int i = 0; i < left; ++i) row[i] = float(whole_weight(packed, ids[token], j + i)) * scale;
                store_upto(out + j, load(row), left);
                // Rounded to the dtype before it is multiplied, as a table's rows are.
                if (factor != 1) store_upto(out + j, (left == W ? load(out + j) : load_first(out + j, left)) * broadcast(factor), left);
            }
        };
        parallel(tokens, unpack);
    });
}
