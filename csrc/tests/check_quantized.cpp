// Weights of 8 and 4 bits against sums in fp64, with bounds that allow for half a step of x where the kernels round;
// and GGUF blocks against their definition.
#include "checks.h"

#include <tuple>

namespace pagemill {

void check_quantized() {
    where = "quantized linear";
    const DType stored = any_type(), type = any_type();
    const bool int4 = below(2);
    const int64_t n = 1 + below(100), k = int4 ? 32 * (1 + below(20)) : 1 + below(600);
    const int64_t m = below(4) ? 1 + below(20) : 1 + below(60), gap = below(3) * 32, groups = (k + 191) / 192;
    Guarded values{size_t(n * k)}, slopes{size_t(n * (k / 32) * 2)}, offsets{size_t(n * (k / 32) * 2)};
    Guarded scales(n * groups, DType::bf16), bias(n, DType::f32), x((m - 1) * (k + gap) + k, type),
        y((m - 1) * n + n, type);
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
        const int whole =
            int4 ? int8_t(uint16_t(slopes.as<int16_t>()[block] * value + offsets.as<int16_t>()[block]) >> 8) : value;
        weight[i] = whole * scales.get(i / k * groups + i % k / 192);
    }
    PackedLinear packed{.n = n, .k = k, .type = stored, .format = int4 ? Format::int4 : Format::int8};
    const bool biased = below(2);
    if (!kernels().pack_quantized(
            packed, {values.data(), int4 ? slopes.as<int16_t>() : nullptr, int4 ? offsets.as<int16_t>() : nullptr,
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
    for (const auto& [format, bytes, weights] : {std::tuple{2, 18, 32},
                                                 {3, 20, 32},
                                                 {6, 22, 32},
                                                 {7, 24, 32},
                                                 {12, 144, 256},
                                                 {13, 176, 256},
                                                 {14, 210, 256}}) {
        Guarded all(size_t(bytes) * 9), out(size_t(weights) * 9, DType::f32);
        if (!dequantize(format, all.data(), out.as<float>(), weights * 9)) std::abort();
    }
}

}  // namespace pagemill
