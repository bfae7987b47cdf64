// A step of attention cut into tasks of about equal work.
#pragma once

#include "../threads.h"
#include "linear_tiles.h"
#include "narrow_kv.h"
#include "simd.h"

namespace pagemill { namespace {

// Query tokens, as the step orders them, of one row, or of rows over their shared prefix; some KV heads, some
// partitions. With `partial` >= 0 each partition's state goes to that place of a buffer and is folded afterwards; else
// the task folds. A token's own partitions continue from the state that its shared ones have left.
struct AttentionTask {
    int first, tokens, head, heads;
    bool shared;
    int64_t part_begin, part_end, partial;
};

constexpr int kTaskRows = 96;       // (token, head) rows over one KV head that share one pass over a partition
constexpr int kTileTaskRows = 192;  // likewise on tiles, where a pass copies keys and values first
constexpr int kFewTaskRows = 24;    // so many may be split by partitions, more are by head
constexpr int kTaskTokens = kTileTaskRows;

// What all of `count` ranges lie in; empty ones do not count.
INLINE KeyRange span_of(const KeyRange* ranges, int count) {
    KeyRange all{0, 0};
    for (int i = 0; i < count; ++i) {
        const KeyRange& r = ranges[i];
        if (r.begin < r.end)
            all = all.begin >= all.end ? r : KeyRange{lesser(all.begin, r.begin), greater(all.end, r.end)};
    }
    return all;
}

// The frame of a row's block, or of its remainders.
INLINE int64_t frame_of(const AttentionArgs& args, int row, int64_t block, bool remainders = false) {
    if (remainders) return args.remainders.tables[row * args.remainders.table_stride + block];
    const int64_t entry = row * args.table_stride + block;
    return args.tables ? args.tables[entry] : entry;
}

// Where a row's block lies for one head of keys or values.
template <class T> INLINE const T* block_at(const AttentionArgs& args, const CacheView& cache, int row, int64_t block,
                                            int head, bool remainders = false) {
    return (const T*)cache.data + frame_of(args, row, block, remainders) * cache.frame + head * cache.head;
}

// Scales and lows of a block's 4-bit keys or values of one head.
INLINE const uint32_t* words_at(const AttentionArgs& args, const CacheView& cache, int row, int64_t block, int head,
                                bool remainders) {
    return (const uint32_t*)cache.scales + frame_of(args, row, block, remainders) * cache.scale_frame +
           head * cache.scale_head;
}

// Keys of the partition at `base` to which a task's tokens add remainders, for each token, and what all lie in.
INLINE KeyRange precise_keys(const AttentionArgs& args, const AttentionTask& task, int64_t base, KeyRange* ranges) {
    if (!args.remainders.tables) return {0, 0};
    for (int t = 0; t < task.tokens; ++t) {
        const QueryToken& query = args.order[task.first + t];
        const KeyRange r = precise_range(args, query.row, query.token);
        ranges[t] = {greater<int64_t>(r.begin - base, 0), lesser<int64_t>(r.end - base, kPartition)};
    }
    return span_of(ranges, task.tokens);
}

// A query of one head, rotated and scaled as 4-bit keys take it.
template <class Q> INLINE void widen_query(const Q* q, const AttentionArgs& args, float* to) {
    const int dims = args.cache.head_dim;
    for (int d = 0; d < dims; d += W) store(to + d, load(q + d));
    rotate_head(to, dims);
    const F scale = broadcast(args.scale / float(rotated_together(dims)));
    for (int d = 0; d < dims; d += W) store(to + d, load(to + d) * scale);
}

// What a task reads after a head of a partition: the keys of `row` and `head` from `token` on, up to `last`.
struct NextKeys {
    int row, head;
    int64_t token, last;

    // After the `h`th head's keys from `begin` on of the partition at `base`: the next head's, the next partition's, or
    // those of the next task, if any.
    NextKeys(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int64_t base, int begin,
             int h) {
        const bool more_heads = h + 1 < task.heads,
                   more = more_heads || base + kPartition < task.part_end * kPartition || !next;
        const AttentionTask& of = more ? task : *next;
        row = args.order[of.first].row;
        head = of.head + (more_heads ? h + 1 : 0);
        token = more_heads ? base + begin / W * W : more ? base + kPartition : of.part_begin * kPartition;
        last = greater<int64_t>(lesser<int64_t>(of.part_end * kPartition, args.context_lens[row]) - 1, 0);
    }
    // The `i`th vector.
    int64_t operator[](int i) const { return lesser(token + i * W, last / W * W); }
};

// How many elements lie side by side in what is read in place: bf16 is read in pairs, int8 in fours, others one by one.
template <class T> constexpr int kSideBySide = 1;
template <> constexpr int kSideBySide<bf16> = 2;
template <> constexpr int kSideBySide<int8_t> = 4;

// Where a row's keys lie from token `token` on, and its values.
template <class T> INLINE const T* key_at(const AttentionArgs& args, int row, int head, int64_t token) {
    const int size = args.cache.block_size;
    return block_at<T>(args, args.cache.key, row, token / size, head) + token % size * args.cache.key.token;
}
template <class T> INLINE const T* value_at(const AttentionArgs& args, int row, int head, int64_t token) {
    const int size = args.cache.block_size;
    return block_at<T>(args, args.cache.value, row, token / size, head) +
           token % size / kSideBySide<T> * args.cache.value.token;
}

// body(block, offset in it, first token, tokens) for the pieces of blocks that hold keys [begin, end) of the partition
// at `base`.
template <class Body> INLINE void for_pieces(const AttentionArgs& args, int64_t base, int begin, int end, Body&& body) {
    const int size = args.cache.block_size;
    for (int token = begin; token < end;) {
        const int64_t block = (base + token) / size;
        const int offset = int(base + token - block * size), count = lesser(size - offset, end - token);
        body(block, offset, token, count);
        token += count;
    }
}

// A task's query of the `i`th row over one KV head.
template <class Q> INLINE const Q* query_at(const AttentionArgs& args, const AttentionTask& task, int group, int head,
                                            int64_t i) {
    return (const Q*)args.query.data + args.order[task.first + i / group].token * args.query.token +
           (head * group + i % group) * args.query.head;
}

// A step's tasks; those of shared prefixes come first, and the others wait for them. Without memory it only counts.
struct AttentionPlan {
    AttentionTask *tasks, *merges;
    int64_t num_tasks = 0, num_merges = 0, partials = 0;
    int64_t shared_tasks = 0, shared_merges = 0;

