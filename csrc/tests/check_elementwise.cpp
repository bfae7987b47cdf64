// What lies between the products: norms, gated activations, rotary embedding, and heads on their way to the cache.
#include "checks.h"

namespace pagemill {

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
    kernels().add_norm(sum.data(), delta.data(), has_post ? post.as<float>() : nullptr, weight.as<float>(), 1e-5f,
                       y.data(), type, rows, n);
    for (int64_t r = 0; r < rows; ++r) {
        double of_delta = 0, of_sum = 0;
        for (int64_t i = 0; i < n; ++i) {
            of_delta += delta.get(r * n + i) * delta.get(r * n + i);
            of_sum += sum.get(r * n + i) * sum.get(r * n + i);
        }
        for (int64_t i = 0; i < n; ++i) {
            const double normed = delta.get(r * n + i) / std::sqrt(of_delta / n + 1e-5) * post.get(i);
            expect(sum.get(r * n + i), x.get(r * n + i) + (has_post ? normed : delta.get(r * n + i)), tolerance(type));
            expect(y.get(r * n + i), sum.get(r * n + i) / std::sqrt(of_sum / n + 1e-5) * weight.get(i),
                   tolerance(type));
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
    Guarded heads_of(rows * heads * dim, type), turned(rows * heads * dim, type), cos(rows * half, DType::f32),
        sin(rows * half, DType::f32);
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
                    want = want * cos.get(r * half + i - half) +
                           heads_of.get(at + i - half) * sin.get(r * half + i - half);
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
    const bool pairs = cached == DType::bf16 && dim % 2 == 0 && below(4) != 0;
    GuardedCache cache(cached, frames, int(kv_heads), block, int(dim), true, pairs);
    Guarded slots(sizeof(int64_t) * tokens);
    const int64_t start = below(block);
    for (int64_t t = 0; t < tokens; ++t) {
        positions.as<int64_t>()[t] = below(100);
        slots.as<int64_t>()[t] = below(8) ? start + t : -1;
    }
    char* first_key = static_cast<char*>(qkv.data()) + heads * dim * item_size(type);
    kernels().prepare_heads({.qkv = qkv.data(),
                             .heads = int(heads),
                             .q_norm = norms ? q_norm.as<float>() : nullptr,
                             .k_norm = norms ? k_norm.as<float>() : nullptr,
                             .eps = eps,
                             .cos = turns ? cos.as<float>() : nullptr,
                             .sin = turns ? sin.as<float>() : nullptr,
                             .half = half,
                             .positions = positions.as<int64_t>(),
                             .write = {.key = {first_key, row, dim},
                                       .value = {first_key + kv_heads * dim * item_size(type), row, dim},
                                       .type = type,
                                       .cache = cache.layer,
                                       .slots = slots.as<int64_t>(),
                                       .tokens = tokens}});
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
            const bool is_value = h >= heads + kv_heads, is_query = h < heads;
            std::vector<double> want(before.begin() + t * row + h * dim, before.begin() + t * row + (h + 1) * dim);
            if (norms && !is_value) {
                double squares = 0;
                for (double x : want) squares += x * x;
                for (int64_t i = 0; i < dim; ++i)
                    want[i] *= (is_query ? q_norm : k_norm).get(i) / std::sqrt(squares / dim + eps);
            }
            for (int64_t i = 0; turns && !is_value && i < half; ++i) {
                const double a = want[i], b = want[half + i];
                const double c = cos.get(positions.as<int64_t>()[t] * half + i),
                             s = sin.get(positions.as<int64_t>()[t] * half + i);
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
            for (int64_t i = 0; i < dim; ++i) {
                const int64_t head = (h - heads) % kv_heads;
                const double stored = is_value ? cache.value_at(slot, head, i) : cache.key_at(slot, head, i);
                expect(stored, qkv.get(t * row + h * dim + i), cached == DType::i8 ? largest / 250 : tolerance(cached));
            }
        }
}

}  // namespace pagemill
