// Paged attention for any mixture of prefill, chunks and decode.
//
// Keys are cut into partitions of 256 at fixed absolute positions. A query's scores, maximum, sum and weighted values
// are computed partition by partition, each relative to the partition's own maximum, and folded in ascending order.
// What a tile, a task or a call covers therefore changes no bit: masked keys contribute an exact zero, and each sum is
// one chain in key order. Only of values that are not finite a later token's may reach the queries that run beside its
// own: their request fails then, and what was computed for it is not kept. The queries of all heads that share a KV
// head, and of all rows that share a prefix, are computed together, so K and V are read once. A pass
// (attention_vectors.h, attention_tiled.h) computes a partition. `Few` takes the tasks of few rows, `Many` the others,
// with the same bits where they are two.
#pragma once

#include "../threads.h"
#include "attention_bytes.h"
#include "attention_float8.h"
#include "attention_pairs.h"
#include "attention_plan.h"
#include "attention_tiled.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "below.h"
#include "simd.h"

namespace pagemill { namespace {

template <class Few, class Many> struct Attention {
    const AttentionArgs& args;
    const AttentionTask *tasks, *end;
    float *partials,
        *prefixes;  // states of partitions, and of query tokens (as ordered) and heads after their shared ones
    int group, padded;           // query heads per KV head; head_dim rounded up to whole vectors

    int64_t state_size() const { return padded + W; }
    void empty(float* state) const {
        for (int d = 0; d < padded; d += W) store(state + d, zero());
        state[padded] = -kInf;
        state[padded + 1] = 0.0f;
    }
    const QueryToken& query(const AttentionTask& task, int row) const { return args.order[task.first + row / group]; }
    float* prefix_state(const AttentionTask& task, int head, int row) const {
        return prefixes +
               ((task.first + row / group) * int64_t(args.heads) + head * group + row % group) * state_size();
    }

    void operator()(int64_t index, int thread) const {
        const AttentionTask& task = tasks[index];
        if (task.tokens * group <= Few::most_rows(args)) attend_task<Few>(task, thread);
        else attend_task<Many>(task, thread);
    }

    template <class Pass> void attend_task(const AttentionTask& task, int thread) const {
        const int rows = task.tokens * group;
        const bool direct = task.partial < 0;
        const int64_t head_states = rows * state_size(), states = direct ? task.heads * head_states : 0;
        Pass pass(args, task, &task + 1 < end ? &task + 1 : nullptr, padded);
        float* state = (float*)thread_scratch(thread, sizeof(float) * (states + pass.scratch_size()));
        pass.begin(state + states);
        const auto for_states = [&](auto&& body) __attribute__((always_inline)) {
            for (int h = 0; direct && h < task.heads; ++h)
                for (int i = 0; i < rows; ++i) body(task.head + h, i, state + h * head_states + i * state_size());
        };
        for_states([&](int head, int row, float* of) { begin(task, head, row, of); });
        for (int64_t p = task.part_begin; p < task.part_end; ++p) {
            KeyRange ranges[kTaskTokens];
            for (int t = 0; t < task.tokens; ++t) {
                const QueryToken& q = args.order[task.first + t];
                const KeyRange r = key_range(args, q.row, q.token);
                ranges[t] = {greater<int64_t>(r.begin - p * kPartition, 0),
                             lesser<int64_t>(r.end - p * kPartition, kPartition)};
            }
            const KeyRange all = span_of(ranges, task.tokens);
            for (int h = 0; h < task.heads; ++h) {
                float* to =
                    direct ? state + h * head_states
                           : partials + (task.partial + ((p - task.part_begin) * task.heads + h) * rows) * state_size();
                if (all.begin >= all.end) {
                    for (int i = 0; !direct && i < rows; ++i) empty(to + i * state_size());
                    continue;
                }
                pass.partition(p * kPartition, h, ranges, all,
                               [&](int first, int count, const Softmax* result, const float* part) {
                                   float* at = to + first * state_size();
                                   if (direct) fold(count, at, state_size(), result, part, padded, padded);
                                   for (int r = 0; !direct && r < count; ++r, at += state_size()) {
                                       for (int d = 0; d < padded; d += W) store(at + d, load(part + r * padded + d));
                                       at[padded] = result[r].reference;
                                       at[padded + 1] = result[r].sum;
                                   }
                               });
            }
        }
        for_states([&](int head, int row, float* of) { finish(task, head, row, of); });
    }

    // The state that a row over a KV head begins with.
    void begin(const AttentionTask& task, int head, int row, float* state) const {
        empty(state);
        if (task.shared || query(task, row).shared == 0) return;
        const float* from = prefix_state(task, head, row);
        for (int d = 0; d < state_size(); d += W) store(state + d, load(from + d));
    }

    // The state that it ends with -> output and log-sum-exp, or where the row's own partitions continue.
    void finish(const AttentionTask& task, int head, int row, const float* state) const {
        if (task.shared) {
            float* to = prefix_state(task, head, row);
            for (int d = 0; d < state_size(); d += W) store(to + d, load(state + d));
            return;
        }
        const float maximum = state[padded], sum = state[padded + 1];
        const int64_t at = query(task, row).token * int64_t(args.heads) + head * group + row % group;
        const bool none = is_empty(maximum, sum);
        if (args.lse) args.lse[at] = none ? -kInf : maximum + __builtin_logf(sum);
        const F divisor = broadcast(none ? 1.0f : sum);
        with_type(args.type, [&]<class Q>(Q*) {
            Q* out = (Q*)args.output + at * args.cache.head_dim;
            for (int d = 0; d < args.cache.head_dim; d += W)
                store_upto(out + d, load(state + d) / divisor, args.cache.head_dim - d);
        });
    }

    // Folds the partitions of a query head that other tasks left in the buffer; `task` spans all of them.
    void merge(const AttentionTask& task, int query_head, int thread) const {
        const int rows = task.tokens * group, head = query_head / group;
        float* state = (float*)thread_scratch(thread, sizeof(float) * state_size());
        for (int row = query_head % group; row < rows; row += group) {
            begin(task, head, row, state);
            fold_partitions(task.part_end - task.part_begin, state,
                            partials + (task.partial + head * int64_t(rows) + row) * state_size(),
                            int64_t(args.heads) * task.tokens * state_size(), padded);
            finish(task, head, row, state);
        }
    }
};

template <class Few, class Many> void attend_with(const AttentionArgs& args) {
    Attention<Few, Many> run{args,
                             nullptr,
                             nullptr,
                             nullptr,
                             nullptr,
                             args.heads / args.cache.kv_heads,
                             (args.cache.head_dim + W - 1) / W * W};
    int64_t target = INT64_MAX;
    if (num_threads() > 1) {
        int64_t work = 0;
        for (int row = 0; row < args.rows; ++row) {
            int64_t keys = args.context_lens[row];
            if (args.window) keys = lesser(keys, args.window);
            work += keys * (args.query_start[row + 1] - args.query_start[row]) * args.heads;
        }
        target = greater<int64_t>(work / (num_threads() * 6), 4096);
    }
    const AttentionPlan size = plan_attention(args, nullptr, nullptr, Many::kRows, target);
    auto* tasks = (AttentionTask*)caller_scratch(0, sizeof(AttentionTask) * (size.num_tasks + size.num_merges));
    const AttentionPlan plan = plan_attention(args, tasks, tasks + size.num_tasks, Many::kRows, target);
    int64_t shared = 0;
    for (int i = 0; i < args.num_prefixes; ++i) shared += args.prefixes[i].tokens;
    run.partials = (float*)caller_scratch(1, sizeof(float) * (plan.partials + shared * args.heads) * run.state_size());
    run.prefixes = run.partials + plan.partials * run.state_size();
    auto tasks_and_merges = [&](int64_t task, int64_t task_end, int64_t merge_begin, int64_t merge_end) {
        run.tasks = tasks + task;
        run.end = tasks + task_end;
        parallel(task_end - task, run);
        auto merge = [&](int64_t i, int thread) {
            run.merge(plan.merges[merge_begin + i / args.heads], int(i % args.heads), thread);
        };
        parallel((merge_end - merge_begin) * args.heads, merge);
    };
    if (plan.shared_tasks) tasks_and_merges(0, plan.shared_tasks, 0, plan.shared_merges);
    tasks_and_merges(plan.shared_tasks, plan.num_tasks, plan.shared_merges, plan.num_merges);
}

#if defined(__AVX512VNNI__)
template <class K, class V> void attend_on_bytes(const AttentionArgs& args) {
    if (args.type == DType::f32) attend_with<BytePass<K, V, true>, BytePass<K, V, true>>(args);
    else attend_with<BytePass<K, V, false>, BytePass<K, V, false>>(args);
}
#endif

template <class K, class V> void attend_on_vectors(const AttentionArgs& args) {
    attend_with<VectorPass<K, V>, VectorPass<K, V>>(args);
}

// Calls body(K*, V*) with the types of keys and values in integers.
template <class Body> INLINE void with_integer_types(const LayerCache& cache, Body&& body) {
    const DType key = cache.key.type, value = cache.value.type;
    if (key == DType::i8 && value == DType::i8) body((int8_t*)nullptr, (int8_t*)nullptr);
    if (key == DType::i8 && value == DType::u4) body((int8_t*)nullptr, (u4*)nullptr);
    if (key == DType::u4) body((u4*)nullptr, (u4*)nullptr);
}

void attend(const AttentionArgs& args) {
    const DType key = args.cache.key.type;
#if defined(__AVX512BF16__)
    if (args.type == DType::bf16 && key == DType::bf16) return attend_with<PairPass<bf16>, TiledPass<bf16>>(args);
    if (args.type == DType::bf16 && lies_in_rows(args.cache)) {
        if (key == DType::e4m3) return attend_with<PairPass<e4m3>, TiledPass<e4m3>>(args);
        if (key == DType::e5m2) return attend_with<PairPass<e5m2>, TiledPass<e5m2>>(args);
    }
#endif
#if defined(__AVX512VNNI__) && !(defined(PAGEMILL_BELOW) && defined(__AVX512BF16__))
    // Where there are instructions for bytes, and keys and values lie as these take them.
    if (is_integer(key) && lies_for_bytes(args.cache))
        return with_integer_types(args.cache, [&]<class K, class V>(K*, V*) { attend_on_bytes<K, V>(args); });
#endif
#if defined(PAGEMILL_BELOW)
    below().attend(args);
#else
    with_float_type(key, [&]<class T>(T*) { attend_on_vectors<T, T>(args); });
    with_integer_types(args.cache, [&]<class K, class V>(K*, V*) { attend_on_vectors<K, V>(args); });
#endif
}

}}  // namespace pagemill
