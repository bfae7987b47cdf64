// Norm, rotary embedding, gated activation: fp32 inside, any dtype outside, one row at a time.
#pragma once

#include "../kernels.h"
#include "../threads.h"
#include "compile_time.h"
#include "math.h"
#include "simd.h"

namespace pagemill {
namespace {

constexpr int64_t kSerialElements = 16384;  // below this, waking the other threads costs more than it saves

// Runs body(row) for all rows, in pieces of about kSerialElements elements.
template <class Body> void for_rows(int64_t rows, int64_t row_elements, Body body) {
    const int64_t piece = greater<int64_t>(1, kSerialElements / greater<int64_t>(1, row_elements));
    auto run = [&](int64_t task, int) {
        for (int64_t row = task * piece; row < lesser(rows, (task + 1) * piece); ++row) body(row);
    };
    parallel((rows + piece - 1) / piece, run);
}

// out = in / sqrt(mean(in^2) + eps) * weight; out may be in.
template <class T> INLINE void norm_row(const T* in, const float* weight, float eps, T* out, int64_t n) {
    F squares[2] = {zero(), zero()};
    int64_t i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int j = 0; j < 2; ++j) {
            const F v = load(in + i + j * W);
            squares[j] = fma(v, v, squares[j]);
        }
    for (int64_t j = i; j < n; j += W) {
        const F v = n - j >= W ? load(in + j) : load_first(in + j, int(n - j));
        squares[0] = fma(v, v, squares[0]);
    }
    const F scale = broadcast(1.0f / __builtin_sqrtf(sum(squares[0] + squares[1]) / float(n) + eps));
    for (i = 0; i + W <= n; i += W) store(out + i, load(in + i) * scale * load(weight + i));
    if (i < n)
        store_first(out + i, load_first(in + i, int(n - i)) * scale * load_first(weight + i, int(n - i)), int(n - i));
}

void rms_norm(const void* x, int64_t x_outer, int64_t x_inner, const float* weight, float eps, void* y, DType type,
              int64_t outer, int64_t inner, int64_t n) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        for_rows(outer * inner, n, [&](int64_t row) {
            norm_row((const T*)x + row / inner * x_outer + row % inner * x_inner, weight, eps, (T*)y + row * n, n);
        });
    });
}

void add_norm(void* x, const void* delta, const float* post_norm, const float* norm, float eps, void* y, DType type,
              int64_t rows, int64_t n) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        for_rows(rows, n, [&](int64_t row) {
            const T* add = (const T*)delta + row * n;
            T *sum = (T*)x + row * n, *out = (T*)y + row * n;
            if (post_norm) {
                norm_row(add, post_norm, eps, out, n);
                add = out;
            }
            int64_t i = 0;
            for (; i + W <= n; i += W) store(sum + i, load(sum + i) + load(add + i));
            if (const int rest = int(n - i))
                store_first(sum + i, load_first(sum + i, rest) + load_first(add + i, rest), rest);
            norm_row(sum, norm, eps, out, n);
        });
    });
}

void embed(const void* table, const int64_t* ids, float scale, void* y, DType type, int64_t tokens, int64_t n) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        for_rows(tokens, n, [&](int64_t token) {
            const T* in = (const T*)table + ids[token] * n;
            T* out = (T*)y + token * n;
            int64_t i = 0;
            for (; i + W <= n; i += W) store(out + i, load(in + i) * broadcast(scale));
            if (const int rest = int(n - i)) store_first(out + i, load_first(in + i, rest) * broadcast(scale), rest);
        });
    });
}

// One head, in place: dimensions i and half + i turn by one angle.
template <class T> INLINE void rotate_head(T* first, const float* cos, const float* sin, int64_t half) {
    T* second = first + half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const F a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
        store(first + i, a * c - b * s);
        store(second + i, b * c + a * s);
    }
    if (const int n = int(half - i)) {
        const F a = load_first(first + i, n), b = load_first(second + i, n);
        const F c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(first + i, a * c - b * s, n);
        store_first(second + i, b * c + a * s, n);
    }
}

void rotate(void* x, int64_t x_token, int64_t x_head, DType type, const float* cos, const float* sin, int64_t tokens,
            int64_t heads, int64_t half) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        for_rows(tokens, heads * half * 2, [&](int64_t token) {
            for (int64_t head = 0; head < heads; ++head)
                rotate_head((T*)x + token * x_token + head * x_head, cos + token * half, sin + token * half, half);
        });
    });
}

template <Activation A, class T> void gated_rows(const T* x, int64_t x_row, T* y, int64_t rows, int64_t n) {
    for_rows(rows, 2 * n, [&](int64_t row) {
        const T *gate = x + row * x_row, *up = gate + n;
        T* out = y + row * n;
        int64_t i = 0;
        for (; i + W <= n; i += W) store(out + i, activate<A>(load(gate + i)) * load(up + i));
        if (const int rest = int(n - i))
            store_first(out + i, activate<A>(load_first(gate + i, rest)) * load_first(up + i, rest), rest);
    });
}

void gated(const void* x, int64_t x_row, void* y, DType type, Activation activation, int64_t rows, int64_t n) {
    with_type(type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        if (activation == Activation::silu) gated_rows<Activation::silu>((const T*)x, x_row, (T*)y, rows, n);
        else gated_rows<Activation::gelu_tanh>((const T*)x, x_row, (T*)y, rows, n);
    });
}

void exp_all(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        const int left = int(lesser<int64_t>(W, n - i));
        if (left == W) store(y + i, exp(load(x + i)));
        else store_first(y + i, exp(load_first(x + i, left)), left);
    }
}

void tanh_all(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; i += W) {
        const int left = int(lesser<int64_t>(W, n - i));
        if (left == W) store(y + i, tanh(load(x + i)));
        else store_first(y + i, tanh(load_first(x + i, left)), left);
    }
}

}  // namespace
}  // namespace pagemill
