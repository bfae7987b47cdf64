// Runs every kernel of every instruction set that this CPU has on random shapes against plain loops in fp64, from several
// threads at once: what `make sanitize` runs under the sanitizers. They do not see what tiles read, so every operand ends
// where its last page does, and the next page can not be touched.
#include "../kernels.h"
#include "../shared_prefixes.h"
#include "../threads.h"

#include "checks.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <tuple>
#include <utility>

using namespace pagemill;

namespace {

void check_linear() {
    const DType stored = any_type(), type = any_type();
    const int64_t n = 1 + below(150), k = 1 + below(700), m = below(4) ? 1 + below(20) : 1 + below(90), gap = below(3) * 32;
    where = "linear";
    Guarded weight(n * k, stored), bias(n, DType::f32), x((m - 1) * (k + gap) + k, type), y((m - 1) * n + n, type);
    weight.fill(random_source);
    if (stored == DType::bf16)  // other exponents, a few or too many to be patched
        for (int64_t i = below(2) ? 0 : n * k - 1 - below(int(std::min<int64_t>(n * k, 8))); i < n * k; ++i)
            weight.set(i, std::ldexp(weight.get(i), -below(60)));
    bias.fill(random_source);
    x.fill(random_source);
    PackedLinear packed;
    packed.n = n;
    packed.k = k;
    packed.type = stored;
    if (!kernels().pack_linear(packed, weight.data(), bias.as<float>(), type)) std::abort();
    kernels().linear(packed, x.data(), k + gap, y.data(), n, type, m);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t out = 0; out < n; ++out) {
            double sum = bias.get(out);
            for (int64_t i = 0; i < k; ++i) sum += x.get(row * (k + gap) + i) * weight.get(out * k + i);
            expect(y.get(row * n + out), sum, tolerance(type));
        }
    Guarded likeliest(sizeof(int64_t) * m);
    kernels().linear_likeliest(packed, x.data(), k + gap, type, m, likeliest.as<int64_t>());
    for (int64_t row = 0; row < m; ++row) {
        int64_t best = 0;
        for (int64_t out = 1; out < n; ++out)
            if (y.get(row * n + out) > y.get(row * n + best)) best = out;
        expect(likeliest.as<int64_t>()[row], best, 0);
    }
    const DType wanted = below(2) ? stored : DType::f32;
    Guarded ids(sizeof(int64_t)), embedded(k, wanted);
    *ids.as<int64_t>() = below(int(n));
    kernels().embed_packed(packed, ids.as<int64_t>(), 1.0f, embedded.data(), wanted, 1);
    for (int64_t i = 0; i < k; ++i) expect(embedded.get(i), weight.get(*ids.as<int64_t>() * k + i), 0);
    release(packed);
}

// fp32 weights held as integers.
void check_affine() {
    const Format format = below(2) ? Format::affine4 : Format::affine8;
    const int64_t n = 1 + below(150), k = 32 * (1 + below(20)), m = 1 + below(below(2) ? 20 : 90);
    where = "affine";
    Guarded values(n * k), scale(n * k / 32, DType::f32), low(n * k / 32, DType::f32), x(m * k, DType::f32), y(m * n, DType::f32);
    for (int64_t i = 0; i < n * k; ++i) values.as<uint8_t>()[i] = uint8_t(below(format == Format::affine4 ? 16 : 256));
    scale.fill(random_source, 0.125);
    low.fill(random_source);
    for (int64_t i = 0; i < n * k / 32; ++i) scale.set(i, std::round(scale.get(i) * 1024) / 1024);  // products are exact
    x.fill(random_source);
    PackedLinear packed;
    packed.n = n;
    packed.k = k;
    packed.format = format;
    if (!kernels().pack_affine(packed, {values.as<uint8_t>(), scale.as<float>(), low.as<float>(), nullptr})) std::abort();
    const auto weight = [&](int64_t i) {
        return double(scale.as<float>()[i / 32] * float(values.as<uint8_t>()[i]) + low.as<float>()[i / 32]);
    };
    kernels().linear(packed, x.data(), k, y.data(), n, DType::f32, m);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t out = 0; out < n; ++out) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) sum += x.get(row * k + i) * weight(out * k + i);
            expect(y.get(row * n + out), sum, 64 * tolerance(DType::f32));
        }
    Guarded ids(sizeof(int64_t)), embedded(k, DType::f32);
    *ids.as<int64_t>() = below(int(n));
    kernels().embed_packed(packed, ids.as<int64_t>(), 1.0f, embedded.data(), DType::f32, 1);
    for (int64_t i = 0; i < k; ++i) expect(embedded.get(i), weight(*ids.as<int64_t>() * k + i), 0);
    release(packed);
}

