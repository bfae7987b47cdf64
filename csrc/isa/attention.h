// Paged attention for any mixture of prefill, chunks and decode.
//
// Keys are cut into partitions of 256 at fixed absolute positions. A query's scores, maximum, sum and weighted values are
// computed partition by partition, each relative to the partition's own maximum, and folded in ascending order. What a
// tile, a task or a call covers therefore changes no bit: masked keys contribute an exact zero, and each sum is one chain
// in key order. The queries of all heads that share a KV head are computed together, so K and V are read once.

constexpr int kPartition = 256;
constexpr int kScoreRow = kPartition + 4 * W;  // a group of key vectors may end beyond the partition
constexpr int kTaskRows = 48;                  // rows that share one pass over a partition's keys
// (token, head) rows that run side by side in registers, and vectors of each row.
#if defined(__AVX512F__)
constexpr int kTileRows = 12;
constexpr int vectors_beside(int rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kTileRows = 6;
constexpr int vectors_beside(int rows) { return rows <= 2 ? 4 : 2; }
#endif

// scores [MR][kScoreRow] = q [dims][MR] · NV vectors of W keys; vector v of dimension d lies at key[v] + d * key_dim.
template <int MR, class T>
void score_tile(const float* q, const T* const* key, int64_t key_dim, int dims, float* scores) {
    constexpr int NV = vectors_beside(MR);
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    const T* at[NV];
    for (int v = 0; v < NV; ++v) at[v] = key[v];
    for (int d = 0; d < dims; ++d) {
        F k[NV];
        for (int v = 0; v < NV; ++v) k[v] = load(at[v] + d * key_dim);
        for (int r = 0; r < MR; ++r) {
            const F x = broadcast(q[d * MR + r]);
            for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(scores + r * kScoreRow + v * W, acc[r][v]);
}

// Where a partition's values lie: token t of the partition at block[t / tokens] + t % tokens * stride.
template <class T> struct Values {
    const T* block[kPartition / 8];
    int64_t stride;
    int tokens;
};

// out [MR][row] = sum over keys begin .. end - 1 of weights [MR][kScoreRow] * NV vectors of values from dimension `dim` on.
template <int MR, int NV, class T>
void value_tile(const float* weights, const Values<T>& values, int dim, int begin, int end, float* out, int64_t row) {
    F acc[MR][NV];
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) acc[r][v] = zero();
    for (int key = begin; key < end;) {
        const int block = key / values.tokens;
        const int stop = lesser(end, (block + 1) * values.tokens);
        const T* at = values.block[block] + (key - block * values.tokens) * values.stride + dim;
        for (; key < stop; ++key, at += values.stride) {
            F x[NV];
            for (int v = 0; v < NV; ++v) x[v] = load(at + v * W);
            for (int r = 0; r < MR; ++r) {
                const F w = broadcast(weights[r * kScoreRow + key]);
                for (int v = 0; v < NV; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
            }
        }
    }
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) store(out + r * row + v * W, acc[r][v]);
}

template <int MR, class T>
void value_rows(const float* weights, const Values<T>& values, int dims, int begin, int end, float* out) {
    constexpr int NV = vectors_beside(MR);
    int dim = 0;
    for (; dim + NV * W <= dims; dim += NV * W) value_tile<MR, NV>(weights, values, dim, begin, end, out + dim, dims);
    switch ((dims - dim) / W) {
        case 3: value_tile<MR, (NV > 3 ? 3 : 1)>(weights, values, dim, begin, end, out + dim, dims); break;
        case 2: value_tile<MR, (NV > 2 ? 2 : 1)>(weights, values, dim, begin, end, out + dim, dims); break;
        case 1: value_tile<MR, 1>(weights, values, dim, begin, end, out + dim, dims); break;
        default: break;
    }
}

template <class T> struct TileKernels {
    void (*score)(const float*, const T* const*, int64_t, int, float*);
    void (*value)(const float*, const Values<T>&, int, int, int, float*);
    int vectors;
};

template <class T, int... R> const TileKernels<T>& tile_kernels(int rows, Sequence<R...>) {
    static constexpr TileKernels<T> table[] = {{score_tile<R + 1, T>, value_rows<R + 1, T>, vectors_beside(R + 1)}...};
    return table[rows - 1];
}

// Scores of keys [begin, end) of a partition become weights exp(score - maximum) in place, zero over the rest of
// [from, to). Returns maximum and sum; -inf and 0 for an empty range.
struct Softmax { float maximum, sum; };

INLINE Softmax softmax(float* s, int begin, int end, int from, int to, float soft_cap) {
    const int first = from / W, last = (to + W - 1) / W;
    if (begin >= end) {
        for (int v = first; v < last; ++v) store(s + v * W, zero());
        return {-kInf, 0.0f};
    }
    // Pairs of vectors, for two independent chains of each reduction; what lies outside the range is masked.
    const int own_first = begin / W / 2 * 2, own_last = (end + 2 * W - 1) / (2 * W) * 2;
    float lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = float(i);
    const F iota = load(lanes), none = broadcast(-kInf);
    auto masked = [&](int v) __attribute__((always_inline)) {
        F x = load(s + v * W);
        const bool edge = v * W < begin || v * W + W > end;
        if (soft_cap != 0.0f) x = tanh(x * broadcast(1.0f / soft_cap)) * broadcast(soft_cap);
        if (edge) {
            x = select_less(iota, broadcast(float(begin - v * W)), none, x);
            x = select_less(iota, broadcast(float(end - v * W)), x, none);
        }
        if (edge || soft_cap != 0.0f) store(s + v * W, x);
        return x;
    };
    F top_even = none, top_odd = none;
    for (int v = own_first; v < own_last; v += 2) {
        top_even = max(top_even, masked(v));
        top_odd = max(top_odd, masked(v + 1));
    }
    const float maximum_score = maximum(max(top_even, top_odd));
    const F m = broadcast(maximum_score);
    F even = zero(), odd = zero();
    for (int v = own_first; v < own_last; v += 2) {
        const F p = exp_nonpositive(load(s + v * W) - m), q = exp_nonpositive(load(s + v * W + W) - m);
        even = even + p;
        odd = odd + q;
        store(s + v * W, p);
        store(s + v * W + W, q);
    }
    for (int v = first; v < own_first; ++v) store(s + v * W, zero());
    for (int v = own_last; v < last; ++v) store(s + v * W, zero());
    return {maximum_score, sum(even + odd)};
}

// A row's result so far: maximum, sum, and values weighted relative to the maximum.
INLINE void fold(float& maximum, float& sum, float* values, float part_maximum, float part_sum, const float* part_values,
                 int dims) {
    const float top = maximum < part_maximum ? part_maximum : maximum;
    float factor[W] = {};
    factor[0] = maximum - top;
    factor[1] = part_maximum - top;
    store(factor, exp_nonpositive(load(factor)));
    const F a = broadcast(factor[0]), b = broadcast(factor[1]);
    for (int d = 0; d < dims; d += W) store(values + d, fma(load(values + d), a, load(part_values + d) * b));
    sum = sum * factor[0] + part_sum * factor[1];
    maximum = top;
}

// Query tokens of one row, some KV heads, some partitions. With `partial` >= 0 each partition's state goes to that place of
// the shared buffer and is folded afterwards; else the task folds and writes the output itself.
struct AttentionTask {
    int row, token, tokens, head, heads;
    int64_t part_begin, part_end, partial;
};

struct KeyRange { int64_t begin, end; };

template <class T> struct Attention {
    const AttentionArgs& args;
    const AttentionTask* tasks;
    float* partials;
    int group, padded;  // query heads per KV head; head_dim rounded up to whole vectors

    int64_t state_size() const { return padded + 2; }

    KeyRange range(int row, int64_t token) const {
        const int64_t position = args.positions[token];
        int64_t begin = args.window ? greater<int64_t>(0, position - args.window + 1) : 0;
        int64_t end = lesser<int64_t>(position + 1, args.context_lens[row]);
        if (args.key_start) begin = greater<int64_t>(begin, args.key_start[row]);
        if (args.key_end) end = lesser<int64_t>(end, args.key_end[row]);
        return {begin, greater(begin, end)};
    }

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
        const bool widen = !direct_keys() || !direct_values() || (sizeof(T) == 2 && tiles.count > 2);
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
            KeyRange r = range(task.row, task.token + t);
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
                result[r] = softmax(scores + r * kScoreRow, int(own.begin), int(own.end), from, until, args.soft_cap);
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
                    const KeyRange r = range(task.row, task.token + i / group);
                    if (greater(r.begin, p * kPartition) >= lesser(r.end, (p + 1) * kPartition)) continue;
                    float* state = states + i * state_size();
                    fold(state[0], state[1], state + 2, from[0], from[1], from + 2, padded);
                }
            }
            finish(task, task.head + h, states);
        }
    }
};

