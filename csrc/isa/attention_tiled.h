// The pass over a partition for many bf16 queries and a cache in bf16, or in floating point of 8 bits, in tiles of
// rows; TileProducts multiplies them. Keys and values in pairs are read where they lie; a step's values in two blocks,
// what ends within a tile, and other layouts are copied, and 8 bits widened.
#pragma once

#include "attention_bf16.h"
#include "attention_float8.h"
#include "attention_plan.h"
#include "attention_tiles.h"
#include "linear_tiles.h"
#include "simd.h"

#if defined(__AVX512BF16__)
namespace pagemill { namespace {

template <class T> struct TiledPass {
    static constexpr int kRows = kTileTaskRows, kHeight = TileProducts::kHeight;
    static constexpr int64_t kTile = 512;  // elements of a tile
    static constexpr int kPieceTokens = kPairStep / kPieces;
    static constexpr int64_t kStepScores = 2 * kHeight * kPairStep;

    const AttentionArgs& args;
    const AttentionTask& task;
    int group, padded;
    Tiles tiles;
    int height, dim_steps, dim_tiles;
    bool keys_in_place, values_in_place;  // whole steps of values, in pieces
    TileProducts products;
    bf16 *queries = nullptr, *keys, *values, *weights;
    float *scores, *part;  // two steps of scores
    const char* next_keys[kPartition / 16] =
        {};  // of 16 tokens each, of the next head or partition; none at the task's end
    bool fetching = false;

    TiledPass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask*, int padded)
        : args(args), task(task), group(args.heads / args.cache.kv_heads), padded(padded),
          tiles(task.tokens * group, kHeight), height(int((tiles.rows + tiles.count - 1) / tiles.count)),
          dim_steps((args.cache.head_dim + 31) / 32), dim_tiles(padded / 16),
          keys_in_place(args.cache.key.beside == 2 && args.cache.block_size % 16 == 0 && args.cache.head_dim % 32 == 0),
          values_in_place(args.cache.value.beside == 2 && args.cache.block_size % kPieceTokens == 0 &&
                          args.cache.value.token == 2 * padded),
          products(height) {}

    int64_t query_size() const { return tiles.count * dim_steps * kTile; }  // of one KV head
    int64_t scratch_size() const {
        const int64_t partition = (dim_steps * (kPartition / 16) + dim_tiles * (kPartition / 32)) * kTile;
        const int64_t all = task.heads * query_size() + partition + 2 * kHeight * kPartition;  // in bf16
        return all / 2 + 2 * kStepScores + 2 * kHeight * padded;
    }

    void begin(float* memory) {
        queries = (bf16*)memory;
        keys = queries + task.heads * query_size();
        values = keys + dim_steps * (kPartition / 16) * kTile;
        weights = values + dim_tiles * (kPartition / 32) * kTile;
        scores = (float*)(weights + 2 * kHeight * kPartition);
        part = scores + 2 * kStepScores;
        for (int h = 0; h < task.heads; ++h)
            for (int64_t tile = 0; tile < tiles.count; ++tile)
                pack_query(task.head + h, tile, queries + h * query_size() + tile * dim_steps * kTile);
    }

    void pack_query(int head, int64_t tile, bf16* to) const {
        for (int r = 0; r < height; ++r) {
            const int64_t i = tiles.begin(tile) + r;
            for (int s = 0; s < dim_steps; ++s) {
                __m512i x = _mm512_setzero_si512();
                if (r < tiles.height(tile)) {
                    const bf16* q = query_at<bf16>(args, task, group, head, i);
                    x = _mm512_maskz_loadu_epi16(first_bits(args.cache.head_dim - s * 32), q + s * 32);
                }
                _mm512_storeu_si512(to + s * kTile + r * 32, x);
            }
        }
    }