void check_mlp() {
    const int64_t k = 1 + below(700), half = 32 * (1 + below(4)), n = 1 + below(100), m = 1 + below(90), gap = below(3) * 32;
    const Activation activation = below(2) ? Activation::silu : Activation::gelu_tanh;
    const DType types[] = {any_type(), any_type()};
    where = "mlp";
    Guarded first(2 * half * k, types[0]), first_bias(2 * half, DType::f32), second(n * half, types[1]);
    Guarded second_bias(n, DType::f32), x((m - 1) * (k + gap) + k, DType::f32), y(m * n, DType::f32);
    first.fill(random_source, 0.125);
    for (Guarded* each : {&first_bias, &second, &second_bias, &x}) each->fill(random_source);
    PackedLinear gate_up, down;
    gate_up.n = 2 * half;
    gate_up.k = k;
    gate_up.type = types[0];
    down.n = n;
    down.k = half;
    down.type = types[1];
    if (!kernels().pack_linear(gate_up, first.data(), first_bias.as<float>(), DType::f32)) std::abort();
    if (!kernels().pack_linear(down, second.data(), second_bias.as<float>(), DType::f32)) std::abort();
    if (kernels().mlp(gate_up, down, x.data(), k + gap, y.data(), n, DType::f32, activation, m)) {
        for (int64_t row = 0; row < m; ++row) {
            std::vector<double> sums(2 * half), gated(half);
            for (int64_t i = 0; i < 2 * half; ++i) {
                sums[i] = first_bias.get(i);
                for (int64_t j = 0; j < k; ++j) sums[i] += x.get(row * (k + gap) + j) * first.get(i * k + j);
            }
            for (int64_t i = 0; i < half; ++i) {
                const double g = sums[i], cube = 0.7978845608 * (g + 0.044715 * g * g * g);
                gated[i] = (activation == Activation::silu ? g / (1 + std::exp(-g)) : g * (1 + std::tanh(cube)) / 2) * sums[half + i];
            }
            for (int64_t out = 0; out < n; ++out) {
                double sum = second_bias.get(out);
                for (int64_t i = 0; i < half; ++i) sum += gated[i] * second.get(out * half + i);
                expect(y.get(row * n + out), sum, tolerance(DType::f32));
            }
        }
    } else if (m > 14) {
        expect(0, 1, 0);  // these operands have a kernel
    }
    release(gate_up);
    release(down);
}

