// Drawn tokens must be among those that top_k, top_p and min_p keep; log probabilities and ranks against fp64.
#include "checks.h"

#include <algorithm>
#include <numeric>

namespace pagemill {
namespace {

struct Row {
    std::vector<double> logits;
    double most = -HUGE_VAL;
    bool finite = true;

    double weight(int64_t i, double temperature) const { return std::exp((logits[i] - most) / temperature); }

    void expect_kept(int64_t token, double temperature, int64_t top_k, double top_p, double min_p) const {
        if (token < 0 || token >= int64_t(logits.size()) || logits[token] == -HUGE_VAL)
            expect(double(token), HUGE_VAL, 0);
        double all = 0, above = 0, rank = 0;
        for (size_t i = 0; i < logits.size(); ++i) {
            all += weight(i, temperature);
            if (logits[i] > logits[token]) {
                above += weight(i, temperature);
                ++rank;
            }
        }
        const bool kept = (top_k == 0 || rank < double(top_k)) && weight(token, temperature) >= min_p * 0.999;
        // top_p is a share of what the others keep, which is at most `all`.
        if (!kept || above > top_p * all * 1.001) expect(double(token), HUGE_VAL, 0);
    }
};

}  // namespace

void check_sampling() {
    const int64_t rows = 1 + below(4), items = 1 + below(6), n = below(3) ? 1 + below(700) : 1 + below(20000);
    const Array<float> logits(rows * n), temperature(items), top_p(items), min_p(items);
    const Array<int64_t> places(items), top_k(items), tokens(items);
    const Array<double> uniforms(items);
    std::vector<Row> all(rows);
    for (int64_t r = 0; r < rows; ++r) {
        const int kind = below(8);  // 0: a NaN or infinity in it, 1: all forbidden, 2: some
        const int64_t bad = below(int(n));
        for (int64_t i = 0; i < n; ++i) {
            double x = (below(20001) - 10000) / 1000.0;
            if (kind == 0 && i == bad) x = below(2) ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
            if (kind == 1 || (kind == 2 && below(2))) x = -HUGE_VAL;
            logits[r * n + i] = float(x);
            all[r].logits.push_back(logits[r * n + i]);
            all[r].most = x > all[r].most ? all[r].logits.back() : all[r].most;
        }
        all[r].finite = kind != 0;
    }
    for (int64_t i = 0; i < items; ++i) {
        places[i] = below(int(rows));
        temperature[i] = below(3) ? 0.25f * (1 + below(8)) : 0;
        top_k[i] = below(2) ? 1 + below(100) : 0;
        top_p[i] = below(2) ? 1 : 1.0f / (1 << below(5));
        min_p[i] = below(2) ? 0 : 1.0f / (1 << below(8));
        uniforms[i] = below(1 << 20) / double(1 << 20);
    }
    where = "choose_tokens";
    kernels().choose_tokens({.logits = logits.data(),
                             .n = n,
                             .places = places.data(),
                             .items = items,
                             .temperature = temperature.data(),
                             .top_k = top_k.data(),
                             .top_p = top_p.data(),
                             .min_p = min_p.data(),
                             .uniforms = uniforms.data(),
                             .tokens = tokens.data()});
    for (int64_t i = 0; i < items; ++i) {
        const Row& row = all[places[i]];
        int64_t& token = tokens[i];
        if (!row.finite || row.most == -HUGE_VAL) {
            expect(double(token), double(row.finite ? kAllForbidden : kNotFinite), 0);
            token = below(int(n));
        } else if (temperature[i] == 0) {
            expect(double(token), double(std::max_element(row.logits.begin(), row.logits.end()) - row.logits.begin()),
                   0);
        } else {
            row.expect_kept(token, temperature[i], top_k[i], top_p[i], min_p[i]);
        }
    }
    where = "mask_logits";
    AllowedOutputs allowed{.words = (n + 31) / 32};
    const Array<uint32_t> bits(rows * allowed.words);
    const Array<int64_t> all_places(rows), of_bits(rows);
    for (int64_t i = 0; i < rows * allowed.words; ++i) bits[i] = uint32_t(below(1 << 16)) << 16 | below(1 << 16);
    for (int64_t r = 0; r < rows; ++r) all_places[r] = r, of_bits[r] = below(int(rows) + 1) - 1;
    allowed.bits = bits.data(), allowed.rows = of_bits.data();
    const Array<float> masked(rows * n);
    for (int64_t i = 0; i < rows * n; ++i) masked[i] = logits[i];
    kernels().mask_logits(
        {.logits = masked.data(), .n = n, .places = all_places.data(), .items = rows, .allowed = allowed});
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = 0; i < n; ++i) {
            const bool counts = of_bits[r] < 0 || (bits[of_bits[r] * allowed.words + i / 32] >> i % 32 & 1);
            const float x = counts ? logits[r * n + i] : -float(HUGE_VAL);
            expect(masked[r * n + i] == x || (x != x && masked[r * n + i] != masked[r * n + i]), 1, 0);
        }
    where = "log_probabilities";
    const int64_t k = below(3) ? below(int(std::min<int64_t>(n, 21)) + 1) : 0;
    const Array<float> own(items), logprobs(items * k);
    const Array<int64_t> ranks(items), top_tokens(items * k);
    kernels().log_probabilities({.logits = logits.data(),
                                 .n = n,
                                 .places = places.data(),
                                 .items = items,
                                 .k = k,
                                 .tokens = tokens.data(),
                                 .own = own.data(),
                                 .ranks = ranks.data(),
                                 .top_tokens = top_tokens.data(),
                                 .top_logprobs = logprobs.data()});
    for (int64_t i = 0; i < items; ++i) {
        const Row& row = all[places[i]];
        if (!row.finite || row.most == -HUGE_VAL) {
            if (own[i] == own[i]) expect(own[i], HUGE_VAL, 0);
            continue;
        }
        const int64_t token = tokens[i];
        double sum = 0, rank = 1;
        for (int64_t j = 0; j < n; ++j) {
            sum += row.weight(j, 1);
            rank += row.logits[j] > row.logits[token];
        }
        const double log_sum = row.most + std::log(sum);
        expect(own[i], row.logits[token] - log_sum, 1e-4);
        expect(double(ranks[i]), rank, 0);
        std::vector<int64_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int64_t a, int64_t b) { return row.logits[a] > row.logits[b]; });
        for (int64_t j = 0; j < k && row.logits[order[j]] > -HUGE_VAL; ++j) {
            expect(double(top_tokens[i * k + j]), double(order[j]), 0);
            expect(logprobs[i * k + j], row.logits[order[j]] - log_sum, 1e-4);
        }
    }
}

}  // namespace pagemill