    // Keys of 16 tokens from `base + token` on -> [pair of dimensions][token][2], zeros outside `range` and beyond the
    // head.
    void copy_keys(int row, int head, int64_t base, int token, KeyRange range, bf16* to) const {
        const CacheView& cache = args.cache.key;
        const int begin = greater(token, int(range.begin)), end = lesser(token + 16, int(range.end));
        if constexpr (kIsFloat8<T>) {
            const __mmask16 tokens = __mmask16(first_bits(end - token) & ~first_bits(begin - token));
            if (args.cache.head_dim % 32 || !tokens) std::memset((void*)to, 0, dim_steps * kTile * sizeof(bf16));
            if (!tokens) return;
            const Widener<T> widener;
            const T* from = key_at<T>(args, row, head, base + token);
            for (int d = 0; d < args.cache.head_dim; d += 4, from += 4 * cache.dim, to += 64) {
                const auto pairs = widener.keys(from, cache.dim);
                _mm512_storeu_si512(to, _mm512_maskz_mov_epi32(tokens, pairs.first));
                _mm512_storeu_si512(to + 32, _mm512_maskz_mov_epi32(tokens, pairs.second));
            }
            return;
        }
        std::memset((void*)to, 0, dim_steps * kTile * sizeof(bf16));
        for_pieces(args, base, begin, end, [&](int64_t, int, int t, int count) {
            const bf16* from = key_at<bf16>(args, row, head, base + t);
            bf16* at = to + (t - token) * 2;
            if (cache.beside == 2) {
                const __mmask16 these = __mmask16(first_bits(count));
                for (int d = 0; d < args.cache.head_dim / 2; ++d, from += cache.dim, at += 32)
                    _mm512_mask_storeu_epi32(at, these, _mm512_maskz_loadu_epi32(these, from));
            } else {
                for (int i = 0; i < count; ++i)
                    for (int d = 0; d < args.cache.head_dim; ++d)
                        at[d / 2 * 32 + i * 2 + d % 2] = from[i * cache.token + d * cache.dim];
            }
        });
    }

    // Values of 32 tokens from `base + token` on -> [pair of tokens][padded][2], zeros outside `range` and beyond the
    // head.
    void copy_values(int row, int head, int64_t base, int token, KeyRange range, bf16* to) const {
        const CacheView& cache = args.cache.value;
        if constexpr (kIsFloat8<T>) {
            const Widener<T> widener;
            const auto seen = [&](int t) { return t >= range.begin && t < range.end; };
            for (int t = token; t < token + 32; t += 2, to += 2 * padded) {
                const bool even = seen(t), odd = seen(t + 1);
                if (!even && !odd) {
                    std::memset((void*)to, 0, 2 * padded * sizeof(bf16));
                    continue;
                }
                const T* from = value_at<T>(args, row, head, base + t);
                for (int d = 0; d < padded; d += 32) {
                    const __mmask32 here = first_bits(padded - d);
                    const auto pairs = widener.values(from + d, cache.token, even ? here : 0, odd ? here : 0);
                    _mm512_storeu_si512(to + 2 * d, pairs.first);
                    if (d + 16 < padded) _mm512_storeu_si512(to + 2 * d + 32, pairs.second);
                }
            }
            return;
        }
        if (cache.beside != 2) {
            std::memset(to, 0, dim_tiles * kTile * sizeof(bf16));
            for (int t = greater(token, int(range.begin)); t < lesser(token + 32, int(range.end)); ++t) {
                const int64_t block = (base + t) / args.cache.block_size,
                              offset = base + t - block * args.cache.block_size;
                const bf16* from = block_at<bf16>(args, cache, row, block, head) + offset * cache.token;
                for (int d = 0; d < args.cache.head_dim; ++d)
                    to[(t - token) / 2 * 2 * padded + d * 2 + t % 2] = from[d * cache.dim];
            }
            return;
        }
        const bf16* from = nullptr;
        int64_t left = 0;  // pairs from `from` on in its block
        for (int t = token; t < token + 32; t += 2, to += 2 * padded, --left, from += cache.token) {
            constexpr __mmask32 kEven = 0x55555555;
            const bool even = t >= range.begin && t < range.end, odd = t + 1 >= range.begin && t + 1 < range.end;
            const __mmask32 tokens = (even ? kEven : 0) | (odd ? ~kEven : 0);
            if (tokens && left <= 0) {
                from = value_at<bf16>(args, row, head, base + t);
                left = (args.cache.block_size - (base + t) % args.cache.block_size) / 2;
            }
            for (int d = 0; d < padded; d += 16)
                _mm512_storeu_si512(to + 2 * d, _mm512_maskz_loadu_epi16(
                                                    tokens & first_bits(2 * (args.cache.head_dim - d)), from + 2 * d));
        }
    }

    // Where the operands of a partition lie: keys of 16 tokens each, their tiles key_row bytes from row to row; values
    // of kPieceTokens each.
    struct Partition {
        const char *keys[kPartition / 16], *values[kPartition / kPieceTokens];
        int64_t key_row;
    };

