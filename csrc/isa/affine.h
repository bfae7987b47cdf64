// fp32 weights held as the integers they were stored as, without loss: in 4 or 8 bits, with a scale and a lowest value
// for each 32 k, or in 8 bits with those of 16. scale * integer is exact in fp32, so one multiply-add gives the very
// weight that the file's format means; what lies in memory is 6, 10 or 12 bits instead of 32. A piece of a panel is
// widened to where the products read it as if it had lain there.
#pragma once

#include "../memory.h"
#include "../threads.h"
#include "linear_tiles.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int kAffineK = 32;  // a whole number of blocks of any format
constexpr int64_t kAffinePiece = 192;  // k that are widened at a time: they stay in the first-level cache

template <int Bits, int K> struct AffineBlock {
    static constexpr int kBits = Bits, kK = K,
                         kTogether = 32 / Bits;  // neighbouring k of an output in a word, the first in the lowest bits
    static constexpr int kWords = K / kTogether;
    float scale[NR], low[NR];
    uint32_t words[2][kWords][W];  // vector of outputs, word, output
};

template <class Body> INLINE void with_affine(Format format, Body&& body) {
    if (format == Format::affine4) body((AffineBlock<4, 32>*)nullptr);
    else if (format == Format::affine8) body((AffineBlock<8, 32>*)nullptr);
    else body((AffineBlock<8, 16>*)nullptr);
}
// Whether it is held in such blocks. Their formats are the last of Format.
// What they hold is fp32, whatever else may be multiplied.
INLINE bool is_affine(const PackedLinear& weight) { return weight.format >= Format::affine4; }

constexpr int64_t kAffineAhead = 4096;  // bytes that are fetched ahead
template <class Block> INLINE void fetch_after(const Block* block) {
    for (size_t line = 0; line < sizeof *block; line += 64)
        __builtin_prefetch((const char*)block + kAffineAhead + line);
}

// Blocks of a panel as fp32 [k][NR].
template <class Block> void widen_blocks(const Block* from, int64_t blocks, float* to) {
    for (; blocks; --blocks, ++from, to += Block::kK * NR) {
        fetch_after(from);
        for (int v = 0; v < 2; ++v) {
            const F scale = load(from->scale + v * W), low = load(from->low + v * W);
            float* out = to + v * W;
            for (int word = 0; word < Block::kWords; ++word) {
                const Integers all = load_integers(from->words[v][word]);
                for (int i = 0; i < Block::kTogether; ++i, out += NR)
                    store(out, fma(lowest_bits<Block::kBits>(all >> (i * Block::kBits)), scale, low));
            }
        }
    }
}

// k [begin, begin + length) of a panel, both multiples of 32.
INLINE void widen_affine(const PackedLinear& weight, int64_t panel, int64_t begin, int64_t length, float* to) {
    with_affine(weight.format, [&]<class Block>(Block*) {
        widen_blocks((const Block*)weight.panels + (panel * weight.k + begin) / Block::kK, length / Block::kK, to);
    });
}

size_t affine_bytes(const PackedLinear& packed) {
    size_t bytes = 0;
    with_affine(packed.format, [&]<class Block>(Block*) {
        bytes = whole_pages(panels_of(packed) * (packed.k / Block::kK) * sizeof(Block));
    });
    return bytes;
}

bool pack_affine(PackedLinear& packed, const AffineSource& from) {
    bool packs = false;
    with_affine(packed.format, [&]<class Block>(Block*) {
        const int64_t blocks = packed.k / Block::kK;
        packed.bytes = affine_bytes(packed);
        packed.panels = allocate_shared(packed.bytes);
        if (!packed.panels || !pack_bias(packed, from.bias, panels_of(packed) * NR)) return;
        auto pack = [&](int64_t panel, int) {
            Block* out = (Block*)packed.panels + panel * blocks;
            std::memset((void*)out, 0, blocks * sizeof *out);
            for (int64_t i = 0; i < lesser<int64_t>(NR, packed.n - panel * NR); ++i) {
                const int64_t row = (panel * NR + i) * blocks;
                for (int64_t b = 0; b < blocks; ++b) {
                    const uint8_t* values = from.values + (row + b) * Block::kK;
                    out[b].scale[i] = from.scale[row + b];
                    out[b].low[i] = from.low[row + b];
                    for (int j = 0; j < Block::kK; ++j)
                        out[b].words[i / W][j / Block::kTogether][i % W] |= uint32_t(values[j])
                                                                            << (j % Block::kTogether * Block::kBits);
                }
            }
        };
        parallel(panels_of(packed), pack);
        packs = true;
    });
    return packs;
}

template <class Y> void embed_affine(const PackedLinear& packed, int64_t row, float factor, Y* y) {
    with_affine(packed.format, [&]<class Block>(Block*) {
        const int64_t blocks = packed.k / Block::kK, i = row % NR;
        for (int64_t b = 0; b < blocks; ++b, y += Block::kK) {
            const Block& block = ((const Block*)packed.panels)[row / NR * blocks + b];
            float wide[Block::kK];
            for (int j = 0; j < Block::kK; ++j) {
                const uint32_t whole =
                    block.words[i / W][j / Block::kTogether][i % W] >> (j % Block::kTogether * Block::kBits);
                wide[j] = block.scale[i] * float(whole & ((1u << Block::kBits) - 1)) + block.low[i];
            }
            for (int j = 0; j < Block::kK; j += W) store(y + j, load(wide + j) * broadcast(factor));
        }
    });
}

constexpr int kFewAffine = W == 16 ? 9 : 4;  // so few rows

// c [MR][NR] = a [k][MR] times a panel of `blocks`, for so few rows that nothing widened is used again. GCC keeps the
// sums in registers only if all loops over them are unrolled early.
template <int MR, class Block> void affine_product(const float* a, const Block* block, int64_t blocks, float* c) {
    F acc[MR][2];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2; ++v) acc[r][v] = zero();
    for (; blocks; --blocks, ++block) {
        fetch_after(block);
        for (int word = 0; word < Block::kWords; ++word) {
            const Integers all[2] = {load_integers(block->words[0][word]), load_integers(block->words[1][word])};
            for (int i = 0; i < Block::kTogether; ++i, a += MR)
#pragma GCC unroll 2
                for (int v = 0; v < 2; ++v) {
                    const F w = fma(lowest_bits<Block::kBits>(all[v] >> (i * Block::kBits)), load(block->scale + v * W),
                                    load(block->low + v * W));
                    for (int r = 0; r < MR; ++r) acc[r][v] = fma(broadcast(a[r]), w, acc[r][v]);
                }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < 2; ++v) store(c + (r * 2 + v) * W, acc[r][v]);
}

INLINE void few_rows_affine(const PackedLinear& weight, int64_t panel, int rows, const float* a, float* c) {
    with_affine(weight.format, [&]<class Block>(Block*) {
        const int64_t blocks = weight.k / Block::kK;
        const Block* from = (const Block*)weight.panels + panel * blocks;
        with_count<kFewAffine>(rows, [&]<int MR>() { affine_product<MR>(a, from, blocks, c); });
    });
}

}}  // namespace pagemill
