// Keys and values of a partition as they lie in the cache, keys by vectors; and the keys that are fetched meanwhile.
#pragma once

#include "attention_plan.h"
#include "attention_tiles.h"
#include "simd.h"

namespace pagemill { namespace {

template <class T> struct InPlace {
    const T *keys[kPartition / W + 4], *ahead[kPartition / W + 4];
    Values<T> values;

    // Keys [begin, end); `beside` vectors run side by side, `next` is read afterwards.
    InPlace(const AttentionArgs& args, int row, int head, int64_t base, int begin, int end, int beside,
            const NextKeys& next) {
        const int first = begin / W, last = (end + W - 1) / W;
        for (int v = first; v < last + 4; ++v)  // beyond the range: any readable place
            keys[v] = key_at<T>(args, row, head, base + lesser(v, last - 1) * W);
        values.stride = args.cache.value.token;
        values.tokens = lesser(args.cache.block_size, kPartition);
        const int first_block = begin / values.tokens, blocks = (end + values.tokens - 1) / values.tokens;
        for (int b = first_block; b < blocks; ++b)
            values.block[b] = block_at<T>(args, args.cache.value, row, base / values.tokens + b, head);
        for (int b = 0; b < kBlocksAhead; ++b) values.block[blocks + b] = key_at<T>(args, next.row, next.head, next[b]);
        for (int v = first; v < last + 4; ++v)
            ahead[v] = v + beside < last ? keys[v + beside]
                                         : values.block[lesser(first_block + v + beside - last, blocks - 1)];
    }
};

// The pass over a partition on plain vectors, in fp32 whatever the dtype of the cache; each sum is one chain of
// multiply-adds.
template <class T> struct VectorPass {
    static constexpr int kRows = kTaskRows, kSide = kSideBySide<T>;
    static int most_rows(const AttentionArgs&) { return kRows; }

    const AttentionArgs& args;
    const AttentionTask &task, *next;  // the one that the thread is likely to take then, or null
    int group, padded;
    Tiles tiles;
    int64_t query_size;  // of one KV head
    bool widen;
    float *queries = nullptr, *scores, *part, *wide_keys, *wide_values;

    VectorPass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int padded)
        : args(args), task(task), next(next), group(args.heads / args.cache.kv_heads), padded(padded),
          tiles(task.tokens * group, kTileRows), query_size(int64_t(task.tokens) * group * args.cache.head_dim) {
        // Whether key vectors, and values, can be read where they lie.
        const bool direct_keys =
            args.cache.key.pairs == (kSide == 2) && args.cache.key.token == kSide && args.cache.block_size % W == 0;
        const bool direct_values =
            args.cache.value.pairs == (kSide == 2) && args.cache.value.dim == kSide && args.cache.head_dim % W == 0;
        widen = !direct_keys || !direct_values || (sizeof(T) < 4 && tiles.count > 2);
    }

    int64_t scratch_size() const {
        return task.heads * query_size + kTileRows * (kScoreRow + padded) +
               (widen ? kPartition * int64_t(args.cache.head_dim + padded) + 8 * W : 0);
    }

    void begin(float* memory) {
        queries = memory;
        scores = queries + task.heads * query_size;
        part = scores + kTileRows * kScoreRow;
        wide_keys = part + kTileRows * padded;
        wide_values = wide_keys + kPartition * args.cache.head_dim + 8 * W;
        for (int h = 0; h < task.heads; ++h) pack_query(task.head + h, queries + h * query_size);
    }

    void pack_query(int head, float* out) const {
        with_type(args.type, [&]<class Q>(Q*) {
            for (int64_t tile = 0; tile < tiles.count; ++tile) {
                const int height = tiles.height(tile);
                float* to = out + tiles.begin(tile) * args.cache.head_dim;
                for (int r = 0; r < height; ++r) {
                    const int64_t i = tiles.begin(tile) + r;
                    const Q* q = query_at<Q>(args, task, group, head, i);
                    for (int d = 0; d < args.cache.head_dim; ++d) to[d * height + r] = widen_one(q + d) * args.scale;
                }
            }
        });
    }

    // One KV head (the task's `h`th) of the partition that begins at `base`: emit(first row, rows, softmax, values) for
    // each tile of rows. `ranges`: keys that the task's tokens see, within the partition; `all` spans them and is not
    // empty.
    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) const {
        const float* q = queries + h * query_size;
        const int row = args.order[task.first].row, head = task.head + h;
        TokenScales token_scales;
        const TokenScales* scales = nullptr;
        if constexpr (sizeof(T) == 1) {
            load_scales(row, head, base, int(all.begin), int(all.end), token_scales);
            scales = &token_scales;
        }
        if (widen) {
            const float* keys[kPartition / W + 4];
            widen_keys(row, head, base, int(all.begin), int(all.end));
            widen_values(row, head, base, int(all.begin), int(all.end));
            const int last = (int(all.end) + W - 1) / W;
            for (int v = int(all.begin) / W; v < last + 4; ++v) keys[v] = wide_keys + lesser(v, last - 1) * W;
            tile_rows<float>(q, ranges, keys, nullptr, kPartition, {{wide_values, wide_values}, padded, kPartition},
                             scales, emit);
        } else {
            const InPlace<T> at(args, row, head, base, int(all.begin), int(all.end), vectors_beside(tiles.height(0)),
                                NextKeys(args, task, next, base, int(all.begin), h));
            tile_rows<T>(q, ranges, at.keys, at.ahead, args.cache.key.dim, at.values, scales, emit);
        }
    }