    Partition locate(int row, int head, int64_t base, KeyRange all) const {
        Partition at;
        at.key_row = keys_in_place ? args.cache.key.dim * 2 : 64;
        const int begin = int(all.begin), end = int(all.end);
        for (int s = begin / kPairStep; s * kPairStep < end; ++s) {
            for (int g = 2 * s; g < 2 * s + 2; ++g) {
                if (keys_in_place) {  // what lies outside the range needs a readable place
                    const int64_t token = base + lesser(greater(g, begin / 16), (end - 1) / 16) * 16;
                    at.keys[g] = (const char*)key_at<bf16>(args, row, head, token);
                } else {
                    bf16* to = keys + g * dim_steps * kTile;
                    copy_keys(row, head, base, g * 16, all, to);
                    at.keys[g] = (const char*)to;
                }
            }
            if (keys_in_place && tiles.count <= 2 && !next_keys[0])
                for (int g = 2 * s; g < 2 * s + 2; ++g) fetch(at.keys[g], args.cache.head_dim / 2, at.key_row);
            const int token = s * kPairStep;
            if (values_in_place && token >= begin && token + kPairStep <= end) {
                for (int p = 0; p < kPieces; ++p)
                    at.values[s * kPieces + p] =
                        (const char*)value_at<bf16>(args, row, head, base + token + p * kPieceTokens);
            } else {
                bf16* to = values + s * dim_tiles * kTile;
                copy_values(row, head, base, token, all, to);
                for (int p = 0; p < kPieces; ++p)
                    at.values[s * kPieces + p] = (const char*)(to + p * kPieceTokens * padded);
            }
        }
        return at;
    }

    INLINE static void fetch(const char* from, int lines, int64_t stride) {
        for (int i = 0; i < lines; ++i) fetch_line(from + i * stride);
    }

    // What the first rows fetch with a step of 32 keys, for those that follow and for the next head or partition.
    INLINE void fetch_step(const Partition& at, int64_t step) const {
        for (int p = 0; values_in_place && p < kPieces; ++p)
            fetch(at.values[step * kPieces + p], kPieceTokens / 2 * padded / 16, 64);
        for (int64_t g = 2 * step; g < 2 * step + 2 && next_keys[g]; ++g)
            fetch(next_keys[g], args.cache.head_dim / 2, at.key_row);
    }

    void locate_next(int64_t base, int h) {
        const bool more_heads = h + 1 < task.heads;
        const int row = args.order[task.first].row, head = task.head + (more_heads ? h + 1 : 0);
        const int64_t from = more_heads ? base : base + kPartition;
        const int64_t end = lesser<int64_t>(task.part_end * kPartition, args.context_lens[row]);
        for (int g = 0; g < kPartition / 16; ++g) {
            const int64_t token = from + g * 16;
            next_keys[g] = keys_in_place && token < end ? (const char*)key_at<bf16>(args, row, head, token) : nullptr;
        }
    }

    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) {
        const Partition at = locate(args.order[task.first].row, task.head + h, base, all);
        if (kFetchFirst) locate_next(base, h);
        for (int64_t tile = 0; tile < tiles.count; tile += 2) {
            fetching = kFetchFirst && tile == 0;
            const bf16* q = queries + h * query_size() + tile * dim_steps * kTile;
            if (tile + 1 < tiles.count) rows_of<2>(q, tile, at, ranges, emit);
            else rows_of<1>(q, tile, at, ranges, emit);
        }
    }

    // What M tiles' rows, as they are packed, see of a partition, and what all of them see.
    struct Rows {
        KeyRange own[2 * kHeight] = {};
        int64_t begin = 0, end = kPartition;
    };

    template <int M> Rows rows_from(int64_t tile, const KeyRange* ranges) const {
        Rows rows;
        for (int m = 0; m < M; ++m)
            for (int r = 0; r < tiles.height(tile + m); ++r) {
                const KeyRange& own = rows.own[m * height + r] = ranges[(int(tiles.begin(tile + m)) + r) / group];
                rows.begin = greater(rows.begin, own.begin);
                rows.end = lesser(rows.end, own.end);
            }
        return rows;
    }

    // use(key, scores [M * height][32]) for 32 keys from `key` on, over span; the next scores are computed before.
    template <int M, class Use> INLINE void for_scores(const bf16* q, const Partition& at, KeyRange span,
                                                       Use&& use) const {
        const TileOperand query{(const char*)q, 64, kTile * 2, dim_steps * kTile * 2};
        const auto product = [&](int64_t key) __attribute__((always_inline)) {
            const char *first = at.keys[key / 16], *second = at.keys[key / 16 + 1];
            const auto keys_at = [&](int s, int n, int piece) {
                return (n ? second : first) + (s * 16 + piece * kPieceTokens / 2) * at.key_row;
            };
            float* to = scores + key / 32 % 2 * kStepScores;
            TileProducts::multiply<M, 2>(query, keys_at, at.key_row, dim_steps, to, 32, height);
            return to;
        };
        float* next = product(span.begin);
        for (int64_t key = span.begin; key < span.end; key += 32) {
            float* step = next;
            if (fetching) fetch_step(at, key / 32);
            if (key + 32 < span.end) next = product(key + 32);
            if (args.soft_cap != 0.0f) cap_scores(step, M * height * 32, args.scale, args.soft_cap);
            use(key, step);
        }
    }

