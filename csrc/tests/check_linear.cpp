// Linear layers of floating-point weights, and of fp32 weights held as integers, against sums in fp64.
#include "checks.h"

#include <algorithm>

namespace pagemill {

void check_linear() {
    const DType stored = any_type(), type = any_type();
    const int64_t n = 1 + below(150), k = 1 + below(700), m = below(4) ? 1 + below(20) : 1 + below(90),
                  gap = below(3) * 32;
    where = "linear";
    Numbers weight(n * k, stored, 1), x((m - 1) * (k + gap) + k, type, 1), y(m * n, type);
    const Array<float> bias(n, 1);
    if (stored == DType::bf16)  // other exponents, a few or too many to be patched
        for (int64_t i = below(2) ? 0 : n * k - 1 - below(int(std::min<int64_t>(n * k, 8))); i < n * k; ++i)
            weight.set(i, std::ldexp(weight.get(i), -below(60)));
    PackedLinear packed{.n = n, .k = k, .type = stored};
    kernels().pack_linear(packed, weight.data(), bias.data(), type);
    kernels().linear(packed, x.data(), k + gap, y.data(), n, type, m);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t out = 0; out < n; ++out) {
            double sum = bias[out];
            for (int64_t i = 0; i < k; ++i) sum += x.get(row * (k + gap) + i) * weight.get(out * k + i);
            expect(y.get(row * n + out), sum, tolerance(type));
        }
    const Array<int64_t> argmax(m), places(m);
    AllowedOutputs allowed{.words = (n + 31) / 32};
    const Array<uint32_t> bits(m * allowed.words);
    for (int64_t i = 0; i < m * allowed.words; ++i) bits[i] = uint32_t(below(1 << 16)) & uint32_t(below(1 << 16));
    for (int64_t row = 0; row < m; ++row) places[row] = below(int(m) + 1) - 1;
    if (below(2)) allowed.bits = bits.data(), allowed.rows = places.data();
    kernels().linear_argmax(packed, x.data(), k + gap, type, m, allowed, argmax.data());
    for (int64_t row = 0; row < m; ++row) {
        int64_t best = kAllForbidden;
        const uint32_t* const own = allowed.of(row);
        for (int64_t out = 0; out < n; ++out)
            if (!own || own[out / 32] >> out % 32 & 1)
                if (best < 0 || y.get(row * n + out) > y.get(row * n + best)) best = out;
        expect(argmax[row], best, 0);
    }
    expect_row(packed, below(2) ? stored : DType::f32, 0, [&](int64_t i) { return weight.get(i); });
    release(packed);
}

// The second half of k takes back what the first has brought, so the outputs are what sums of full mantissas have
// rounded.
void check_rows_alone() {
    const DType type = any_type(), stored = below(2) ? type : any_type();
    const int64_t n = 1 + below(100), half = 1 + below(300), k = 2 * half, m = 1 + below(40);
    where = "linear, rows by themselves";
    Numbers weight(n * k, stored, 1), x(m * k, type, 1);
    for (int64_t i = 0; i < n * k; ++i) weight.set(i, i % k < half ? weight.get(i) / 3 : weight.get(i - half));
    for (int64_t i = 0; i < m * k; ++i) x.set(i, i % k < half ? x.get(i) / 3 : -x.get(i - half));
    PackedLinear packed{.n = n, .k = k, .type = stored};
    kernels().pack_linear(packed, weight.data(), nullptr, type);
    expect_same_alone(packed, x, k, type, m);
    release(packed);
}

// fp32 weights held as integers.
void check_affine() {
    const Format format = one_of({Format::affine4, Format::affine8, Format::fine8});
    const int64_t block = format == Format::fine8 ? 16 : 32;
    const int64_t n = 1 + below(150), k = 32 * (1 + below(20)), m = 1 + below(below(2) ? 20 : 90);
    where = "affine";
    const Array<uint8_t> values(n * k);
    const Array<float> scale(n * k / block, 0.125), low(n * k / block, 1), x(m * k, 1), y(m * n);
    for (int64_t i = 0; i < n * k; ++i) values[i] = uint8_t(below(format == Format::affine4 ? 16 : 256));
    for (int64_t i = 0; i < n * k / block; ++i) scale[i] = std::round(scale[i] * 1024) / 1024;  // products are exact
    PackedLinear packed{.n = n, .k = k, .format = format};
    kernels().pack_affine(packed, {values.data(), scale.data(), low.data(), nullptr});
    const auto weight = [&](int64_t i) { return double(scale[i / block] * float(values[i]) + low[i / block]); };
    kernels().linear(packed, x.data(), k, y.data(), n, DType::f32, m);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t out = 0; out < n; ++out) {
            double sum = 0;
            for (int64_t i = 0; i < k; ++i) sum += x[row * k + i] * weight(out * k + i);
            expect(y[row * n + out], sum, 64 * tolerance(DType::f32));
        }
    expect_row(packed, DType::f32, 0, weight);
    release(packed);
}

void check_mlp() {
    const int64_t k = 1 + below(700), half = 32 * (1 + below(4)), n = 1 + below(100), m = 1 + below(90),
                  gap = below(3) * 32;
    const Activation activation = below(2) ? Activation::silu : Activation::gelu_tanh;
    const DType types[] = {any_type(), any_type()};
    where = "mlp";
    Numbers first(2 * half * k, types[0], 0.125), second(n * half, types[1], 1);
    const Array<float> first_bias(2 * half, 1), second_bias(n, 1), x((m - 1) * (k + gap) + k, 1), y(m * n);
    PackedLinear gate_up{.n = 2 * half, .k = k, .type = types[0]}, down{.n = n, .k = half, .type = types[1]};
    kernels().pack_linear(gate_up, first.data(), first_bias.data(), DType::f32);
    kernels().pack_linear(down, second.data(), second_bias.data(), DType::f32);
    if (kernels().mlp(gate_up, down, x.data(), k + gap, y.data(), n, DType::f32, activation, m)) {
        for (int64_t row = 0; row < m; ++row) {
            std::vector<double> sums(2 * half), gated(half);
            for (int64_t i = 0; i < 2 * half; ++i) {
                sums[i] = first_bias[i];
                for (int64_t j = 0; j < k; ++j) sums[i] += x[row * (k + gap) + j] * first.get(i * k + j);
            }
            for (int64_t i = 0; i < half; ++i) {
                const double g = sums[i], cube = 0.7978845608 * (g + 0.044715 * g * g * g);
                gated[i] = (activation == Activation::silu ? g / (1 + std::exp(-g)) : g * (1 + std::tanh(cube)) / 2) *
                           sums[half + i];
            }
            for (int64_t out = 0; out < n; ++out) {
                double sum = second_bias[out];
                for (int64_t i = 0; i < half; ++i) sum += gated[i] * second.get(out * half + i);
                expect(y[row * n + out], sum, tolerance(DType::f32));
            }
        }
    } else if (m > 14) {
        expect(0, 1, 0);  // these operands have a kernel
    }
    release(gate_up);
    release(down);
}

}  // namespace pagemill
