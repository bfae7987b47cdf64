// The pass over a partition on tiles (AMX), for many bf16 queries and a bf16 cache; attention_pairs.h says what the sums are.
// Keys and values of a partition are copied into pairs of dimensions, and of tokens, as tiles take them: many rows share that.

// Tiles of an operand: tile t of step s at data + t * tile + s * step, its rows `row` apart; all in bytes.
struct TileOperand {
    const char* data;
    int64_t row, step, tile;
};

// c (rows of M tiles, `height` each, c_row floats apart) [..][16 N] = M tiles of a times N of b, over `steps`.
template <int M, int N>
void amx_product(const TileOperand& a, const TileOperand& b, int steps, float* c, int64_t c_row, int height) {
    __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
    _tile_zero(0);
    if (N == 2) _tile_zero(1);
    if (M == 2) _tile_zero(2);
    if (M == 2 && N == 2) _tile_zero(3);
    for (int s = 0; s < steps; ++s) {
        const char *x = a.data + s * a.step, *y = b.data + s * b.step;
        _tile_loadd(6, y, b.row);
        _tile_loadd(4, x, a.row);
        _tile_dpbf16ps(0, 4, 6);
        if (N == 2) {
            _tile_loadd(7, y + b.tile, b.row);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (M == 2) {
            _tile_loadd(5, x + a.tile, a.row);
            _tile_dpbf16ps(2, 5, 6);
            if (N == 2) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_row * 4);
    if (N == 2) _tile_stored(1, c + W, c_row * 4);
    if (M == 2) _tile_stored(2, c + height * c_row, c_row * 4);
    if (M == 2 && N == 2) _tile_stored(3, c + height * c_row + W, c_row * 4);
}

struct AmxPass {
    static constexpr int kRows = kTileTaskRows;
    static constexpr int64_t kTile = 512;  // elements of a tile
    static constexpr int64_t kRow = kPartition + W;  // of scores: a tile's rows lie in different lines of the nearest cache

    const AttentionArgs& args;
    const AttentionTask& task;
    int group, padded;
    Tiles tiles;
    int height, dim_steps, dim_tiles;
    bf16 *queries = nullptr, *keys, *values;
    float *scores, *part;

    AmxPass(const AttentionArgs& args, const AttentionTask& task, int padded)
        : args(args), task(task), group(args.heads / args.kv_heads), padded(padded), tiles(task.tokens * group, kTileHeight),
          height(int((tiles.rows + tiles.count - 1) / tiles.count)), dim_steps((args.head_dim + 31) / 32), dim_tiles(padded / 16) {
        const TileConfig config(height);
        _tile_loadconfig(&config);
    }
    ~AmxPass() { _tile_release(); }
    AmxPass(const AmxPass&) = delete;

    int64_t query_size() const { return tiles.count * dim_steps * kTile; }  // of one KV head
    int64_t scratch_size() const {
        const int64_t partition = (dim_steps * (kPartition / 16) + dim_tiles * (kPartition / 32)) * kTile;
        return (task.heads * query_size() + partition) / 2 + 2 * kTileHeight * (kRow + padded);
    }

    void begin(float* memory) {
        queries = (bf16*)memory;
        keys = queries + task.heads * query_size();
        values = keys + dim_steps * (kPartition / 16) * kTile;
        scores = (float*)(values + dim_tiles * (kPartition / 32) * kTile);
        part = scores + 2 * kTileHeight * kRow;
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
                    const bf16* q = (const bf16*)args.query + args.order[task.first + i / group].token * args.query_token +
                                    (head * group + i % group) * args.query_head;
                    x = _mm512_maskz_loadu_epi16(first_bits(args.head_dim - s * 32), q + s * 32);
                }
                _mm512_storeu_si512(to + s * kTile + r * 32, x);
            }
        }
    }

    static __mmask32 first_bits(int count) { return count >= 32 ? ~__mmask32(0) : (__mmask32(1) << count) - 1; }

    // Elements of two rows of 16 in turn.
    static __m512i in_turn(__m256i even, __m256i odd) {
        const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                               19, 3, 18, 2, 17, 1, 16, 0);
        return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(_mm512_castsi256_si512(even), odd, 1));
    }

    // Keys of 16 tokens from `base + token` on -> [step of 32 dims][pair][token][2]. What lies outside [begin, end) is any
    // number in a vector that holds a key of the range, else 0.
    void pack_keys(int row, int head, int64_t base, int token, KeyRange range, bf16* to) const {
        const CacheView& cache = args.key;
        const int64_t position = base + token;
        if (token + 16 <= range.begin || token >= range.end) {
            for (int i = 0; i < dim_steps * 16; ++i) _mm512_storeu_si512(to + i * 32, _mm512_setzero_si512());
        } else if (cache.token == 1 && args.block_size % 16 == 0) {
            const bf16* from = block_at<bf16>(args, cache, row, position / args.block_size, head) + position % args.block_size;
            int d = 0;
            for (; d + 1 < args.head_dim; d += 2, from += 2 * cache.dim) {
                _mm512_storeu_si512(to + d * 16, in_turn(_mm256_loadu_si256((const __m256i*)from),
                                                         _mm256_loadu_si256((const __m256i*)(from + cache.dim))));
            }
            if (d < args.head_dim) {
                _mm512_storeu_si512(to + d * 16, in_turn(_mm256_loadu_si256((const __m256i*)from), _mm256_setzero_si256()));
                d += 2;
            }
            for (; d < dim_steps * 32; d += 2) _mm512_storeu_si512(to + d * 16, _mm512_setzero_si512());
        } else {
            std::memset(to, 0, dim_steps * kTile * sizeof(bf16));
            for (int t = 0; t < 16; ++t) {
                if (token + t < range.begin || token + t >= range.end) continue;
                const int64_t at = position + t;
                const bf16* from = block_at<bf16>(args, cache, row, at / args.block_size, head) + at % args.block_size * cache.token;
                for (int d = 0; d < args.head_dim; ++d) to[d / 2 * 32 + t * 2 + d % 2] = from[d * cache.dim];
            }
        }
    }

    // Values of 32 tokens from `base + token` on -> [16 dims][pair of tokens][dim][2]; 0 outside [begin, end).
    void pack_values(int row, int head, int64_t base, int token, KeyRange range, bf16* to) const {
        const CacheView& cache = args.value;
        const bf16* from[32] = {};
        const int begin = greater(token, int(range.begin)), end = lesser(token + 32, int(range.end));
        int64_t block = (base + begin) / args.block_size, offset = base + begin - block * args.block_size;
        for (int t = begin; t < end; ++block, offset = 0) {
            const bf16* at = block_at<bf16>(args, cache, row, block, head) + offset * cache.token;
            const int stop = int(lesser<int64_t>(end, t + args.block_size - offset));
            for (; t < stop; ++t, at += cache.token) from[t - token] = at;
        }
        if (end - begin == 32 && cache.dim == 1 && args.head_dim % 16 == 0) {
            for (int i = 0; i < 32; i += 2) {
                for (int n = 0; n < dim_tiles; ++n)
                    _mm512_storeu_si512(to + n * kTile + i * 16, in_turn(_mm256_loadu_si256((const __m256i*)(from[i] + n * 16)),
                                                                         _mm256_loadu_si256((const __m256i*)(from[i + 1] + n * 16))));
            }
            return;
        }
        for (int i = 0; i < 32; i += 2)
            for (int n = 0; n < dim_tiles; ++n)
                _mm512_storeu_si512(to + n * kTile + i * 16, in_turn(dims_of(from[i], n * 16), dims_of(from[i + 1], n * 16)));
    }

    INLINE __m256i dims_of(const bf16* from, int dim) const {
        if (!from) return _mm256_setzero_si256();
        const __mmask16 mask = __mmask16(first_bits(args.head_dim - dim));
        if (args.value.dim == 1) return _mm256_maskz_loadu_epi16(mask, from + dim);
        bf16 some[16] = {};
        for (int d = dim; d < lesser(dim + 16, args.head_dim); ++d) some[d - dim] = from[d * args.value.dim];
        return _mm256_loadu_si256((const __m256i*)some);
    }

    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) const {
        const int row = args.order[task.first].row, head = task.head + h;
        const int first_step = int(all.begin) / 32, last_step = (int(all.end) + 31) / 32;
        const int64_t key_tile = dim_steps * kTile, value_step = dim_tiles * kTile;
        for (int s = first_step; s < last_step; ++s) {
            pack_keys(row, head, base, s * 32, all, keys + 2 * s * key_tile);
            pack_keys(row, head, base, s * 32 + 16, all, keys + (2 * s + 1) * key_tile);
            pack_values(row, head, base, s * 32, all, values + s * value_step);
        }
        for (int64_t tile = 0; tile < tiles.count; tile += 2) {
            const bf16* q = queries + h * query_size() + tile * key_tile;
            if (tile + 1 < tiles.count) rows_of<2>(q, tile, ranges, emit);
            else rows_of<1>(q, tile, ranges, emit);
        }
    }

    template <int M> void score_step(const bf16* q, int key) const {
        const int64_t key_tile = dim_steps * kTile * 2;  // bytes
        amx_product<M, 2>({(const char*)q, 64, kTile * 2, key_tile}, {(const char*)keys + key / 16 * key_tile, 64, kTile * 2, key_tile},
                          dim_steps, scores + key, kRow, height);
    }

    // M tiles of rows from `tile` on.
    template <int M, class Emit> void rows_of(const bf16* q, int64_t tile, const KeyRange* ranges, Emit&& emit) const {
        const int64_t value_step = dim_tiles * kTile * 2;  // bytes
        const int first_row = int(tiles.begin(tile)), last_row = int(tiles.begin(tile + M)) - 1;
        const KeyRange span = span_of(ranges + first_row / group, last_row / group - first_row / group + 1);
        const int from = int(span.begin) / 32 * 32, until = (int(span.end) + 31) / 32 * 32;
        for (int key = from; key < until; key += 32) score_step<M>(q, key);
        Softmax result[M][kTileHeight];
        {
            const FlushSubnormals rounding;
            for (int m = 0; m < M; ++m) {
                const int first = int(tiles.begin(tile + m)), count = tiles.height(tile + m);
                for (int r = 0; r < count; ++r) {
                    const KeyRange& own = ranges[(first + r) / group];
                    result[m][r] = softmax_to_bf16<bf16>(scores + (m * height + r) * kRow, int(own.begin), int(own.end), from,
                                                         until, args.scale, args.soft_cap);
                }
            }
        }
        const TileOperand weights{(const char*)scores + from * 2, kRow * 4, 64, height * kRow * 4};
        for (int n = 0; n < dim_tiles; n += 2) {
            const TileOperand value{(const char*)values + from / 32 * value_step + n * kTile * 2, 64, value_step, kTile * 2};
            if (n + 1 < dim_tiles) amx_product<M, 2>(weights, value, (until - from) / 32, part + n * 16, padded, height);
            else amx_product<M, 1>(weights, value, (until - from) / 32, part + n * 16, padded, height);
        }
        for (int m = 0; m < M; ++m)
            emit(int(tiles.begin(tile + m)), tiles.height(tile + m), result[m], part + m * height * padded);
    }
};