    // Sums of the weights; false if some are not sound.
    template <int M> bool sum_up(const Rows& rows, KeyRange span, float* sums) const {
        bool sound = true;
        for (int r = 0; r < M * height; ++r) {
            F lanes = zero();
            for (int64_t key = 0; key < span.end - span.begin; key += 32)
                lanes = add_weights(lanes, _mm512_loadu_si512(weights + key * M * height + r * 32));
            sums[r] = sum(lanes);
            sound &= is_sound(rows.own[r], sums[r]);
        }
        return sound;
    }

    // Weights [steps of span][M * height][32], relative to each row's first score, which becomes its reference, or to
    // what is given as that; and their sums, as sum_up.
    template <int M>
    bool weigh(const bf16* q, const Partition& at, const Rows& rows, KeyRange span, float* references, float* sums,
               bool given) const {
        const Weigher weigher(natural_scale(args));
        float shifts[2 * kHeight];
        for (int r = 0; r < M * height; ++r) shifts[r] = given ? weigher.shift(references[r]) : 0.0f;
        for_scores<M>(q, at, span, [&](int64_t key, const float* step) __attribute__((always_inline)) {
            for (int r = 0; r < M * height && !given && key <= rows.begin; ++r) {
                const int64_t first = rows.own[r].begin - key;
                if (first < 0 || first >= 32) continue;
                references[r] = step[r * 32 + first];
                shifts[r] = weigher.shift(references[r]);
            }
            bf16* to = weights + (key - span.begin) * M * height;
            const auto weigh_rows = [&](auto&& keys) __attribute__((always_inline)) {
                for (int r = 0; r < M * height; ++r)
                    _mm512_storeu_si512(to + r * 32, weigher(step + r * 32, broadcast(shifts[r]), keys(r)));
            };
            if (key >= rows.begin && key + 32 <= rows.end) weigh_rows([](int) { return ~__mmask32(0); });
            else weigh_rows([&](int r) { return keys_in(rows.own[r], key); });
        });
        return sum_up<M>(rows, span, sums);
    }

    // The rows whose weights are not sound take their greatest score for reference.
    template <int M>
    void weigh_again(const bf16* q, const Partition& at, const Rows& rows, KeyRange span, float* references,
                     float* sums) const {
        F tops[2 * kHeight];
        for (F& top : tops) top = broadcast(-kInf);
        for_scores<M>(q, at, span, [&](int64_t key, const float* step) {
            for (int r = 0; r < M * height; ++r) tops[r] = greatest(tops[r], step + r * 32, keys_in(rows.own[r], key));
        });
        for (int r = 0; r < M * height; ++r)
            if (!is_sound(rows.own[r], sums[r])) references[r] = greatest_lane(tops[r]);
        weigh<M>(q, at, rows, span, references, sums, true);
    }

    // M tiles of rows from `tile` on.
    template <int M, class Emit>
    void rows_of(const bf16* q, int64_t tile, const Partition& at, const KeyRange* ranges, Emit&& emit) const {
        const Rows rows = rows_from<M>(tile, ranges);
        const KeyRange all = span_of(rows.own, M * height), span{all.begin / 32 * 32, (all.end + 31) / 32 * 32};
        float references[2 * kHeight] = {}, sums[2 * kHeight] = {};
        if (all.begin < all.end && !weigh<M>(q, at, rows, span, references, sums, false))
            weigh_again<M>(q, at, rows, span, references, sums);
        Softmax result[2 * kHeight];
        for (int r = 0; r < M * height; ++r)
            result[r] = softmax_of(rows.own[r], references[r] * natural_scale(args), sums[r]);
        const TileOperand left{(const char*)weights, 64, M * height * 64, height * 64};
        for (int n = 0; n < dim_tiles; n += 2) {
            const auto values_at = [&](int s, int tile, int piece) {
                return at.values[(span.begin / 32 + s) * kPieces + piece] + (n + tile) * 64;
            };
            const int steps = int(span.end - span.begin) / 32;
            if (n + 1 < dim_tiles)
                TileProducts::multiply<M, 2>(left, values_at, padded * 4, steps, part + n * 16, padded, height);
            else TileProducts::multiply<M, 1>(left, values_at, padded * 4, steps, part + n * 16, padded, height);
        }
        for (int m = 0; m < M; ++m)
            emit(int(tiles.begin(tile + m)), tiles.height(tile + m), result + m * height, part + m * height * padded);
    }
};

}}  // namespace pagemill
#endif