// Rows of several lengths over shuffled frames, some of which begin with those of the first row; slots that belong to nobody stay NaN.
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
    CacheView key_view{key.data(), per_frame, per_head, transposed ? 1 : dim, transposed ? block : 1, false,
                       key_scale.as<float>(), int64_t(kv_heads) * block, block};
    CacheView value_view{value.data(), per_frame, per_head, dim, 1, false, value_scale.as<float>(), int64_t(kv_heads) * block, block};
    if (pairs) {
        key_view.token = value_view.dim = 2;
        key_view.dim = 2 * block;
        value_view.token = 2 * dim;
        key_view.pairs = value_view.pairs = true;
    }
    Guarded tables(sizeof(int32_t) * rows * entries), starts(sizeof(int32_t) * (rows + 1)), contexts(sizeof(int32_t) * rows);
    Guarded positions(sizeof(int64_t) * tokens);
    std::vector<int> order(frames);
    for (int i = 0; i < frames; ++i) order[i] = i;
    for (int i = frames; i > 1; --i) std::swap(order[i - 1], order[below(i)]);
    for (int r = 0, frame = 0, token = 0; r < rows; ++r) {
        starts.as<int32_t>()[r] = token;
        contexts.as<int32_t>()[r] = lengths[r];
        for (int b = 0; b * block < lengths[r]; ++b) tables.as<int32_t>()[r * entries + b] = b * block < shared[r] ? tables.as<int32_t>()[b] : order[frame++];
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
            const int64_t slot_head = slot / block * kv_heads + i / dim % kv_heads, scale_at = slot_head * block + slot % block;
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
                const int64_t last = positions.as<int64_t>()[token], first = window && last >= window ? last - window + 1 : 0;
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

void check_elementwise() {
    const DType type = any_type();
    const int64_t rows = 1 + below(9), n = 1 + below(300);
    Guarded x(rows * n, type), y(rows * n, type), weight(n, DType::f32);
    x.fill(random_source);
    weight.fill(random_source);
    where = "rms_norm";
    kernels().rms_norm(x.data(), n, 0, weight.as<float>(), 1e-5f, y.data(), type, rows, 1, n);
    for (int64_t r = 0; r < rows; ++r) {
        double squares = 0;
        for (int64_t i = 0; i < n; ++i) squares += x.get(r * n + i) * x.get(r * n + i);
        for (int64_t i = 0; i < n; ++i)
            expect(y.get(r * n + i), x.get(r * n + i) / std::sqrt(squares / n + 1e-5) * weight.get(i), tolerance(type));
    }
    where = "add_norm";
    Guarded delta(rows * n, type), sum(rows * n, type), post(n, DType::f32);
    const bool has_post = below(2);
    delta.fill(random_source);
    post.fill(random_source);
    std::memcpy(sum.data(), x.data(), rows * n * item_size(type));
    kernels().add_norm(sum.data(), delta.data(), has_post ? post.as<float>() : nullptr, weight.as<float>(), 1e-5f, y.data(), type,
                       rows, n);
    for (int64_t r = 0; r < rows; ++r) {
        double of_delta = 0, of_sum = 0;
        for (int64_t i = 0; i < n; ++i) {
            of_delta += delta.get(r * n + i) * delta.get(r * n + i);
            of_sum += sum.get(r * n + i) * sum.get(r * n + i);
        }
        for (int64_t i = 0; i < n; ++i) {
            const double normed = delta.get(r * n + i) / std::sqrt(of_delta / n + 1e-5) * post.get(i);
            expect(sum.get(r * n + i), x.get(r * n + i) + (has_post ? normed : delta.get(r * n + i)), tolerance(type));
            expect(y.get(r * n + i), sum.get(r * n + i) / std::sqrt(of_sum / n + 1e-5) * weight.get(i), tolerance(type));
        }
    }
    where = "gated";
    Guarded both(rows * 2 * n, type);
    both.fill(random_source, 4);
    kernels().gated(both.data(), 2 * n, y.data(), type, Activation::silu, rows, n);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) {
            const double gate = both.get(r * 2 * n + i), up = both.get(r * 2 * n + n + i);
            expect(y.get(r * n + i), gate / (1 + std::exp(-gate)) * up, tolerance(type));
        }
    where = "rotate";
    const int64_t heads = 1 + below(4), half = 1 + below(64), dim = 2 * half + below(2) * 16;
    Guarded heads_of(rows * heads * dim, type), turned(rows * heads * dim, type), cos(rows * half, DType::f32), sin(rows * half, DType::f32);
    heads_of.fill(random_source);
    cos.fill(random_source);
    sin.fill(random_source);
    std::memcpy(turned.data(), heads_of.data(), rows * heads * dim * item_size(type));
    kernels().rotate(turned.data(), heads * dim, dim, type, cos.as<float>(), sin.as<float>(), rows, heads, half);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < dim; ++i) {
                const int64_t at = (r * heads + h) * dim;
                double want = heads_of.get(at + i);
                if (i < half) want = want * cos.get(r * half + i) - heads_of.get(at + half + i) * sin.get(r * half + i);
                else if (i < 2 * half)
                    want = want * cos.get(r * half + i - half) + heads_of.get(at + i - half) * sin.get(r * half + i - half);
                expect(turned.get(at + i), want, tolerance(type));
            }
}

