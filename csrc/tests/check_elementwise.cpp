// What lies between the products: norms, gated activations, rotary embedding, and heads on their way to the cache.
#include "checks.h"

namespace pagemill {

void check_elementwise() {
    const DType type = any_type();
    const int64_t rows = 1 + below(9), n = 1 + below(300);
    Numbers x(rows * n, type, 1), y(rows * n, type);
    const Array<float> weight(n, 1);
    where = "rms_norm";
    kernels().rms_norm(x.data(), n, 0, weight.data(), 1e-5f, y.data(), type, rows, 1, n);
    for (int64_t r = 0; r < rows; ++r) {
        const double size = root_mean_square(n, [&](int64_t i) { return x.get(r * n + i); });
        for (int64_t i = 0; i < n; ++i) expect(y.get(r * n + i), x.get(r * n + i) / size * weight[i], tolerance(type));
    }
    where = "add_norm";
    Numbers delta(rows * n, type, 1), sum(rows * n, type);
    const Array<float> post(n, 1);
    const bool has_post = below(2);
    std::memcpy(sum.data(), x.data(), rows * n * item_size(type));
    kernels().add_norm(sum.data(), delta.data(), has_post ? post.data() : nullptr, weight.data(), 1e-5f, y.data(), type,
                       rows, n);
    for (int64_t r = 0; r < rows; ++r) {
        const double of_delta = root_mean_square(n, [&](int64_t i) { return delta.get(r * n + i); });
        const double of_sum = root_mean_square(n, [&](int64_t i) { return sum.get(r * n + i); });
        for (int64_t i = 0; i < n; ++i) {
            const double normed = delta.get(r * n + i) / of_delta * post[i];
            expect(sum.get(r * n + i), x.get(r * n + i) + (has_post ? normed : delta.get(r * n + i)), tolerance(type));
            expect(y.get(r * n + i), sum.get(r * n + i) / of_sum * weight[i], tolerance(type));
        }
    }
    where = "gated";
    Numbers both(rows * 2 * n, type, 4);
    kernels().gated(both.data(), 2 * n, y.data(), type, Activation::silu, rows, n);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) {
            const double gate = both.get(r * 2 * n + i), up = both.get(r * 2 * n + n + i);
            expect(y.get(r * n + i), gate / (1 + std::exp(-gate)) * up, tolerance(type));
        }
    where = "widen";
    const float cap = below(2) ? 0 : 3;
    Numbers wide(rows * n, DType::f32);
    kernels().widen(x.data(), type, cap, static_cast<float*>(wide.data()), rows * n);
    for (int64_t i = 0; i < rows * n; ++i)
        expect(wide.get(i), cap ? cap * std::tanh(x.get(i) / cap) : x.get(i), cap ? 1e-6 : 0);
    where = "rotate";
    const int64_t heads = 1 + below(4), half = 1 + below(64), dim = 2 * half + below(2) * 16;
    Numbers heads_of(rows * heads * dim, type, 1), turned(rows * heads * dim, type);
    const Array<float> cos(rows * half, 1), sin(rows * half, 1);
    std::memcpy(turned.data(), heads_of.data(), rows * heads * dim * item_size(type));
    kernels().rotate(turned.data(), heads * dim, dim, type, cos.data(), sin.data(), rows, heads, half);
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < dim; ++i) {
                const int64_t at = (r * heads + h) * dim;
                double want = heads_of.get(at + i);
                const int64_t angle = r * half + i % half;
                if (i < half) want = want * cos[angle] - heads_of.get(at + half + i) * sin[angle];
                else if (i < 2 * half) want = want * cos[angle] + heads_of.get(at + i - half) * sin[angle];
                expect(turned.get(at + i), want, tolerance(type));
            }
}

// Queries, keys and values of some tokens as a joined projection gives them.
void check_prepare_heads() {
    where = "prepare_heads";
    const DType type = any_type();
    const int64_t tokens = 1 + below(40), heads = 1 + below(5), kv_heads = 1 + below(3), half = 1 + below(64);
    const int64_t dim = 2 * half + below(2) * 16, row = (heads + 2 * kv_heads) * dim;
    const int block = one_of({8, 16, 32}), frames = int(tokens + block - 1) / block + 1;
    const bool norms = below(2), turns = below(4);
    Numbers qkv(tokens * row, type, 1);
    const Array<float> q_norm(dim, 1), k_norm(dim, 1), cos(100 * half, 1), sin(100 * half, 1);
    const Array<int64_t> positions(tokens), slots(tokens);
    std::vector<double> before(tokens * row);
    for (int64_t i = 0; i < tokens * row; ++i) before[i] = qkv.get(i);
    const CacheTypes cached{int(dim)};
    const int beside = dim % cached.beside() == 0 && below(4) ? cached.beside() : 1;
    GuardedCache cache(cached, frames, int(kv_heads), block, int(dim), true, beside);
    const int64_t start = below(block);
    for (int64_t t = 0; t < tokens; ++t) {
        positions[t] = below(100);
        slots[t] = below(8) ? start + t : -1;
    }
    char* first_key = static_cast<char*>(qkv.data()) + heads * dim * item_size(type);
    kernels().prepare_heads({.qkv = qkv.data(),
                             .heads = int(heads),
                             .q_norm = norms ? q_norm.data() : nullptr,
                             .k_norm = norms ? k_norm.data() : nullptr,
                             .eps = 1e-5f,
                             .cos = turns ? cos.data() : nullptr,
                             .sin = turns ? sin.data() : nullptr,
                             .half = half,
                             .positions = positions.data(),
                             .write = {.key = {first_key, row, dim},
                                       .value = {first_key + kv_heads * dim * item_size(type), row, dim},
                                       .type = type,
                                       .cache = cache.layer,
                                       .slots = slots.data(),
                                       .tokens = tokens}});
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t h = 0; h < heads + 2 * kv_heads; ++h) {
            const bool is_value = h >= heads + kv_heads, is_query = h < heads;
            std::vector<double> want(before.begin() + t * row + h * dim, before.begin() + t * row + (h + 1) * dim);
            if (norms && !is_value) {
                const double size = root_mean_square(dim, [&](int64_t i) { return want[i]; });
                for (int64_t i = 0; i < dim; ++i) want[i] *= (is_query ? q_norm : k_norm)[i] / size;
            }
            for (int64_t i = 0; turns && !is_value && i < half; ++i) {
                const int64_t angle = positions[t] * half + i;
                const double a = want[i], b = want[half + i], c = cos[angle], s = sin[angle];
                want[i] = a * c - b * s;
                want[half + i] = b * c + a * s;
            }
            double largest = 0;
            for (int64_t i = 0; i < dim; ++i) {
                const double got = qkv.get(t * row + h * dim + i);
                expect(got, want[i], 2 * tolerance(type));
                largest = std::fabs(got) > largest ? std::fabs(got) : largest;
            }
            const int64_t slot = slots[t];
            if (is_query || slot < 0) continue;
            const DType stored_as = is_value ? cached.value : cached.key;
            const double off = is_integer(stored_as)   ? 1.1 * largest * step_off(stored_as, !is_value)
                               : stored_as > DType::u4 ? step_off(stored_as, !is_value)
                                                       : tolerance(stored_as);
            const std::vector<double> stored = cache.vector_at(!is_value, slot, (h - heads) % kv_heads);
            for (int64_t i = 0; i < dim; ++i) expect(stored[i], qkv.get(t * row + h * dim + i), off);
        }
}

}  // namespace pagemill