// A step cut into tasks of about equal work (keys x rows of queries). Without memory it only counts.
struct AttentionPlan {
    AttentionTask *tasks, *merges;
    int64_t num_tasks = 0, num_merges = 0, partials = 0;

    void add(const AttentionTask& task) {
        if (tasks) tasks[num_tasks] = task;
        ++num_tasks;
    }
    void add_merge(const AttentionTask& task) {
        if (merges) merges[num_merges] = task;
        ++num_merges;
    }
};

// Many query rows over one KV head are split by head, few over a long context by partitions.
template <class T> void plan_tile(const Attention<T>& run, AttentionPlan& plan, AttentionTask task, int64_t target) {
    const int kv_heads = run.args.kv_heads, rows = task.tokens * run.group;
    KeyRange all{0, 0};
    for (int64_t t = task.token; t < task.token + task.tokens; ++t) {
        const KeyRange r = run.range(task.row, t);
        if (r.begin < r.end) all = all.begin >= all.end ? r : KeyRange{lesser(all.begin, r.begin), greater(all.end, r.end)};
    }
    const int64_t first = all.begin / kPartition, last = (all.end + kPartition - 1) / kPartition, count = last - first;
    const int64_t head_work = (all.end - all.begin) * rows, work = head_work * kv_heads;
    task.part_begin = first;
    task.part_end = last;
    task.heads = kv_heads;
    task.partial = -1;
    if (work <= target) {
        plan.add(task);
    } else if (rows > kTaskRows / 2 || count == 1 || head_work <= target) {
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

template <class T> AttentionPlan plan_attention(const Attention<T>& run, AttentionTask* tasks, AttentionTask* merges, int64_t target) {
    const AttentionArgs& args = run.args;
    AttentionPlan plan{tasks, merges};
    const int per_tile = greater(1, kTaskRows / run.group);
    // Later queries see more keys: they come first, so that the last task to end is a short one.
    for (int row = args.rows - 1; row >= 0; --row)
        for (int end = args.query_start[row + 1]; end > args.query_start[row];) {
            const int begin = greater(args.query_start[row], end - per_tile);
            plan_tile(run, plan, {row, begin, end - begin, 0, 0, 0, 0, -1}, target);
            end = begin;
        }
    return plan;
}

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
    const AttentionPlan size = plan_attention(run, nullptr, nullptr, target);
    auto* tasks = (AttentionTask*)caller_scratch(0, sizeof(AttentionTask) * (size.num_tasks + size.num_merges));
    const AttentionPlan plan = plan_attention(run, tasks, tasks + size.num_tasks, target);
    run.tasks = tasks;
    run.partials = (float*)caller_scratch(1, sizeof(float) * plan.partials * run.state_size());
    parallel(plan.num_tasks, run);
    auto merge = [&](int64_t i, int thread) { run.merge(plan.merges[i], thread); };
    parallel(plan.num_merges, merge);
}

void attend(const AttentionArgs& args) {
    with_type(args.cache_type, [&](auto* t) { attend_typed<Pointee<decltype(t)>>(args); });
}

// One head of keys or values to its slot, any layout.
template <class S, class T> INLINE void write_head(const S* from, T* to, int64_t stride, int head_dim) {
    int d = 0;
    if (stride == 1)
        for (; d + W <= head_dim; d += W) store(to + d, load(from + d));
    for (; d + W <= head_dim; d += W) {
        T lanes[W];
        store(lanes, load(from + d));
        for (int i = 0; i < W; ++i) to[(d + i) * stride] = lanes[i];
    }
    for (; d < head_dim; ++d) narrow_one(to + d * stride, widen_one(from + d));
}

template <class S, class T> INLINE void write_token(const WriteArgs& args, int64_t token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) return;
    const int64_t frame = slot / args.block_size, offset = slot % args.block_size;
    const CacheView &k = args.key_cache, &v = args.value_cache;
    for (int head = 0; head < args.kv_heads; ++head) {
        write_head((const S*)args.key + token * args.key_token + head * args.key_head,
                   (T*)k.data + frame * k.frame + head * k.head + offset * k.token, k.dim, args.head_dim);
        write_head((const S*)args.value + token * args.value_token + head * args.value_head,
                   (T*)v.data + frame * v.frame + head * v.head + offset * v.token, v.dim, args.head_dim);
    }
}

