// Weights of 8 and 4 bits against sums in fp64. The bounds allow for half a step of x where the kernels round.
#include "checks.h"

namespace pagemill {

void check_quantized() {
    where = "quantized linear";
    const DType stored = any_type(), type = any_type();
    const bool int4 = below(2);
    const int64_t n = 1 + below(100), k = int4 ? 32 * (1 + below(20)) : 1 + below(600);
    const int64_t m = below(4) ? 1 + below(20) : 1 + below(60), gap = below(3) * 32, groups = (k + 191) / 192;
    Guarded values{size_t(n * k)}, slopes{size_t(n * (k / 32) * 2)}, offsets{size_t(n * (k / 32) * 2)};
    Guarded scales(n * groups, DType::bf16), bias(n, DType::f32), x((m - 1) * (k + gap) + k, type), y((m - 1) * n + n, type);
    scales.fill(random_source);
    bias.fill(random_source);
    x.fill(random_source);
    for (int64_t i = 0; i < m; ++i)
        if (below(2)) x.set(i * (k + gap) + below(int(k)), float(8 + below(240)));  // an outlier
    std::vector<double> weight(n * k);
    for (int64_t i = 0; int4 && i < n * (k / 32); ++i) {
        slopes.as<int16_t>()[i] = int16_t(random_source());
        offsets.as<int16_t>()[i] = int16_t(random_source());
    }
    for (int64_t i = 0; i < n * k; ++i) {
        const int value = int4 ? below(16) : below(255) - 127;
        values.as<int8_t>()[i] = int8_t(value);
        const int64_t block = i / k * (k / 32) + i % k / 32;
        const int whole = int4 ? int8_t(uint16_t(slopes.as<int16_t>()[block] * value + offsets.as<int16_t>()[block]) >> 8) : value;
        weight[i] = whole * scales.get(i / k * groups + i % k / 192);
    }
    PackedLinear packed;
    packed.n = n;
    packed.k = k;
    packed.type = stored;
    packed.format = int4 ? Format::int4 : Format::int8;
    const bool biased = below(2);
    if (!kernels().pack_quantized(packed, {values.data(), int4 ? slopes.as<int16_t>() : nullptr, int4 ? offsets.as<int16_t>() : nullptr,
                                           scales.as<uint16_t>(), biased ? bias.as<float>() : nullptr}))
        std::abort();
    kernels().linear(packed, x.data(), k + gap, y.data(), n, type, m);
    for (int64_t row = 0; row < m; ++row) {
        std::vector<double> step(groups);
        for (int64_t g = 0; g < groups; ++g) {
            double largest = 0, magnitudes = 0;
            for (int64_t i = g * 192; i < k && i < g * 192 + 192; ++i) {
                const double magnitude = std::fabs(x.get(row * (k + gap) + i));
                largest = std::fmax(largest, magnitude);
                magnitudes += magnitude;
            }
            step[g] = std::fmax(largest / (127 * 256), std::fmin(largest, 4 * magnitudes / 192) / 127);
        }
        for (int64_t out = 0; out < n; ++out) {
            double sum = biased ? bias.get(out) : 0, rounded = 0;
            for (int64_t i = 0; i < k; ++i) {
                sum += x.get(row * (k + gap) + i) * weight[out * k + i];
                rounded += std::fabs(weight[out * k + i]) * step[i / 192] * 0.501;
            }
            expect(y.get(row * n + out), sum, tolerance(type) + rounded);
        }
    }
    where = "embed quantized";
    Guarded ids(sizeof(int64_t)), embedded(k, type);
    *ids.as<int64_t>() = below(int(n));
    kernels().embed_packed(packed, ids.as<int64_t>(), 1.0f, embedded.data(), type, 1);
    for (int64_t i = 0; i < k; ++i) expect(embedded.get(i), weight[*ids.as<int64_t>() * k + i], tolerance(type));
    release(packed);
}

}  // namespace pagemill
