// How the pass below takes its sums: each as one chain of multiply-adds.
struct ChainSums {
    struct Rounding {};
    static constexpr int kRows = kTileRows, kMostRows = kTaskRows;  // in registers; of a task

    template <class E> static const TileKernels<E>& kernels(int rows) { return tile_kernels<E>(rows, Upto<kRows>{}); }
    static float query_factor(const AttentionArgs& args) { return args.scale; }
    static Softmax weigh(const AttentionArgs& args, float* scores, const KeyRange& own, int from, int until,
                         const TokenScales* scales) {
        return softmax(scores, int(own.begin), int(own.end), from, until, args.soft_cap, scales);
    }
};

// The pass over a partition on plain vectors, in fp32 whatever the dtype of the cache.
template <class T, class Sums = ChainSums> struct VectorPass {
    static constexpr int kRows = Sums::kMostRows;

    const AttentionArgs& args;
    const AttentionTask& task;
    int group, padded;
    Tiles tiles;
    int64_t query_size;  // of one KV head
    bool widen;
    float *queries = nullptr, *scores, *part, *wide_keys, *wide_values;

    VectorPass(const AttentionArgs& args, const AttentionTask& task, int padded)
        : args(args), task(task), group(args.heads / args.kv_heads), padded(padded), tiles(task.tokens * group, Sums::kRows),
          query_size(int64_t(task.tokens) * group * args.head_dim) {
        // Whether key vectors, and values, can be read where they lie.
        const bool direct_keys = args.key.token == 1 && args.block_size % W == 0;
        const bool direct_values = args.value.dim == 1 && args.head_dim % W == 0;
        widen = !direct_keys || !direct_values || (sizeof(T) < 4 && tiles.count > 2);
    }

    int64_t scratch_size() const {
        return task.heads * query_size + Sums::kRows * (kScoreRow + padded) +
               (widen ? kPartition * int64_t(args.head_dim + padded) + 8 * W : 0);
    }

    void begin(float* memory) {
        queries = memory;
        scores = queries + task.heads * query_size;
        part = scores + Sums::kRows * kScoreRow;
        wide_keys = part + Sums::kRows * padded;
        wide_values = wide_keys + kPartition * args.head_dim + 8 * W;
        for (int h = 0; h < task.heads; ++h) pack_query(task.head + h, queries + h * query_size);
    }

    void pack_query(int head, float* out) const {
        const float factor = Sums::query_factor(args);
        with_type(args.query_type, [&](auto* t) {
            using Q = Pointee<decltype(t)>;
            for (int64_t tile = 0; tile < tiles.count; ++tile) {
                const int height = tiles.height(tile);
                float* to = out + tiles.begin(tile) * args.head_dim;
                for (int r = 0; r < height; ++r) {
                    const int64_t i = tiles.begin(tile) + r;
                    const Q* q = (const Q*)args.query + args.order[task.first + i / group].token * args.query_token +
                                 (head * group + i % group) * args.query_head;
                    for (int d = 0; d < args.head_dim; ++d) to[d * height + r] = widen_one(q + d) * factor;
                }
            }
        });
    }

    // One KV head (the task's `h`th) of the partition that begins at `base`: emit(first row, rows, softmax, values) for each
    // tile of rows. `ranges`: keys that the task's tokens see, within the partition; `all` spans them and is not empty.
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
            const float* keys[kPartition / W + 8];
            widen_partition(row, head, base, int(all.begin), int(all.end));
            const int last = (int(all.end) + W - 1) / W;
            for (int v = int(all.begin) / W; v < last + 8; ++v) keys[v] = wide_keys + lesser(v, last - 1) * W;
            tile_rows<float>(q, ranges, keys, kPartition, {{wide_values, wide_values}, padded, kPartition}, scales, emit);
        } else {
            const T* keys[kPartition / W + 8];
            Values<T> values;
            locate(row, head, base, int(all.begin), int(all.end), keys, values);
            tile_rows<T>(q, ranges, keys, args.key.dim, values, scales, emit);
        }
    }

    template <class E, class Emit>
    void tile_rows(const float* q, const KeyRange* ranges, const E* const* keys, int64_t key_dim, const Values<E>& values,
                   const TokenScales* scales, Emit&& emit) const {
        for (int64_t tile = 0; tile < tiles.count; ++tile) {
            const int height = tiles.height(tile), first_row = int(tiles.begin(tile));
            const KeyRange span = span_of(ranges + first_row / group, (first_row + height - 1) / group - first_row / group + 1);
            const int from = int(span.begin), until = int(span.end);
            const TileKernels<E>& run = Sums::template kernels<E>(height);
            Softmax result[Sums::kRows];
            {
                [[maybe_unused]] const typename Sums::Rounding rounding;
                for (int v = from / W; v * W < until; v += run.vectors)
                    run.score(q + first_row * args.head_dim, keys + v, key_dim, args.head_dim, scores + v * W);
                for (int r = 0; r < height; ++r)
                    result[r] = Sums::weigh(args, scores + r * kScoreRow, ranges[(first_row + r) / group], from, until, scales);
                if (from < until) run.value(scores, values, padded, from, until, part);
            }
            emit(first_row, height, result, part);
        }
    }

    // Keys [begin, end) of a partition as fp32 [dim][kPartition], values as fp32 [kPartition][padded], to scratch.
    void widen_partition(int row, int head, int64_t base, int begin, int end) const {
        const int size = args.block_size;
        for (int token = begin; token < end;) {
            const int64_t block = (base + token) / size;
            const int offset = int(base + token - block * size), count = lesser(size - offset, end - token);
            const T* k = block_at<T>(args, args.key, row, block, head) + offset * args.key.token;
            const T* v = block_at<T>(args, args.value, row, block, head) + offset * args.value.token;
            for (int d = 0; d < args.head_dim; ++d) {
                const T* from = k + d * args.key.dim;
                float* to = wide_keys + d * kPartition + token;
                int i = 0;
                if (args.key.token == 1)
                    for (; i + W <= count; i += W) store(to + i, load(from + i));
                for (; i < count; ++i) to[i] = widen_one(from + i * args.key.token);
            }
            for (int i = 0; i < count; ++i) {
                const T* from = v + i * args.value.token;
                float* to = wide_values + (token + i) * padded;
                int d = 0;
                if (args.value.dim == 1)
                    for (; d + W <= args.head_dim; d += W) store(to + d, load(from + d));
                for (; d < args.head_dim; ++d) to[d] = widen_one(from + d * args.value.dim);
                for (; d < padded; ++d) to[d] = 0.0f;
            }
            token += count;
        }
    }

    void locate(int row, int head, int64_t base, int begin, int end, const T** keys, Values<T>& values) const {
        const int first = begin / W, last = (end + W - 1) / W;
        for (int v = first; v < last + 8; ++v) {
            const int64_t token = base + lesser(v, last - 1) * W;  // beyond the range: any readable place
            keys[v] = block_at<T>(args, args.key, row, token / args.block_size, head) + token % args.block_size;
        }
        values.stride = args.value.token;
        values.tokens = lesser(args.block_size, kPartition);
        int b = begin / values.tokens;
        for (; b * values.tokens < end; ++b) values.block[b] = block_at<T>(args, args.value, row, base / values.tokens + b, head);
        values.block[b] = values.block[b - 1];
    }

    void load_scales(int row, int head, int64_t base, int begin, int end, TokenScales& to) const {
        std::memset(&to, 0, sizeof to);
        for (int token = begin; token < end;) {
            const int64_t block = (base + token) / args.block_size;
            const int offset = int(base + token - block * args.block_size), count = lesser(args.block_size - offset, end - token);
            const int64_t frame = frame_of(args, row, block);
            const CacheView &k = args.key, &v = args.value;
            std::memcpy(to.key + token, k.scale + frame * k.scale_frame + head * k.scale_head + offset, count * sizeof(float));
            std::memcpy(to.value + token, v.scale + frame * v.scale_frame + head * v.scale_head + offset, count * sizeof(float));
            token += count;
        }
    }
};