// Queries, keys and values of some tokens as a joined projection gives them.
void check_prepare_heads() {
    where = "prepare_heads";
    const DType type = any_type(), cached = any_cache_type();
    const int64_t tokens = 1 + below(40), heads = 1 + below(5), kv_heads = 1 + below(3), half = 1 + below(64);
    const int64_t dim = 2 * half + below(2) * 16, row = (heads + 2 * kv_heads) * dim;
    const int block = one_of({8, 16, 32}), frames = int(tokens + block - 1) / block + 1;
    const bool norms = below(2), turns = below(4);
    const float eps = 1e-5f;
    Guarded qkv(tokens * row, type), q_norm(dim, DType::f32), k_norm(dim, DType::f32);
    Guarded cos(100 * half, DType::f32), sin(100 * half, DType::f32), positions(sizeof(int64_t) * tokens);
    for (Guarded* each : {&qkv, &q_norm, &k_norm, &cos, &sin}) each->fill(random_source);
    std::vector<double> before(tokens * row);
    for (int64_t i = 0; i < tokens * row; ++i) before[i] = qkv.get(i);
    const int64_t per_head = int64_t(block) * dim, per_frame = kv_heads * per_head;
    Guarded keys(frames * per_frame, cached), values(frames * per_frame, cached);
    Guarded key_scale(frames * kv_heads * block, DType::f32), value_scale(frames * kv_heads * block, DType::f32);
    Guarded slots(sizeof(int64_t) * tokens);
    const int64_t start = below(block);
    for (int64_t t = 0; t < tokens; ++t) {
        positions.as<int64_t>()[t] = below(100);
        slots.as<int64_t>()[t] = below(8) ? start + t : -1;
    }
    HeadsArgs args{};
    args.qkv = qkv.data();
    args.heads = int(heads);
    if (norms) {
        args.q_norm = q_norm.as<float>();
        args.k_norm = k_norm.as<float>();
    }
    args.eps = eps;
    if (turns) {
        args.cos = cos.as<float>();
        args.sin = sin.as<float>();
    }
    args.half = half;
    args.positions = positions.as<int64_t>();
    char* first_key = static_cast<char*>(qkv.data()) + heads * dim * item_size(type);
    args.write.key = first_key;
    args.write.value = first_key + kv_heads * dim * item_size(type);
    args.write.type = type;
    args.write.key_token = args.write.value_token = row;
    args.write.key_head = args.write.value_head = dim;
    const bool pairs = cached == DType::bf16 && dim % 2 == 0 && block % 2 == 0 && below(4) != 0;
    const int64_t side = pairs ? 2 : 1;
    args.write.key_cache = {keys.data(), per_frame, per_head, side, side * block, pairs, key_scale.as<float>(), kv_heads * block, block};
    args.write.value_cache = {values.data(), per_frame, per_head, side * dim, side, pairs, value_scale.as<float>(), kv_heads * block,
                              block};
    args.write.cache_type = cached;
    args.write.slots = slots.as<int64_t>();
    args.write.tokens = tokens;
    args.write.kv_heads = int(kv_heads);
    args.write.head_dim = int(dim);
    args.write.block_size = block;
    kernels().prepare_heads(args);
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
            const bool is_value = h >= heads + kv_heads, is_query = h < heads;
            std::vector<double> want(before.begin() + t * row + h * dim, before.begin() + t * row + (h + 1) * dim);
            if (norms && !is_value) {
                double squares = 0;
                for (double x : want) squares += x * x;
                for (int64_t i = 0; i < dim; ++i) want[i] *= (is_query ? q_norm : k_norm).get(i) / std::sqrt(squares / dim + eps);
            }
            for (int64_t i = 0; turns && !is_value && i < half; ++i) {
                const double a = want[i], b = want[half + i];
                const double c = cos.get(positions.as<int64_t>()[t] * half + i), s = sin.get(positions.as<int64_t>()[t] * half + i);
                want[i] = a * c - b * s;
                want[half + i] = b * c + a * s;
            }
            double largest = 0;
            for (int64_t i = 0; i < dim; ++i) {
                const double got = qkv.get(t * row + h * dim + i);
                expect(got, want[i], 2 * tolerance(type));
                largest = std::fabs(got) > largest ? std::fabs(got) : largest;
            }
            const int64_t slot = slots.as<int64_t>()[t];
            if (is_query || slot < 0) continue;
            const int64_t at = slot / block * kv_heads + (h - heads) % kv_heads, offset = slot % block;
            for (int64_t i = 0; i < dim; ++i) {
                const int64_t value_at = (offset / side * dim + i) * side + offset % side, key_at = (i / side * block + offset) * side + i % side;
                const double stored = is_value ? values.get(at * per_head + value_at) : keys.get(at * per_head + key_at);
                const double scale = cached != DType::i8 ? 1 : (is_value ? value_scale : key_scale).get(at * block + offset);
                expect(stored * scale, qkv.get(t * row + h * dim + i), cached == DType::i8 ? largest / 250 : tolerance(cached));
            }
        }
}

