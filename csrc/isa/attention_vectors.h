// Keys and values of a partition as they lie in the cache, keys by vectors; and the keys that are fetched meanwhile.
#pragma once

#include <type_traits>

#include "attention_plan.h"
#include "attention_tiles.h"
#include "narrow_kv.h"
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

// Scales of a partition's int8 keys or values, by token; zero outside the range.
INLINE void load_scales(const AttentionArgs& args, const CacheView& cache, int row, int head, int64_t base, int begin,
                        int end, float* to) {
    std::memset(to, 0, kPartition * sizeof(float));
    for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
        const float* from = (const float*)cache.scales + frame_of(args, row, block) * cache.scale_frame +
                            head * cache.scale_head + offset;
        std::memcpy(to + token, from, count * sizeof(float));
    });
}

// The pass over a partition on plain vectors, in fp32 whatever the dtype of the cache; each sum is one chain of
// multiply-adds.
template <class K, class V> struct VectorPass {
    static constexpr int kRows = kTaskRows;
    static int most_rows(const AttentionArgs&) { return kRows; }

    const AttentionArgs& args;
    const AttentionTask &task, *next;  // the one that the thread is likely to take then, or null
    int group, padded;
    Tiles tiles;
    int64_t query_size;  // of one KV head
    bool widen;
    // Scores, weighted values, and what is widened: of keys and values, and of their remainders.
    struct Buffers { float *scores, *part, *keys, *values; };
    float* queries = nullptr;
    Buffers own, precise;

    VectorPass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int padded)
        : args(args), task(task), next(next), group(args.heads / args.cache.kv_heads), padded(padded),
          tiles(task.tokens * group, kTileRows), query_size(int64_t(task.tokens) * group * args.cache.head_dim) {
        // Whether key vectors, and values, can be read where they lie.
        constexpr int side = kSideBySide<K>;
        const CacheView &key = args.cache.key, &value = args.cache.value;
        const bool direct_keys = key.beside == side && key.token == side && args.cache.block_size % W == 0;
        const bool direct_values = value.beside == side && value.dim == side && args.cache.head_dim % W == 0;
        widen = !std::is_same_v<K, V> || std::is_same_v<K, u4> || !direct_keys || !direct_values ||
                (sizeof(K) < 4 && tiles.count > 2);
    }

    int64_t scratch_size() const { return task.heads * query_size + (has_remainders() ? 2 : 1) * buffers_size(); }
    int64_t buffers_size() const {
        return kTileRows * (kScoreRow + padded) +
               (widen ? kPartition * int64_t(args.cache.head_dim + padded) + 8 * W : 0);
    }
    bool has_remainders() const { return std::is_same_v<K, u4> && args.remainders.tables; }

    void begin(float* memory) {
        queries = memory;
        const auto buffers = [&](float* at) {
            float *part = at + kTileRows * kScoreRow, *keys = part + kTileRows * padded;
            return Buffers{at, part, keys, keys + kPartition * args.cache.head_dim + 8 * W};
        };
        own = buffers(queries + task.heads * query_size);
        if (has_remainders()) precise = buffers(own.scores + buffers_size());
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
                    if constexpr (std::is_same_v<K, u4>) {
                        float wide[kMostNarrowDims];
                        widen_query(q, args, wide);
                        for (int d = 0; d < args.cache.head_dim; ++d) to[d * height + r] = wide[d];
                        continue;
                    }
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
        float key_scales[kPartition], value_scales[kPartition];
        TokenScales scales;
        if constexpr (std::is_same_v<K, int8_t>) {
            load_scales(args, args.cache.key, row, head, base, int(all.begin), int(all.end), key_scales);
            scales.key = key_scales;
        }
        if constexpr (std::is_same_v<V, int8_t>) {
            load_scales(args, args.cache.value, row, head, base, int(all.begin), int(all.end), value_scales);
            scales.value = value_scales;
        }
        if (widen) {
            const float* keys[kPartition / W + 4];
            const auto values = widen_partition(row, head, base, all, own, keys, false);
            if constexpr (std::is_same_v<K, u4>) {
                KeyRange precise_ranges[kTaskTokens];
                const KeyRange precise_all = precise_keys(args, task, base, precise_ranges);
                if (precise_all.begin < precise_all.end) {
                    const float* more[kPartition / W + 4];
                    const AddedKeys added{precise_ranges, more,
                                          widen_partition(row, head, base, precise_all, precise, more, true)};
                    tile_rows<float>(q, ranges, keys, nullptr, kPartition, values, scales, emit, &added);
                    return;
                }
            }
            tile_rows<float>(q, ranges, keys, nullptr, kPartition, values, scales, emit);
        } else if constexpr (std::is_same_v<K, V> && !std::is_same_v<K, u4>) {
            const InPlace<K> at(args, row, head, base, int(all.begin), int(all.end), vectors_beside(tiles.height(0)),
                                NextKeys(args, task, next, base, int(all.begin), h));
            tile_rows<K>(q, ranges, at.keys, at.ahead, args.cache.key.dim, at.values, scales, emit);
        }
    }

    // Remainders, widened, and the keys that each of the task's tokens adds them to.
    struct AddedKeys {
        const KeyRange* ranges;
        const float* const* keys;
        Values<float> values;
    };

    template <class E, class Emit>
    void tile_rows(const float* q, const KeyRange* ranges, const E* const* keys, const E* const* ahead, int64_t key_dim,
                   const Values<E>& values, const TokenScales& scales, Emit&& emit,
                   const AddedKeys* added = nullptr) const {
        for (int64_t tile = 0; tile < tiles.count; ++tile, ahead = nullptr) {
            const int height = tiles.height(tile), first_row = int(tiles.begin(tile)), token = first_row / group,
                      tokens = (first_row + height - 1) / group - token + 1;
            const KeyRange span = span_of(ranges + token, tokens),
                           more = added ? span_of(added->ranges + token, tokens) : KeyRange{0, 0};
            const int from = int(span.begin), until = int(span.end);
            const TileKernels<E>& run = tile_kernels<E>(height, Upto<kTileRows>{});
            Softmax result[kTileRows];
            for (int v = from / W; v * W < until; v += run.vectors)
                run.score(q + first_row * args.cache.head_dim, keys + v, ahead ? ahead + v : nullptr, key_dim,
                          args.cache.head_dim, own.scores + v * W);
            if constexpr (std::is_same_v<E, float>)
                for (int v = int(more.begin) / W; v * W < more.end; v += run.vectors)
                    run.score(q + first_row * args.cache.head_dim, added->keys + v, nullptr, key_dim,
                              args.cache.head_dim, precise.scores + v * W);
            for (int r = 0; r < height; ++r) {
                const KeyRange& seen = ranges[(first_row + r) / group];
                float* row = own.scores + r * kScoreRow;
                if (added) add_scores(row, precise.scores + r * kScoreRow, added->ranges[(first_row + r) / group]);
                result[r] = softmax(row, int(seen.begin), int(seen.end), from, until, args.soft_cap, scales);
            }
            if (from < until) run.value(own.scores, values, ahead != nullptr, padded, from, until, own.part);
            if constexpr (std::is_same_v<E, float>)
                if (more.begin < more.end) add_remainders(run, *added, first_row, height, more);
            emit(first_row, height, result, own.part);
        }
    }

    // Adds what the remainders of values [span) bring to the weighted values of a tile.
    void add_remainders(const TileKernels<float>& run, const AddedKeys& added, int first_row, int height,
                        const KeyRange& span) const {
        for (int r = 0; r < height; ++r) {
            const KeyRange& keys = added.ranges[(first_row + r) / group];
            float* to = precise.scores + r * kScoreRow;
            const float* from = own.scores + r * kScoreRow;
            for (int64_t i = span.begin; i < span.end; ++i) to[i] = i >= keys.begin && i < keys.end ? from[i] : 0.0f;
        }
        run.value(precise.scores, added.values, false, padded, int(span.begin), int(span.end), precise.part);
        for (int r = 0; r < height; ++r) {
            const KeyRange& keys = added.ranges[(first_row + r) / group];
            if (keys.begin >= keys.end) continue;
            float* to = own.part + r * padded;
            for (int d = 0; d < padded; d += W) store(to + d, load(to + d) + load(precise.part + r * padded + d));
        }
    }

    // Widens keys and values of a partition, or their remainders; `vectors` are where the keys' lie then.
    Values<float> widen_partition(int row, int head, int64_t base, const KeyRange& all, const Buffers& to,
                                  const float** vectors, bool remainders) const {
        const int begin = int(all.begin), end = int(all.end), last = (end + W - 1) / W;
        widen_keys(row, head, base, begin, end, to.keys, remainders);
        widen_values(row, head, base, begin, end, to.values, remainders);
        for (int v = begin / W; v < last + 4; ++v) vectors[v] = to.keys + lesser(v, last - 1) * W;
        return {{to.values, to.values}, padded, kPartition};
    }

    // Keys [begin, end) of a partition as fp32 [dim][kPartition], to scratch; int8 without its scales.
    void widen_keys(int row, int head, int64_t base, int begin, int end, float* wide_keys, bool remainders) const {
        const CacheView& cache = args.cache.key;
        for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
            const K* k = block_at<K>(args, cache, row, block, head, remainders) + offset * cache.token;
            if constexpr (std::is_same_v<K, u4>)
                widen_narrow_keys(k, words_at(args, cache, row, block, head, remainders) + offset, count,
                                  wide_keys + token);
            else
                for (int d = 0; d < args.cache.head_dim; ++d)
                    widen_dimension(k + d / cache.beside * cache.dim + d % cache.beside, d, count,
                                    wide_keys + d * kPartition + token);
        });
    }

    // A dimension of neighbouring keys; with the first of those that lie side by side come all.
    void widen_dimension(const K* from, int d, int count, float* to) const {
        constexpr int side = kSideBySide<K>;
        const CacheView& cache = args.cache.key;
        int i = 0;
        if (side > 1 && cache.beside == side && d % side == 0) {
            for (; i + W <= count; i += W) {
                F each[side];
                load_each(from + side * i, each);
                for (int s = 0; s < side; ++s) store(to + s * kPartition + i, each[s]);
            }
        } else if (side > 1 && cache.beside == side) {
            i = count / W * W;
        }
        if (cache.token == 1)
            for (; i + W <= count; i += W) store(to + i, load(from + i));
        for (; i < count; ++i) to[i] = widen_one(from + i * cache.token);
    }

    // Values [begin, end) of a partition as fp32 [kPartition][padded], to scratch; int8 without its scales.
    void widen_values(int row, int head, int64_t base, int begin, int end, float* wide_values, bool remainders) const {
        const CacheView& cache = args.cache.value;
        for_pieces(args, base, begin, end, [&](int64_t block, int offset, int token, int count) {
            const V* v = block_at<V>(args, cache, row, block, head, remainders);
            for (int i = offset; i < offset + count; ++i) {
                const V* from = v + i / cache.beside * cache.token + i % cache.beside;
                float* to = wide_values + (token + i - offset) * padded;
                if constexpr (std::is_same_v<V, u4>)
                    widen_narrow_value(from, i, words_at(args, cache, row, block, head, remainders)[i], to);
                else widen_value(from, i, to);
                for (int d = args.cache.head_dim; d < padded; ++d) to[d] = 0.0f;
            }
        });
    }

    // The `i`th token's value of its block.
    void widen_value(const V* from, int i, float* to) const {
        constexpr int side = kSideBySide<V>;
        const CacheView& cache = args.cache.value;
        int d = 0;
        if (side > 1 && cache.beside == side)
            for (; d + W <= args.cache.head_dim; d += W) {
                F each[side];
                load_each(from - i % side + side * d, each);
                store(to + d, each[i % side]);
            }
        if (cache.dim == 1)
            for (; d + W <= args.cache.head_dim; d += W) store(to + d, load(from + d));
        for (; d < args.cache.head_dim; ++d) to[d] = widen_one(from + d * cache.dim);
    }

    // Keys of 4 bits from `k` and their words on.
    void widen_narrow_keys(const u4* k, const uint32_t* words, int count, float* to) const {
        const CacheView& cache = args.cache.key;
        for (int d = 0; d < args.cache.head_dim; ++d) {
            const int byte = byte_of(d), shift = in_upper_half(d) ? 4 : 0;
            const u4* from = k + byte / cache.beside * cache.dim + byte % cache.beside;
            const uint32_t* of_group = words + d / kKeyGroup * args.cache.block_size;
            int i = 0;
            for (; cache.beside == 4 && i + W <= count; i += W) {
                const Integers word = load_integers(of_group + i);
                const Integers fours = load_integers((const uint32_t*)(from - byte % 4) + i);
                const F n = lowest_bits<4>(fours >> (8 * (byte % 4) + shift));
                store(to + d * kPartition + i, low_in(word) + n * scale_in(word));
            }
            for (; i < count; ++i)
                to[d * kPartition + i] = float_of(of_group[i] << 16) + float(from[i * cache.token].bits >> shift & 15) *
                                                                           float_of(of_group[i] & 0xffff0000u);
        }
    }

    // A value of 4 bits, the `i`th token of its block.
    void widen_narrow_value(const u4* from, int i, uint32_t word, float* to) const {
        const CacheView& cache = args.cache.value;
        const float low = float_of(word << 16), scale = float_of(word & 0xffff0000u);
        for (int d = 0; d < args.cache.head_dim; d += W) {
            const int byte = byte_of(d), shift = in_upper_half(d) ? 4 : 0;
            if (cache.beside == 4) {
                const Integers fours = load_integers((const uint32_t*)(from - i % 4) + byte);
                store(to + d, broadcast(low) + lowest_bits<4>(fours >> (8 * (i % 4) + shift)) * broadcast(scale));
            } else {
                for (int lane = 0; lane < W; ++lane)
                    to[d + lane] = low + float(from[(byte + lane) * cache.dim].bits >> shift & 15) * scale;
            }
        }
    }
};

}}  // namespace pagemill
