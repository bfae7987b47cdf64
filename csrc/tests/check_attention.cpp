// Keys and values through the cache, and attention over them, against plain loops in fp64.
#include "checks.h"

#include "../shared_prefixes.h"

#include <string_view>
#include <utility>

namespace pagemill {

// Rows of several lengths over shuffled frames, some of which begin with those of the first row; slots that belong to
// nobody stay NaN.
void check_attention() {
    const DType type = any_type();
    const int rows = 1 + below(4), kv_heads = 1 + below(3), heads = kv_heads * (1 + below(5));
    const int dim = one_of({16, 64, 80, 96, 128, 256}), block = one_of({8, 16, 32, 64});
    const CacheTypes cached(dim);
    const bool transposed = below(4) != 0;
    const int beside = below(4) ? cached.beside() : 1;
    const int64_t window = below(3) ? 0 : 1 + below(60);
    const float soft_cap = below(3) ? 0.0f : 5.0f;
    const bool share = below(2), precise = cached.key == DType::u4 && below(2);
    const int64_t latest = 1 + below(200);  // tokens that have remainders
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
    GuardedCache cache(cached, (precise ? 2 : 1) * frames, kv_heads, block, dim, transposed || beside > 1, beside);
    Array<int32_t> tables(rows * entries), remainders(rows * entries), starts(rows + 1), contexts(rows);
    Array<int64_t> positions(tokens);
    std::vector<int> order(frames);
    for (int i = 0; i < frames; ++i) order[i] = i;
    for (int i = frames; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    for (int r = 0, frame = 0, token = 0, spare = frames; r < rows; ++r) {
        starts[r] = token;
        contexts[r] = lengths[r];
        for (int b = 0; b * block < lengths[r]; ++b)
            tables[r * entries + b] = b * block < shared[r] ? tables[b] : order[frame++];
        // Remainders that no query of the step adds have no frame.
        for (int b = 0; b * block < lengths[r]; ++b, ++spare)
            remainders[r * entries + b] = (b + 1) * block > lengths[r] - queries[r] - latest + 1 ? spare : -1;
        for (int q = 0; q < queries[r]; ++q) positions[token++] = lengths[r] - queries[r] + q;
    }
    starts[rows] = tokens;

    // Keys and values come in through `write_kv`, row by row.
    std::vector<std::vector<double>> keys(rows), values(rows), more_keys(rows), more_values(rows);
    std::vector<char> first_keys, first_values;
    where = "write_kv";
    for (int r = 0; r < rows; ++r) {
        const int64_t count = int64_t(lengths[r]) * kv_heads * dim;
        Numbers k(count, type, 1), v(count, type, 1);
        Array<int64_t> slots(lengths[r]), remainder_slots(lengths[r]);
        const size_t bytes = size_t(shared[r]) * kv_heads * dim * item_size(type);
        if (r == 0) {
            const char *all_keys = static_cast<char*>(k.data()), *all_values = static_cast<char*>(v.data());
            first_keys.assign(all_keys, all_keys + count * item_size(type));
            first_values.assign(all_values, all_values + count * item_size(type));
        } else if (bytes) {
            std::memcpy(k.data(), first_keys.data(), bytes);
            std::memcpy(v.data(), first_values.data(), bytes);
        }
        for (int t = 0; t < lengths[r]; ++t) {
            slots[t] = int64_t(tables[r * entries + t / block]) * block + t % block;
            const int64_t frame = remainders[r * entries + t / block];
            remainder_slots[t] = frame < 0 ? -1 : frame * block + t % block;
        }
        const int64_t token_size = int64_t(kv_heads) * dim;
        kernels().write_kv({.key = {k.data(), token_size, dim},
                            .value = {v.data(), token_size, dim},
                            .type = type,
                            .cache = cache.layer,
                            .slots = slots.data(),
                            .remainder_slots = precise ? remainder_slots.data() : nullptr,
                            .tokens = lengths[r]});
        for (int64_t i = 0; i < count; i += dim)
            for (const bool is_key : {true, false}) {
                std::vector<double>& all = (is_key ? keys : values)[r];
                for (const double each : cache.vector_at(is_key, slots[i / token_size], i / dim % kv_heads)) {
                    const double off = step_off(is_key ? cached.key : cached.value, is_key);
                    expect(each, (is_key ? k : v).get(int64_t(all.size())), off);
                    all.push_back(each);
                }
                std::vector<double>& more = (is_key ? more_keys : more_values)[r];
                const int64_t slot = remainder_slots[i / token_size];
                if (!precise || slot < 0) {
                    more.resize(more.size() + dim);
                    continue;
                }
                for (const double each : cache.vector_at(is_key, slot, i / dim % kv_heads)) {
                    const double off = step_off(is_key ? cached.key : cached.value, is_key) / 10;
                    expect(all[more.size()] + each, (is_key ? k : v).get(int64_t(more.size())), off);
                    more.push_back(each);
                }
            }
    }

    where = "attend";
    Numbers query(int64_t(tokens) * heads * dim, type, 1), output(int64_t(tokens) * heads * dim, type);
    Array<float> lse(size_t(tokens) * heads);
    AttentionArgs args{.query = {query.data(), int64_t(heads) * dim, dim},
                       .type = type,
                       .output = output.data(),
                       .lse = lse.data(),
                       .cache = cache.layer,
                       .tables = tables.data(),
                       .table_stride = entries,
                       .query_start = starts.data(),
                       .context_lens = contexts.data(),
                       .positions = positions.data(),
                       .rows = rows,
                       .heads = heads,
                       .scale = 0.3f,
                       .window = window,
                       .soft_cap = soft_cap,
                       .remainders = {precise ? remainders.data() : nullptr, entries, latest}};
    const SharedPrefixes prefixes(args, true);
    prefixes.apply(args);
    kernels().attend(args);
    // Over integers, queries and weights of 16 bits become bytes.
    const std::string_view isa = kernels().isa;
    const bool multiplies_bytes = isa == "avx512_vnni" || isa == "avx512_bf16" || isa == "amx_bf16";
    const bool in_bytes = multiplies_bytes && beside == 4 && is_integer(cached.key) && type != DType::f32;
    const double exact = tolerance(type) > tolerance(cached.key) ? tolerance(type) : tolerance(cached.key);
    const double off = in_bytes ? 4e-2 : exact;
    for (int r = 0; r < rows; ++r)
        for (int token = starts[r]; token < starts[r + 1]; ++token)
            for (int h = 0; h < heads; ++h) {
                const int64_t last = positions[token], first = window && last >= window ? last - window + 1 : 0;
                const int64_t at = (int64_t(token) * heads + h) * dim;
                const int kv = h / (heads / kv_heads);
                const auto seen = [&](const std::vector<double>& all, const std::vector<double>& more, int64_t j,
                                      int d) {
                    const int64_t i = (j * kv_heads + kv) * dim + d;
                    return precise && j > last - latest ? all[i] + more[i] : all[i];
                };
                std::vector<double> scores;
                double most = -HUGE_VAL, sum = 0;
                for (int64_t j = first; j <= last; ++j) {
                    double score = 0;
                    for (int d = 0; d < dim; ++d) score += query.get(at + d) * seen(keys[r], more_keys[r], j, d);
                    score *= args.scale;
                    if (soft_cap) score = soft_cap * std::tanh(score / soft_cap);
                    scores.push_back(score);
                    most = score > most ? score : most;
                }
                std::vector<double> mixed(dim);
                for (int64_t j = first; j <= last; ++j) {
                    const double weight = std::exp(scores[j - first] - most);
                    sum += weight;
                    for (int d = 0; d < dim; ++d) mixed[d] += weight * seen(values[r], more_values[r], j, d);
                }
                for (int d = 0; d < dim; ++d) expect(output.get(at + d), mixed[d] / sum, off);
                expect(lse[size_t(token) * heads + h], most + std::log(sum), off);
            }
}

}  // namespace pagemill