void write_kv(const WriteArgs& args) {
    with_type(args.type, [&](auto* s) {
        with_type(args.cache_type, [&](auto* t) {
            for_rows(args.tokens, 2 * int64_t(args.kv_heads) * args.head_dim,
                     [&](int64_t token) { write_token<Pointee<decltype(s)>, Pointee<decltype(t)>>(args, token); });
        });
    });
}

void prepare_heads(const HeadsArgs& args) {
    const WriteArgs& write = args.write;
    const int64_t row = (args.heads + 2 * int64_t(write.kv_heads)) * write.head_dim;
    with_type(write.type, [&](auto* s) {
        using S = Pointee<decltype(s)>;
        with_type(write.cache_type, [&](auto* t) {
            for_rows(write.tokens, row, [&](int64_t token) {
                S* at = (S*)args.qkv + token * row;
                for (int head = 0; head < args.heads + write.kv_heads; ++head, at += write.head_dim) {
                    const float* norm = head < args.heads ? args.q_norm : args.k_norm;
                    const int64_t angle = args.positions[token] * args.half;
                    if (norm) norm_row(at, norm, args.eps, at, write.head_dim);
                    if (args.cos) rotate_head(at, args.cos + angle, args.sin + angle, args.half);
                }
                write_token<S, Pointee<decltype(t)>>(write, token);
            });
        });
    });
}
