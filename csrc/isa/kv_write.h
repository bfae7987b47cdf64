// Keys and values to their slots, and what lies between a layer's joined projection and attention.
#pragma once

#include "attention_tiles.h"
#include "elementwise.h"
#include "simd.h"

namespace pagemill { namespace {

// A key's head in pairs of dimensions, `stride` apart.
template <class S> INLINE void write_key_pairs(const S* from, bf16* to, int64_t stride, int head_dim) {
    int d = 0;
    for (; d + W <= head_dim; d += W) {
        bf16 lanes[W];
        store(lanes, load(from + d));
        for (int i = 0; i < W; i += 2) std::memcpy(to + (d + i) / 2 * stride, lanes + i, 2 * sizeof(bf16));
    }
    for (; d < head_dim; ++d) narrow_one(to + d / 2 * stride + d % 2, widen_one(from + d));
}

// The heads of two neighbouring tokens' values, side by side.
template <class S> INLINE void write_value_pairs(const S* even, const S* odd, bf16* to, int head_dim) {
    int d = 0;
    for (; d + W <= head_dim; d += W) {
        bf16 first[W], second[W], lanes[2 * W];
        store(first, load(even + d));
        store(second, load(odd + d));
        for (int i = 0; i < W; ++i) {
            lanes[2 * i] = first[i];
            lanes[2 * i + 1] = second[i];
        }
        std::memcpy(to + 2 * d, lanes, sizeof lanes);
    }
    for (; d < head_dim; ++d) {
        narrow_one(to + 2 * d, widen_one(even + d));
        narrow_one(to + 2 * d + 1, widen_one(odd + d));
    }
}

// One head of keys or values to its slot, any other layout.
template <class S, class T> INLINE void write_head(const S* from, T* to, int64_t stride, int head_dim) {
    int d = 0;
    if (stride == 1)
        for (; d + W <= head_dim; d += W) store(to + d, load(from + d));
    for (; d + W <= head_dim; d += W) {
        T lanes[W];
        store(lanes, load(from + d));
        for (int i = 0; i < W; ++i) to[(d + i) * stride] = lanes[i];
    }
    for (; d < head_dim; ++d) narrow_one(to + d * stride, widen_one(from + d));
}

// The same as int8; returns their scale. The bits are those of `quantize` in attention/torch_backend.py.
template <class S> INLINE float write_scaled(const S* from, int8_t* to, int64_t stride, int head_dim) {
    constexpr float kLeast = 0x1p-100f;
    F top = zero(), spoilt = zero();  // `spoilt` becomes NaN by infinities and NaN, which max passes over
    for (int d = 0; d < head_dim; d += W) {
        const F x = load_upto(from + d, head_dim - d);
        top = max(abs(x), top);
        spoilt = fma(x, zero(), spoilt);
    }
    const float largest = maximum(top);
    const bool finite = sum(spoilt) == 0.0f, usable = finite && largest >= kLeast;
    const F factor = broadcast(usable ? 127.0f / largest : 0.0f);
    for (int d = 0; d < head_dim; d += W) {
        const int count = lesser(W, head_dim - d);
        const F x = load_upto(from + d, count);
        int8_t lanes[W];
        store(lanes, usable ? x * factor : zero());
        if (stride == 1) std::memcpy(to + d, lanes, count);
        else
            for (int i = 0; i < count; ++i) to[(d + i) * stride] = lanes[i];
    }
    return usable ? largest / 127.0f : finite ? 0.0f : __builtin_nanf("");
}

// A token's key, and its value; where the token before or after it shares the value's pair, the first writes both.
template <class S> INLINE void write_token_pairs(const WriteArgs& args, int64_t token, int64_t frame, int64_t offset) {
    const int64_t* slot = args.slots + token;
    const bool odd = offset % 2, with_next = !odd && token + 1 < args.tokens && slot[1] == slot[0] + 1;
    const bool done = odd && token > 0 && slot[-1] == slot[0] - 1;
    const CacheView &k = args.cache.key, &v = args.cache.value;
    for (int head = 0; head < args.cache.kv_heads; ++head) {
        bf16* keys = (bf16*)k.data + frame * k.frame + head * k.head + offset * k.token;
        bf16* values = (bf16*)v.data + frame * v.frame + head * v.head + offset / 2 * v.token;
        const S* value = (const S*)args.value.data + token * args.value.token + head * args.value.head;
        write_key_pairs((const S*)args.key.data + token * args.key.token + head * args.key.head, keys, k.dim,
                        args.cache.head_dim);
        if (with_next) write_value_pairs(value, value + args.value.token, values, args.cache.head_dim);
        else if (!done) write_head(value, values + odd, v.dim, args.cache.head_dim);
    }
}

template <class S, class T> INLINE void write_token(const WriteArgs& args, int64_t token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) return;
    const int64_t frame = slot / args.cache.block_size, offset = slot % args.cache.block_size;
    auto write = [&](const S* from, const CacheView& cache, int head) __attribute__((always_inline)) {
        T* to = (T*)cache.data + frame * cache.frame + head * cache.head + offset * cache.token;
        if constexpr (sizeof(T) == 1)
            cache.scale[frame * cache.scale_frame + head * cache.scale_head + offset] =
                write_scaled(from, to, cache.dim, args.cache.head_dim);
        else write_head(from, to, cache.dim, args.cache.head_dim);
    };
    if constexpr (kSideBySide<T> == 2) {
        if (args.cache.key.pairs) return write_token_pairs<S>(args, token, frame, offset);
    }
    for (int head = 0; head < args.cache.kv_heads; ++head) {
        write((const S*)args.key.data + token * args.key.token + head * args.key.head, args.cache.key, head);
        write((const S*)args.value.data + token * args.value.token + head * args.value.head, args.cache.value, head);
    }
}

void write_kv(const WriteArgs& args) {
    with_type(args.type, [&]<class S>(S*) {
        with_cache_type(args.cache.type, [&]<class T>(T*) {
            for_rows(args.tokens, 2 * int64_t(args.cache.kv_heads) * args.cache.head_dim,
                     [&](int64_t token) { write_token<S, T>(args, token); });
        });
    });
}

void prepare_heads(const HeadsArgs& args) {
    const WriteArgs& write = args.write;
    const int64_t row = (args.heads + 2 * int64_t(write.cache.kv_heads)) * write.cache.head_dim;
    with_type(write.type, [&]<class S>(S*) {
        with_cache_type(write.cache.type, [&]<class T>(T*) {
            for_rows(write.tokens, row, [&](int64_t token) {
                S* at = (S*)args.qkv + token * row;
                for (int head = 0; head < args.heads + write.cache.kv_heads; ++head, at += write.cache.head_dim) {
                    const float* norm = head < args.heads ? args.q_norm : args.k_norm;
                    const int64_t angle = args.positions[token] * args.half;
                    if (norm) norm_row(at, norm, args.eps, at, write.cache.head_dim);
                    if (args.cos) rotate_head(at, args.cos + angle, args.sin + angle, args.half);
                }
                write_token<S, T>(write, token);
            });
        });
    });
}

}}  // namespace pagemill
