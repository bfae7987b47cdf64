// Paged attention for any mixture of prefill, chunks and decode.
//
// Keys are cut into partitions of 256 at fixed absolute positions. A query's scores, maximum, sum and weighted values are
// computed partition by partition, each relative to the partition's own maximum, and folded in ascending order. What a
// tile, a task or a call covers therefore changes no bit: masked keys contribute an exact zero, and each sum is one chain
// in key order. The queries of all heads that share a KV head are computed together, so K and V are read once.

template <class T> struct Attention {
    const AttentionArgs& args;
    const AttentionTask* tasks;
    float* partials;
    int group, padded;  // query heads per KV head; head_dim rounded up to whole vectors

    int64_t state_size() const { return padded + 2; }

    // Whether key vectors, and values, can be read where they lie.
    bool direct_keys() const { return args.key.token == 1 && args.block_size % W == 0; }
    bool direct_values() const { return args.value.dim == 1 && args.head_dim % W == 0; }

    const T* key_block(int row, int64_t block, int head) const {
        const int64_t frame = args.tables[row * args.table_stride + block];
        return (const T*)args.key.data + frame * args.key.frame + head * args.key.head;
    }
    const T* value_block(int row, int64_t block, int head) const {
        const int64_t frame = args.tables[row * args.table_stride + block];
        return (const T*)args.value.data + frame * args.value.frame + head * args.value.head;
    }

    void pack_query(const AttentionTask& task, int head, const Tiles& tiles, float* out) const {
        with_type(args.query_type, [&](auto* t) {
            using Q = Pointee<decltype(t)>;
            for (int64_t tile = 0; tile < tiles.count; ++tile) {
                const int height = tiles.height(tile);
                float* to = out + tiles.begin(tile) * args.head_dim;
                for (int r = 0; r < height; ++r) {
                    const int64_t i = tiles.begin(tile) + r;
                    const Q* q = (const Q*)args.query + (task.token + i / group) * args.query_token +
                                 (head * group + i % group) * args.query_head;
                    for (int d = 0; d < args.head_dim; ++d) to[d * height + r] = widen_one(q + d) * args.scale;
                }
            }
        });
    }

    // Keys [begin, end) of a partition as fp32 [dim][kPartition], values as fp32 [kPartition][padded].
    void widen_partition(int row, int head, int64_t base, int begin, int end, float* keys, float* values) const {
        const int size = args.block_size;
        for (int token = begin; token < end;) {
            const int64_t block = (base + token) / size;
            const int offset = int(base + token - block * size), count = lesser(size - offset, end - token);
            const T* k = key_block(row, block, head) + offset * args.key.token;
            const T* v = value_block(row, block, head) + offset * args.value.token;
            for (int d = 0; d < args.head_dim; ++d) {
                const T* from = k + d * args.key.dim;
                float* to = keys + d * kPartition + token;
                int i = 0;
                if (args.key.token == 1)
                    for (; i + W <= count; i += W) store(to + i, load(from + i));
                for (; i < count; ++i) to[i] = widen_one(from + i * args.key.token);
            }
            for (int i = 0; i < count; ++i) {
                const T* from = v + i * args.value.token;
                float* to = values + (token + i) * padded;
                int d = 0;
                if (args.value.dim == 1)
                    for (; d + W <= args.head_dim; d += W) store(to + d, load(from + d));
                for (; d < args.head_dim; ++d) to[d] = widen_one(from + d * args.value.dim);
                for (; d < padded; ++d) to[d] = 0.0f;
            }
            token += count;
        }
    }

    void operator()(int64_t index, int thread) const {
        const AttentionTask& task = tasks[index];
        const int rows = task.tokens * group;
        const Tiles tiles(rows, kTileRows);
        const bool widen = !direct_keys() || !direct_values() || (sizeof(T) < 4 && tiles.count > 2);
        const bool direct = task.partial < 0;
        const int64_t query_size = int64_t(rows) * args.head_dim, states = direct ? task.heads * int64_t(rows) : 0;
        const int64_t widened = widen ? kPartition * int64_t(args.head_dim + padded) + 8 * W : 0;
        float* memory = (float*)thread_scratch(
            thread, sizeof(float) * (task.heads * query_size + kTileRows * (kScoreRow + padded) + states * state_size() + widened));
        float* queries = memory;
        float* scores = queries + task.heads * query_size;
        float* part = scores + kTileRows * kScoreRow;
        float* state = part + kTileRows * padded;
        float* wide_keys = state + states * state_size();
        float* wide_values = wide_keys + kPartition * args.head_dim + 8 * W;

        for (int h = 0; h < task.heads; ++h) pack_query(task, task.head + h, tiles, queries + h * query_size);
        for (int64_t i = 0; i < states; ++i) {
            float* s = state + i * state_size();
            s[0] = -kInf;
            for (int d = 1; d < state_size(); ++d) s[d] = 0.0f;
        }
        for (int64_t p = task.part_begin; p < task.part_end; ++p)
            for (int h = 0; h < task.heads; ++h) {
                float* to = direct ? state + h * rows * state_size()
                                   : partials + (task.partial + ((p - task.part_begin) * task.heads + h) * rows) * state_size();
                const float* q = queries + h * query_size;
                if (widen) partition<float, true>(task, tiles, p, task.head + h, q, scores, part, to, wide_keys, wide_values);
                else partition<T, false>(task, tiles, p, task.head + h, q, scores, part, to, nullptr, nullptr);
            }
        if (direct)
            for (int h = 0; h < task.heads; ++h) finish(task, task.head + h, state + h * rows * state_size());
    }

    // One partition of one KV head for all rows of the task. E: element type of the keys and values as they are read, which
    // is where they lie, or widened in scratch.
    template <class E, bool Widened>
    void partition(const AttentionTask& task, const Tiles& tiles, int64_t p, int head, const float* queries, float* scores,
                   float* part, float* to, float* wide_keys, float* wide_values) const {
        const int64_t base = p * kPartition;
        KeyRange ranges[kTaskRows];
        int begin = kPartition, end = 0;
        for (int t = 0; t < task.tokens; ++t) {
            KeyRange r = key_range(args, task.row, task.token + t);
            r.begin = greater<int64_t>(r.begin - base, 0);
            r.end = lesser<int64_t>(r.end - base, kPartition);
            ranges[t] = r;
            if (r.begin < r.end) {
                begin = lesser(begin, int(r.begin));
                end = greater(end, int(r.end));
            }
        }
        const E* keys[kPartition / W + 4];
        Values<E> values;
        int64_t key_dim = args.key.dim;
        if (begin < end) {
            if constexpr (Widened) {
                widen_partition(task.row, head, base, begin, end, wide_keys, wide_values);
                locate_widened(begin, end, wide_keys, wide_values, keys, key_dim, values);
            } else {
                locate(task.row, head, base, begin, end, keys, values);
            }
        }

        TokenScales token_scales;
        const TokenScales* scales = nullptr;
        if constexpr (sizeof(T) == 1) {
            load_scales(task.row, head, base, begin, end, token_scales);
            scales = &token_scales;
        }

        const int dims = padded;
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int height = tiles.height(tile), first_row = int(tiles.begin(tile));
            int from = kPartition, until = 0;
            for (int i = first_row; i < first_row + height; ++i) {
                const KeyRange& r = ranges[i / group];
                if (r.begin < r.end) {
                    from = lesser(from, int(r.begin));
                    until = greater(until, int(r.end));
                }
            }
            const TileKernels<E>& run = tile_kernels<E>(height, Upto<kTileRows>{});
            for (int v = from / W; v * W < until; v += run.vectors)
                run.score(queries + first_row * args.head_dim, keys + v, key_dim, args.head_dim, scores + v * W);
            Softmax result[kTileRows];
            for (int r = 0; r < height; ++r) {
                const KeyRange& own = ranges[(first_row + r) / group];
                result[r] = softmax(scores + r * kScoreRow, int(own.begin), int(own.end), from, until, args.soft_cap, scales);
            }
            if (from < until) run.value(scores, values, dims, from, until, part);
            for (int r = 0; r < height; ++r) {
                float* state = to + (first_row + r) * state_size();
                const KeyRange& own = ranges[(first_row + r) / group];
                const float* row = part + r * dims;
                if (task.partial >= 0) {
                    state[0] = result[r].maximum;
                    state[1] = result[r].sum;
                    for (int d = 0; d < dims; d += W) store(state + 2 + d, own.begin < own.end ? load(row + d) : zero());
                } else if (own.begin < own.end) {
                    fold(state[0], state[1], state + 2, result[r].maximum, result[r].sum, row, dims);
                }
            }
        }
    }

    void locate(int row, int head, int64_t base, int begin, int end, const T** keys, Values<T>& values) const {
        const int first = begin / W, last = (end + W - 1) / W;
        for (int v = first; v < last + 4; ++v) {
            const int64_t token = base + lesser(v, last - 1) * W;  // beyond the range: any readable place
            keys[v] = key_block(row, token / args.block_size, head) + token % args.block_size;
        }
        values.stride = args.value.token;
        values.tokens = lesser(args.block_size, kPartition);
        for (int b = begin / values.tokens; b * values.tokens < end; ++b)
            values.block[b] = value_block(row, base / values.tokens + b, head);
    }

    void load_scales(int row, int head, int64_t base, int begin, int end, TokenScales& to) const {
        std::memset(&to, 0, sizeof to);
        for (int token = begin; token < end;) {
            const int64_t block = (base + token) / args.block_size;
            const int offset = int(base + token - block * args.block_size), count = lesser(args.block_size - offset, end - token);
            const int64_t frame = args.tables[row * args.table_stride + block];
            const CacheView &k = args.key, &v = args.value;
            std::memcpy(to.key + token, k.scale + frame * k.scale_frame + head * k.scale_head + offset, count * sizeof(float));
            std::memcpy(to.value + token, v.scale + frame * v.scale_frame + head * v.scale_head + offset, count * sizeof(float));
            token += count;
        }
    }

    void locate_widened(int begin, int end, const float* wide_keys, const float* wide_values, const float** keys,
                        int64_t& key_dim, Values<float>& values) const {
        const int last = (end + W - 1) / W;
        for (int v = begin / W; v < last + 4; ++v) keys[v] = wide_keys + lesser(v, last - 1) * W;
        key_dim = kPartition;
        values.stride = padded;
        values.tokens = kPartition;
        values.block[0] = wide_values;
    }

    // States of a task's rows for one KV head -> output and log-sum-exp.
    void finish(const AttentionTask& task, int head, const float* states) const {
        const int rows = task.tokens * group;
        for (int i = 0; i < rows; ++i) {
            const float* state = states + i * state_size();
            const int64_t token = task.token + i / group, at = token * args.heads + head * group + i % group;
            const bool empty = state[0] == -kInf && state[1] == 0.0f;
            if (args.lse) args.lse[at] = empty ? -kInf : state[0] + __builtin_logf(state[1]);
            const F divisor = broadcast(empty ? 1.0f : state[1]);
            with_type(args.query_type, [&](auto* t) {
                using Q = Pointee<decltype(t)>;
                Q* out = (Q*)args.output + at * args.head_dim;
                for (int d = 0; d < args.head_dim; d += W) {
                    const F x = load(state + 2 + d) / divisor;
                    if (args.head_dim - d >= W) store(out + d, x);
                    else store_first(out + d, x, args.head_dim - d);
                }
            });
        }
    }

    // Folds the partitions that other tasks left in the buffer; `merge` spans all of them.
    void merge(const AttentionTask& task, int thread) const {
        const int rows = task.tokens * group;
        float* states = (float*)thread_scratch(thread, sizeof(float) * rows * state_size());
        for (int h = 0; h < task.heads; ++h) {
            for (int64_t i = 0; i < rows * state_size(); ++i) states[i] = 0.0f;
            for (int i = 0; i < rows; ++i) states[i * state_size()] = -kInf;
            for (int64_t p = task.part_begin; p < task.part_end; ++p) {
                const float* from = partials + (task.partial + ((p - task.part_begin) * task.heads + h) * rows) * state_size();
                for (int i = 0; i < rows; ++i, from += state_size()) {
                    const KeyRange r = key_range(args, task.row, task.token + i / group);
                    if (greater(r.begin, p * kPartition) >= lesser(r.end, (p + 1) * kPartition)) continue;
                    float* state = states + i * state_size();
                    fold(state[0], state[1], state + 2, from[0], from[1], from + 2, padded);
                }
            }
            finish(task, task.head + h, states);
        }
    }
};

template <class T> void attend_typed(const AttentionArgs& args) {
    Attention<T> run{args, nullptr, nullptr, args.heads / args.kv_heads, (args.head_dim + W - 1) / W * W};
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
    const AttentionPlan size = plan_attention(args, nullptr, nullptr, target);
    auto* tasks = (AttentionTask*)caller_scratch(0, sizeof(AttentionTask) * (size.num_tasks + size.num_merges));
    const AttentionPlan plan = plan_attention(args, tasks, tasks + size.num_tasks, target);
    run.tasks = tasks;
    run.partials = (float*)caller_scratch(1, sizeof(float) * plan.partials * run.state_size());
    parallel(plan.num_tasks, run);
    auto merge = [&](int64_t i, int thread) { run.merge(plan.merges[i], thread); };
    parallel(plan.num_merges, merge);
}

void attend(const AttentionArgs& args) {
    with_cache_type(args.cache_type, [&](auto* t) { attend_typed<Pointee<decltype(t)>>(args); });
}