    void add(const AttentionTask& task) {
        if (tasks) tasks[num_tasks] = task;
        ++num_tasks;
    }
    void add_merge(const AttentionTask& task) {
        if (merges) merges[num_merges] = task;
        ++num_merges;
    }
};

// Keys [begin, end) for a task's tokens. Many query rows over one KV head are split by head, few over a long context by
// partitions.
void plan_keys(const AttentionArgs& args, AttentionPlan& plan, AttentionTask task, KeyRange keys, int64_t target) {
    const int kv_heads = args.cache.kv_heads, rows = task.tokens * (args.heads / kv_heads);
    const int64_t first = keys.begin / kPartition, last = (keys.end + kPartition - 1) / kPartition,
                  count = last - first;
    const int64_t head_work = (keys.end - keys.begin) * rows, work = head_work * kv_heads;
    task.part_begin = first;
    task.part_end = last;
    task.heads = kv_heads;
    task.partial = -1;
    if (work <= target) {
        plan.add(task);
    } else if (rows > kFewTaskRows || count == 1 || head_work <= target) {
        task.heads = 1;
        for (task.head = 0; task.head < kv_heads; ++task.head) plan.add(task);
    } else {
        const int64_t pieces = lesser(count, (work + target - 1) / target), start = plan.partials;
        task.partial = start;
        plan.add_merge(task);
        plan.partials += count * kv_heads * rows;
        for (int64_t i = 0; i < pieces; ++i) {
            task.part_begin = first + count * i / pieces;
            task.part_end = first + count * (i + 1) / pieces;
            task.partial = start + (task.part_begin - first) * kv_heads * rows;
            plan.add(task);
        }
    }
}

// What a task's tokens, all of one row, have to attend by themselves.
KeyRange own_keys(const AttentionArgs& args, int first, int tokens) {
    KeyRange ranges[kTaskTokens];
    for (int i = 0; i < tokens; ++i) {
        const QueryToken& query = args.order[first + i];
        ranges[i] = key_range(args, query.row, query.token);
        ranges[i].begin = greater<int64_t>(ranges[i].begin, int64_t(query.shared) * kPartition);
    }
    return span_of(ranges, tokens);
}

// A shared prefix's tokens, cut as few times as `most` tokens in a piece allow, or some more if the threads are then
// done sooner. A piece takes the time of its rows and of kPackedRows more, for what it copies.
Tiles cut_shared(int tokens, int most, int group, int kv_heads) {
    constexpr int64_t kPackedRows = 12;
    Tiles cut(tokens, most);
    const int64_t threads = num_threads(), last = lesser<int64_t>(tokens, 2 * cut.count + 1);
    int64_t least = INT64_MAX;
    for (int64_t pieces = cut.count; pieces <= last; ++pieces) {
        const int64_t rounds = (pieces * kv_heads + threads - 1) / threads,
                      rows = (tokens + pieces - 1) / pieces * group;
        if (rounds * (rows + kPackedRows) < least) least = rounds * (rows + kPackedRows), cut.count = pieces;
    }
    return cut;
}

// A task has up to `task_rows` (token, head) rows of one row's tokens.
AttentionPlan plan_attention(const AttentionArgs& args, AttentionTask* tasks, AttentionTask* merges, int task_rows,
                             int64_t target) {
    AttentionPlan plan{tasks, merges};
    const int group = args.heads / args.cache.kv_heads, per_task = greater(1, task_rows / group);
    for (int i = 0; i < args.num_prefixes; ++i) {
        const SharedPrefix& prefix = args.prefixes[i];
        const int64_t keys = int64_t(prefix.partitions) * kPartition;
        const Tiles cut = cut_shared(prefix.tokens, per_task, group, args.cache.kv_heads);
        for (int64_t i = 0; i < cut.count; ++i)
            plan_keys(args, plan, {prefix.first + int(cut.begin(i)), cut.height(i), 0, 0, true, 0, 0, -1}, {0, keys},
                      target);
    }
    plan.shared_tasks = plan.num_tasks;
    plan.shared_merges = plan.num_merges;
    // Later queries see more keys: they come first, so that the last task to end is a short one.
    for (int end = args.query_start[args.rows]; end > 0;) {
        const QueryToken& last = args.order[end - 1];
        const int in_row = last.token - args.query_start[last.row] + 1, tokens = lesser(per_task, in_row);
        const int first = end - tokens;
        plan_keys(args, plan, {first, tokens, 0, 0, false, 0, 0, -1}, own_keys(args, first, tokens), target);
        end = first;
    }
    return plan;
}

}}  // namespace pagemill
