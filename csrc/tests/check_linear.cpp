// Linear layers of floating-point weights, and of fp32 weights held as integers, against sums in fp64.
#include "checks.h"

#include <algorithm>

namespace pagemill {

void check_linear() {
    const DType stored = any_type(), type = any_type();
    const int64_t n = 1 + below(150), k = 1 + below(700), m = below(4) ? 1 + below(20) : 1 + below(90),
                  gap = below(3) * 32;
    where = "linear";
    Guarded weight(n * k, stored), bias(n, DType::f32), x((m - 1) * (k + gap) + k, type), y((m - 1) * n + n, type);
    weight.fill(random_source);
    if (stored == DType::bf16)  // other exponents, a few or too many to be patched
        for (int64_t i = below(2) ? 0 : n * k - 1 - below(int(std::min<int64_t>(n * k, 8))); i < n * k; ++i)
            weight.set(i, std::ldexp(weight.get(i), -below(60)));
    bias.fill(random_source);
    x.fill(random_source);
    PackedLinear packed{.n = n, .k = k, .type = stored};
    if (!kernels().pack_linear(packed, weight.data(), bias.as<float>(), type)) std::abort();
    kernels().linear(packed, x.data(), k + gap, y.data(), n, type, m);
    for (int64_t row = 0; row < m; ++row)
        for (int64_t out = 0; out < n; ++out) {
            double sum = bias.get(out);
            for (int64_t i = 0; i < k; ++i) sum += x.get(row * (k + gap) + i) * weight.get(out * k + i);
            expect(y.get(row * n + out), sum, tolerance(type));
        }
    Guarded argmax(sizeof(int64_t) * m);
    kernels().linear_argmax(packed, x.data(), k + gap, type, m, argmax.as<int64_t>());
    for (int64_t row = 0; row < m; ++row) {
        int64_t best = 0;
        for (int64_t out = 1; out < n; ++out)
            if (y.get(row * n + out) > y.get(row * n + best)) best = out;
        expect(argmax.as<int64_t>()[row], best, 0);
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
    Guarded values(n * k), scale(n * k / 32, DType::f32), low(n * k / 32, DType::f32), x(m * k, DType::f32),
        y(m * n, DType::f32);
    for (int64_t i = 0; i < n * k; ++i) values.as<uint8_t>()[i] = uint8_t(below(format == Format::affine4 ? 16 : 256));
    scale.fill(random_source, 0.125);
    low.fill(random_source);
    for (int64_t i = 0; i < n * k / 32; ++i)
        scale.set(i, std::round(scale.get(i) * 1024) / 1024);  // products are exact
    x.fill(random_source);
    PackedLinear packed{.n = n, .k = k, .format = format};
    if (!kernels().pack_affine(packed, {values.as<uint8_t>(), scale.as<float>(), low.as<float>(), nullptr}))
        std::abort();
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
    const int64_t k = 1 + below(700), half = 32 * (1 + below(4)), n = 1 + below(100), m = 1 + below(90),
                  gap = below(3) * 32;
    const Activation activation = below(2) ? Activation::silu : Activation::gelu_tanh;
    const DType types[] = {any_type(), any_type()};
    where = "mlp";
    Guarded first(2 * half * k, types[0]), first_bias(2 * half, DType::f32), second(n * half, types[1]);
    Guarded second_bias(n, DType::f32), x((m - 1) * (k + gap) + k, DType::f32), y(m * n, DType::f32);
    first.fill(random_source, 0.125);
    for (Guarded* each : {&first_bias, &second, &second_bias, &x}) each->fill(random_source);
    PackedLinear gate_up{.n = 2 * half, .k = k, .type = types[0]}, down{.n = n, .k = half, .type = types[1]};
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
                gated[i] = (activation == Activation::silu ? g / (1 + std::exp(-g)) : g * (1 + std::tanh(cube)) / 2) *
                           sums[half + i];
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

}  // namespace pagemill