    template <class E, class Emit>
    void tile_rows(const float* q, const KeyRange* ranges, const E* const* keys, const E* const* ahead, int64_t key_dim,
                   const Values<E>& values, const TokenScales* scales, Emit&& emit) const {
        for (int64_t tile = 0; tile < tiles.count; ++tile, ahead = nullptr) {
            const int height = tiles.height(tile), first_row = int(tiles.begin(tile));
            const KeyRange span =
                span_of(ranges + first_row / group, (first_row + height - 1) / group - first_row / group + 1);
            const int from = int(span.begin), until = int(span.end);
            const TileKernels<E>& run = tile_kernels<E>(height, Upto<kTileRows>{});
            Softmax result[kTileRows];
            for (int v = from / W; v * W < until; v += run.vectors)
                run.score(q + first_row * args.cache.head_dim, keys + v, ahead ? ahead + v : nullptr, key_dim,
                          args.cache.head_dim, scores + v * W);
            for (int r = 0; r < height; ++r) {
                const KeyRange& own = ranges[(first_row + r) / group];
                result[r] =
                    softmax(scores + r * kScoreRow, int(own.begin), int(own.end), from, until, args.soft_cap, scales);
            }
            if (from < until) run.value(scores, values, ahead != nullptr, padded, from, until, part);
            emit(first_row, height, result, part);
        }
    }

    // Keys [begin, end) of a partition as fp32 [dim][kPartition], to scratch.
    void widen_keys(int row, int head, int64_t base, int begin, int end) const {
        const CacheView& cache = args.cache.key;
        for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
            const T* k = block_at<T>(args, cache, row, block, head) + offset * cache.token;
            for (int d = 0; d < args.cache.head_dim; ++d) {
                const T* from = cache.pairs ? k + d / 2 * cache.dim + d % 2 : k + d * cache.dim;
                float* to = wide_keys + d * kPartition + token;
                int i = 0;
                if constexpr (kSide == 2) {
                    if (cache.pairs && d % 2 == 0) {
                        for (; i + W <= count; i += W) {
                            F even, odd;
                            load_pairs(from + 2 * i, even, odd);
                            store(to + i, even);
                            store(to + kPartition + i, odd);
                        }
                    } else if (cache.pairs) {
                        i = count / W * W;
                    }
                }
                if (cache.token == 1)
                    for (; i + W <= count; i += W) store(to + i, load(from + i));
                for (; i < count; ++i) to[i] = widen_one(from + i * cache.token);
            }
        });
    }

    // Values [begin, end) of a partition as fp32 [kPartition][padded], to scratch.
    void widen_values(int row, int head, int64_t base, int begin, int end) const {
        const CacheView& cache = args.cache.value;
        for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
            const T* v = block_at<T>(args, cache, row, block, head);
            for (int i = offset; i < offset + count; ++i) {
                const T* from = cache.pairs ? v + i / 2 * cache.token + i % 2 : v + i * cache.token;
                float* to = wide_values + (token + i - offset) * padded;
                int d = 0;
                if constexpr (kSide == 2) {
                    for (; cache.pairs && d + W <= args.cache.head_dim; d += W) {
                        F each[2];
                        load_pairs(from - i % 2 + 2 * d, each[0], each[1]);
                        store(to + d, each[i % 2]);
                    }
                }
                if (cache.dim == 1)
                    for (; d + W <= args.cache.head_dim; d += W) store(to + d, load(from + d));
                for (; d < args.cache.head_dim; ++d) to[d] = widen_one(from + d * cache.dim);
                for (; d < padded; ++d) to[d] = 0.0f;
            }
        });
    }

    void load_scales(int row, int head, int64_t base, int begin, int end, TokenScales& to) const {
        std::memset(&to, 0, sizeof to);
        for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
            const int64_t frame = frame_of(args, row, block);
            const CacheView &k = args.cache.key, &v = args.cache.value;
            std::memcpy(to.key + token, k.scale + frame * k.scale_frame + head * k.scale_head + offset,
                        count * sizeof(float));
            std::memcpy(to.value + token, v.scale + frame * v.scale_frame + head * v.scale_head + offset,
                        count * sizeof(float));
        });
    }
};

}}  // namespace pagemill
