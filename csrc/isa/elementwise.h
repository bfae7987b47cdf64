// Norm, rotary embedding, gated activation: fp32 inside, any dtype outside, one row at a time.
#pragma once

#include "../threads.h"
#include "math.h"
#include "simd.h"

namespace pagemill { namespace {

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
        const F v = load_upto(in + j, n - j);
        squares[0] = fma(v, v, squares[0]);
    }
    const F scale = broadcast(1.0f / __builtin_sqrtf(sum(squares[0] + squares[1]) / float(n) + eps));
    for_vectors(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
        part.store(out + i, part.load(in + i) * scale * part.load(weight + i));
    });
}

void rms_norm(const void* x, int64_t x_outer, int64_t x_inner, const float* weight, float eps, void* y, DType type,
              int64_t outer, int64_t inner, int64_t n) {
    with_type(type, [&]<class T>(T*) {
        for_rows(outer * inner, n, [&](int64_t row) {
            norm_row((const T*)x + row / inner * x_outer + row % inner * x_inner, weight, eps, (T*)y + row * n, n);
        });
    });
}

void add_norm(void* x, const void* delta, const float* post_norm, const float* norm, float eps, void* y, DType type,
              int64_t rows, int64_t n) {
    with_type(type, [&]<class T>(T*) {
        for_rows(rows, n, [&](int64_t row) {
            const T* add = (const T*)delta + row * n;
            T *sum = (T*)x + row * n, *out = (T*)y + row * n;
            if (post_norm) {
                norm_row(add, post_norm, eps, out, n);
                add = out;
            }
            for_vectors(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
                part.store(sum + i, part.load(sum + i) + part.load(add + i));
            });
            norm_row(sum, norm, eps, out, n);
        });
    });
}

void embed(const void* table, const int64_t* ids, float scale, void* y, DType type, int64_t tokens, int64_t n) {
    with_type(type, [&]<class T>(T*) {
        for_rows(tokens, n, [&](int64_t token) {
            const T* in = (const T*)table + ids[token] * n;
            T* out = (T*)y + token * n;
            for_vectors(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
                part.store(out + i, part.load(in + i) * broadcast(scale));
            });
        });
    });
}

// One head, in place: dimensions i and half + i turn by one angle.
template <class T> INLINE void rotate_head(T* first, const float* cos, const float* sin, int64_t half) {
    T* second = first + half;
    for_vectors(half, [&](int64_t i, auto part) __attribute__((always_inline)) {
        const F a = part.load(first + i), b = part.load(second + i), c = part.load(cos + i), s = part.load(sin + i);
        part.store(first + i, a * c - b * s);
        part.store(second + i, b * c + a * s);
    });
}

void rotate(void* x, int64_t x_token, int64_t x_head, DType type, const float* cos, const float* sin, int64_t tokens,
            int64_t heads, int64_t half) {
    with_type(type, [&]<class T>(T*) {
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
        for_vectors(n, [&](int64_t i, auto part) __attribute__((always_inline)) {
            part.store(out + i, activate<A>(part.load(gate + i)) * part.load(up + i));
        });
    });
}

void gated(const void* x, int64_t x_row, void* y, DType type, Activation activation, int64_t rows, int64_t n) {
    with_type(type, [&]<class T>(T*) {
        if (activation == Activation::silu) gated_rows<Activation::silu>((const T*)x, x_row, (T*)y, rows, n);
        else gated_rows<Activation::gelu_tanh>((const T*)x, x_row, (T*)y, rows, n);
    });
}

void widen(const void* x, DType type, float soft_cap, float* y, int64_t n) {
    with_type(type, [&]<class T>(T*) {
        for_rows((n + kSerialElements - 1) / kSerialElements, kSerialElements, [&](int64_t piece) {
            const int64_t first = piece * kSerialElements;
            for_vectors(lesser(n - first, kSerialElements), [&](int64_t i, auto part) __attribute__((always_inline)) {
                const F value = part.load((const T*)x + first + i), cap = broadcast(soft_cap);
                part.store(y + first + i, soft_cap == 0.0f ? value : tanh(value / cap) * cap);
            });
        });
    });
}

void exp_all(const float* x, float* y, int64_t n) {
    for_vectors(n, [&](int64_t i, auto part) { part.store(y + i, exp(part.load(x + i))); });
}

void tanh_all(const float* x, float* y, int64_t n) {
    for_vectors(n, [&](int64_t i, auto part) { part.store(y + i, tanh(part.load(x + i))); });
}

}}  // namespace pagemill
