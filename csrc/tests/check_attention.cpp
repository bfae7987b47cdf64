// Keys and values through the cache, and attention over them, against plain loops in fp64.
#include "checks.h"

#include "../shared_prefixes.h"

#include <utility>

namespace pagemill {

// Rows of several lengths over shuffled frames, some of which begin with those of the first row; slots that belong to
// nobody stay NaN.
void check_attention() {
    const DType type = any_type(), cached = any_cache_type();
    const int rows = 1 + below(4), kv_heads = 1 + below(3), heads = kv_heads * (1 + below(5));
    const int dim = one_of({16, 64, 80, 96, 128, 256}), block = one_of({8, 16, 32, 64});
    const bool transposed = below(4) != 0, pairs = cached == DType::bf16 && below(4) != 0;
    const int64_t window = below(3) ? 0 : 1 + below(60);
    const float soft_cap = below(3) ? 0.0f : 5.0f;
    const bool share = below(2);
    std::vector<int> lengths(rows), queries(rows), shared(rows);
    int frames = 0, entries = 1, tokens = 0;
    for (int r = 0; r < rows; ++r) {
        lengths[r] = below(5) ? 1 + below(90) : 200 + below(400);
        if (share) lengths[r] += 300;
        queries[r] = below(2) ? 1 : 1 + below(lengths[r] < 40 ? lengths[r] : 40);
        if (share && r > 0) {
            const int before = lengths[r] - queries[r], first = lengths[0] - queries[0];
            shared[r] = (before < first ? before : first) / block * block;
        }
        const int used = (lengths[r] + block - 1) / block;
        frames += used;
        tokens += queries[r];
        entries = used > entries ? used : entries;
    }
    const int64_t per_head = int64_t(block) * dim, per_frame = kv_heads * per_head;
    Guarded key(frames * per_frame, cached), value(frames * per_frame, cached);
    Guarded key_scale(frames * kv_heads * block, DType::f32), value_scale(frames * kv_heads * block, DType::f32);
    CacheView key_view{key.data(),
                       per_frame,
                       per_head,
                       transposed ? 1 : dim,
                       transposed ? block : 1,
                       false,
                       key_scale.as<float>(),
                       int64_t(kv_heads) * block,
                       block};
    CacheView value_view{
        value.data(), per_frame, per_head, dim, 1, false, value_scale.as<float>(), int64_t(kv_heads) * block, block};
    if (pairs) {
        key_view.token = value_view.dim = 2;
        key_view.dim = 2 * block;
        value_view.token = 2 * dim;
        key_view.pairs = value_view.pairs = true;
    }
    Guarded tables(sizeof(int32_t) * rows * entries), starts(sizeof(int32_t) * (rows + 1)),
        contexts(sizeof(int32_t) * rows);
    Guarded positions(sizeof(int64_t) * tokens);
    std::vector<int> order(frames);
    for (int i = 0; i < frames; ++i) order[i] = i;
    for (int i = frames; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    for (int r = 0, frame = 0, token = 0; r < rows; ++r) {
        starts.as<int32_t>()[r] = token;
        contexts.as<int32_t>()[r] = lengths[r];
        for (int b = 0; b * block < lengths[r]; ++b)
            tables.as<int32_t>()[r * entries + b] = b * block < shared[r] ? tables.as<int32_t>()[b] : order[frame++];
        for (int q = 0; q < queries[r]; ++q) positions.as<int64_t>()[token++] = lengths[r] - queries[r] + q;
    }
    starts.as<int32_t>()[rows] = tokens;

    // Keys and values come in through `write_kv`, row by row.
    std::vector<std::vector<double>> keys(rows), values(rows);
    std::vector<char> first_keys, first_values;
    where = "write_kv";
    for (int r = 0; r < rows; ++r) {
        const int64_t count = int64_t(lengths[r]) * kv_heads * dim;
        Guarded k(count, type), v(count, type), slots(sizeof(int64_t) * lengths[r]);
        k.fill(random_source);
        v.fill(random_source);
        const size_t bytes = size_t(shared[r]) * kv_heads * dim * item_size(type);
        if (r == 0) {
            const char *all_keys = k.as<char>(), *all_values = v.as<char>();
            first_keys.assign(all_keys, all_keys + count * item_size(type));
            first_values.assign(all_values, all_values + count * item_size(type));
        } else if (bytes) {
            std::memcpy(k.data(), first_keys.data(), bytes);
            std::memcpy(v.data(), first_values.data(), bytes);
        }
        for (int t = 0; t < lengths[r]; ++t)
            slots.as<int64_t>()[t] = int64_t(tables.as<int32_t>()[r * entries + t / block]) * block + t % block;
        WriteArgs write{};
        write.key = k.data();
        write.value = v.data();
        write.type = type;
        write.key_token = write.value_token = int64_t(kv_heads) * dim;
        write.key_head = write.value_head = dim;
        write.key_cache = key_view;
        write.value_cache = value_view;
        write.cache_type = cached;
        write.slots = slots.as<int64_t>();
        write.tokens = lengths[r];
        write.kv_heads = kv_heads;
        write.head_dim = dim;
        write.block_size = block;
        kernels().write_kv(write);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t slot = slots.as<int64_t>()[i / (kv_heads * dim)];
            const int64_t slot_head = slot / block * kv_heads + i / dim % kv_heads,
                          scale_at = slot_head * block + slot % block;
            const bool scaled = cached == DType::i8;
            const int64_t t = slot % block, d = i % dim;
            const int64_t key_at = pairs ? t * 2 + d / 2 * key_view.dim + d % 2 : t * key_view.token + d * key_view.dim;
            const int64_t value_at = pairs ? t / 2 * value_view.token + t % 2 + d * 2 : t * dim + d;
            keys[r].push_back(key.get(slot_head * per_head + key_at) * (scaled ? key_scale.get(scale_at) : 1));
            values[r].push_back(value.get(slot_head * per_head + value_at) * (scaled ? value_scale.get(scale_at) : 1));
            expect(keys[r].back(), k.get(i), scaled ? 1.0 / 250 : 0);  // half a step of the largest, which is at most 1
            expect(values[r].back(), v.get(i), scaled ? 1.0 / 250 : 0);
        }
    }

    where = "attend";
    Guarded query(int64_t(tokens) * heads * dim, type), output(int64_t(tokens) * heads * dim, type);
    Guarded lse(size_t(tokens) * heads, DType::f32);
    query.fill(random_source);
    AttentionArgs args{};
    args.query = query.data();
    args.query_type = type;
    args.query_token = int64_t(heads) * dim;
    args.query_head = dim;
    args.output = output.data();
    args.lse = lse.as<float>();
    args.key = key_view;
    args.value = value_view;
    args.cache_type = cached;
    args.tables = tables.as<int32_t>();
    args.table_stride = entries;
    args.query_start = starts.as<int32_t>();
    args.context_lens = contexts.as<int32_t>();
    args.positions = positions.as<int64_t>();
    args.rows = rows;
    args.heads = heads;
    args.kv_heads = kv_heads;
    args.head_dim = dim;
    args.block_size = block;
    args.scale = 0.3f;
    args.window = window;
    args.soft_cap = soft_cap;
    const SharedPrefixes prefixes(args, true);
    prefixes.apply(args);
    kernels().attend(args);
    for (int r = 0; r < rows; ++r)
        for (int token = starts.as<int32_t>()[r]; token < starts.as<int32_t>()[r + 1]; ++token)
            for (int h = 0; h < heads; ++h) {
                const int64_t last = positions.as<int64_t>()[token],
                              first = window && last >= window ? last - window + 1 : 0;
                const int64_t at = (int64_t(token) * heads + h) * dim;
                const int kv = h / (heads / kv_heads);
                std::vector<double> scores;
                double most = -HUGE_VAL, sum = 0;
                for (int64_t j = first; j <= last; ++j) {
                    double score = 0;
                    for (int d = 0; d < dim; ++d) score += query.get(at + d) * keys[r][(j * kv_heads + kv) * dim + d];
                    score *= args.scale;
                    if (soft_cap) score = soft_cap * std::tanh(score / soft_cap);
                    scores.push_back(score);
                    most = score > most ? score : most;
                }
                std::vector<double> mixed(dim);
                for (int64_t j = first; j <= last; ++j) {
                    const double weight = std::exp(scores[j - first] - most);
                    sum += weight;
                    for (int d = 0; d < dim; ++d) mixed[d] += weight * values[r][(j * kv_heads + kv) * dim + d];
                }
                const double off = tolerance(type) > tolerance(cached) ? tolerance(type) : tolerance(cached);
                for (int d = 0; d < dim; ++d) expect(output.get(at + d), mixed[d] / sum, off);
                expect(lse.get(size_t(token) * heads + h), most + std::log(sum), off);
            }
}

}  // namespace pagemill