void check_dequantize() {
    where = "dequantize";
    const int64_t blocks = 1 + below(3000);
    Guarded stored(size_t(blocks * 34)), wide(blocks * 32, DType::f32);
    for (int64_t b = 0; b < blocks; ++b) {
        auto* at = stored.as<unsigned char>() + 34 * b;
        at[0] = 0;
        at[1] = 0x38;  // 0.5
        for (int i = 0; i < 32; ++i) at[2 + i] = static_cast<unsigned char>(random_source());
    }
    if (!dequantize(8, stored.data(), wide.as<float>(), blocks * 32)) std::abort();
    for (int64_t i = 0; i < blocks * 32; ++i)
        expect(wide.get(i), 0.5 * static_cast<signed char>(stored.as<unsigned char>()[i / 32 * 34 + 2 + i % 32]), 0);
    for (const auto& [format, bytes, weights] : {std::tuple{2, 18, 32}, {3, 20, 32}, {6, 22, 32}, {7, 24, 32}, {12, 144, 256},
                                                 {13, 176, 256}, {14, 210, 256}}) {
        Guarded all(size_t(bytes) * 9), out(size_t(weights) * 9, DType::f32);
        if (!dequantize(format, all.data(), out.as<float>(), weights * 9)) std::abort();
    }
}

// Callers that compete for the pool, while its size changes.
void check_threads() {
    auto call = [](int times) {
        for (int i = 0; i < times; ++i) {
            Exclusive exclusive;
            if (i % 16 == 0) set_num_threads(1 + i / 16 % 4);
            std::vector<int64_t> done(257);
            auto body = [&](int64_t task, int thread) {
                static_cast<char*>(thread_scratch(thread, 100 + size_t(task)))[0] = 1;
                done[task] += task;
            };
            parallel(int64_t(done.size()), body);
            for (size_t task = 0; task < done.size(); ++task)
                if (done[task] != int64_t(task)) std::abort();
        }
    };
    std::thread other(call, 200);
    call(200);
    other.join();
}

}  // namespace

int main(int count, char** arguments) {
    const int rounds = count > 1 ? std::atoi(arguments[1]) : 50;
    const uint32_t seed = count > 2 ? uint32_t(std::strtoul(arguments[2], nullptr, 10)) : std::random_device{}();
    std::fprintf(stderr, "seed %u\n", seed);
    random_source.seed(seed);
    check_threads();
    for (auto name = available_isas(); *name; ++name) {
        use_isa(*name);
        for (int round = 0; round < rounds; ++round) {
            Exclusive exclusive;
            set_num_threads(1 + round % 3);
            check_linear();
            check_affine();
            check_mlp();
            check_attention();
            check_elementwise();
            check_prepare_heads();
            check_quantized();
            check_sampling();
            check_dequantize();
        }
        std::printf("%s: %d rounds\n", *name, rounds);
    }
}
