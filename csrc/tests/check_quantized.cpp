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
    const Array<int8_t> values(n * k);
    const Array<int16_t> slopes(n * (k / 32)), offsets(n * (k / 32));
    const Array<float> bias(n, 1);
    Numbers scales(n * groups, DType::bf16, 1), x((m - 1) * (k + gap) + k, type, 1), y(m * n, type);
    for (int64_t i = 0; i < m; ++i)
        if (below(2)) x.set(i * (k + gap) + below(int(k)), float(8 + below(240)));  // an outlier
    std::vector<double> weight(n * k);
    for (int64_t i = 0; int4 && i < n * (k / 32); ++i) {
        slopes[i] = int16_t(random_source());
        offsets[i] = int16_t(random_source());
    }
    for (int64_t i = 0; i < n * k; ++i) {
        const int value = int4 ? below(16) : below(255) - 127;
        values[i] = int8_t(value);
        const int64_t block = i / k * (k / 32) + i % k / 32;
        const int whole = int4 ? int8_t(uint16_t(slopes[block] * value + offsets[block]) >> 8) : value;
        weight[i] = whole * scales.get(i / k * groups + i % k / 192);
    }
    PackedLinear packed{.n = n, .k = k, .type = stored, .format = int4 ? Format::int4 : Format::int8};
    const bool biased = below(2);
    kernels().pack_quantized(packed, {values.data(), int4 ? slopes.data() : nullptr, int4 ? offsets.data() : nullptr,
                                      static_cast<uint16_t*>(scales.data()), biased ? bias.data() : nullptr});
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
            double sum = biased ? bias[out] : 0, rounded = 0;
            for (int64_t i = 0; i < k; ++i) {
                sum += x.get(row * (k + gap) + i) * weight[out * k + i];
                rounded += std::fabs(weight[out * k + i]) * step[i / 192] * 0.501;
            }
            expect(y.get(row * n + out), sum, tolerance(type) + rounded);
        }
    }
    where = "quantized linear, rows by themselves";
    expect_same_alone(packed, x, k + gap, type, m);
    where = "embed quantized";
    expect_row(packed, type, tolerance(type), [&](int64_t i) { return weight[i]; });
    release(packed);
}

void check_rounding() {
    where = "quantize int8";
    const DType stored = any_type();
    const int64_t n = 1 + below(40), k = 1 + below(600), groups = (k + 191) / 192;
    Numbers weight(n * k, stored, 1), scales(n * groups, DType::bf16);
    const Array<int8_t> values(n * k);
    kernels().quantize_int8(weight.data(), stored, n, k, values.data(), static_cast<uint16_t*>(scales.data()));
    for (int64_t i = 0; i < n * k; ++i) {
        const double scale = scales.get(i / k * groups + i % k / 192);
        expect(values[i] * scale, weight.get(i), 0.501 * scale);
    }
}

void check_stored() {
    where = "stored weights";
    struct Stored { int format, weights, bytes, scale, scales; };
    const Stored stored = one_of<Stored>({{2, 32, 18, 0, 1},
                                          {3, 32, 20, 0, 2},
                                          {6, 32, 22, 0, 1},
                                          {7, 32, 24, 0, 2},
                                          {8, 32, 34, 0, 1},
                                          {12, 256, 144, 0, 2},
                                          {13, 256, 176, 0, 2},
                                          {14, 256, 210, 208, 1}});
    const int64_t n = 1 + below(20), blocks = 1 + below(5), k = blocks * stored.weights, groups = (k + 191) / 192;
    const Array<uint8_t> from(n * blocks * stored.bytes);
    for (int64_t i = 0; i < n * blocks * stored.bytes; ++i) from[i] = uint8_t(random_source());
    for (int64_t b = 0; b < n * blocks; ++b)
        for (int i = 0; i < stored.scales; ++i) {  // of magnitudes below 2
            uint8_t& upper = from[b * stored.bytes + stored.scale + 2 * i + 1];
            upper = uint8_t((upper & 0x80) | below(0x40));
        }
    const StoredWeight weight{.format = stored.format, .blocks = from.data(), .n = n, .k = k};
    if (kernels().stored_bytes(stored.format, k) != blocks * stored.bytes) std::abort();
    const Array<float> wide(n * k);
    const Array<int8_t> values(n * k);
    const Array<int16_t> slopes(n * (k / 32)), offsets(n * (k / 32));
    const Array<bool> finite(n);
    Numbers scales(n * groups, DType::bf16);
    if (!kernels().dequantize(stored.format, from.data(), wide.data(), n * k)) std::abort();
    for (const bool int4 : {false, true}) {
        auto* of_groups = static_cast<uint16_t*>(scales.data());
        const bool known = int4 ? kernels().keep_int4(weight, reinterpret_cast<uint8_t*>(values.data()), slopes.data(),
                                                      offsets.data(), of_groups, finite.data())
                                : kernels().round_stored(weight, values.data(), of_groups, finite.data());
        if (known != (!int4 || stored.bytes * 8 / stored.weights == 4 || stored.format == 3)) std::abort();
        for (int64_t i = 0; known && i < n * k; ++i) {
            const double scale = scales.get(i / k * groups + i % k / 192);
            const int64_t half = i / 32;
            const auto lines = int8_t(uint16_t(slopes[half] * uint8_t(values[i]) + offsets[half]) >> 8);
            const double whole = int4 ? double(lines) : double(values[i]);
            if (!finite[i / k]) std::abort();
            expect(whole * scale, wide[i], (int4 ? 0.54 : 0.501) * scale);
        }
    }
}

void check_dequantize() {
    where = "dequantize";
    const int64_t blocks = 1 + below(3000);
    const Array<uint8_t> stored(blocks * 34);
    const Array<float> wide(blocks * 32);
    for (int64_t b = 0; b < blocks; ++b) {
        uint8_t* at = stored.data() + 34 * b;
        at[0] = 0;
        at[1] = 0x38;  // 0.5
        for (int i = 0; i < 32; ++i) at[2 + i] = uint8_t(random_source());
    }
    if (!kernels().dequantize(8, stored.data(), wide.data(), blocks * 32)) std::abort();
    for (int64_t i = 0; i < blocks * 32; ++i) expect(wide[i], 0.5 * int8_t(stored[i / 32 * 34 + 2 + i % 32]), 0);
    for (const auto& [format, bytes, weights] : {std::tuple{2, 18, 32},
                                                 {3, 20, 32},
                                                 {6, 22, 32},
                                                 {7, 24, 32},
                                                 {12, 144, 256},
                                                 {13, 176, 256},
                                                 {14, 210, 256}}) {
        const Array<uint8_t> all(bytes * 9);
        const Array<float> out(weights * 9);
        if (!kernels().dequantize(format, all.data(), out.data(), weights * 9)) std::abort();
    }
}

}  // namespace pagemill
