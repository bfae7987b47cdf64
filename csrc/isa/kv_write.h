// Keys and values to their slots, and what lies between a layer's joined projection and attention.
#pragma once

#include <type_traits>

#include "attention_tiles.h"
#include "elementwise.h"
#include "narrow_kv.h"
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
        bf16 first[W], second[W];
        store(first, load(even + d));
        store(second, load(odd + d));
        const Integers pairs = (Integers)load(first).v >> 16 | (Integers)load(second).v;
        std::memcpy(to + 2 * d, &pairs, sizeof pairs);
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

// A vector's bytes to their slot.
template <class T> INLINE void place_bytes(const T* bytes, int count, T* to, const CacheView& cache, bool is_key) {
    if (is_key && cache.beside == 4)
        for (int d = 0; d < count; d += 4) std::memcpy(to + d / 4 * cache.dim, bytes + d, 4);
    else if (cache.dim == 1) std::memcpy(to, bytes, count);
    else
        for (int d = 0; d < count; ++d) to[d * cache.dim] = bytes[d];
}

// Where one head of a token's key or value lies, and its scale.
struct SlotPlace { int64_t element, scale; };
INLINE SlotPlace slot_place(const CacheView& cache, int block_size, int64_t slot, int head, bool is_key) {
    const int64_t frame = slot / block_size, offset = slot % block_size, beside = is_key ? 1 : cache.beside;
    return {frame * cache.frame + head * cache.head + offset / beside * cache.token + offset % beside,
            frame * cache.scale_frame + head * cache.scale_head + offset};
}

// A token's key or value of one head to its slot as integers, and what these leave out to another, unless that is
// negative.
template <class S> INLINE void write_narrow(const S* from, const CacheView& cache, const LayerCache& layer, bool is_key,
                                            int64_t slot, int64_t remainder_slot, int head) {
    const SlotPlace at = slot_place(cache, layer.block_size, slot, head, is_key);
    if (cache.type == DType::i8) {
        int8_t bytes[kMostNarrowDims];
        ((float*)cache.scales)[at.scale] = quantize_int8(from, bytes, layer.head_dim);
        place_bytes(bytes, layer.head_dim, (int8_t*)cache.data + at.element, cache, is_key);
        return;
    }
    float wide[kMostNarrowDims];
    for (int d = 0; d < layer.head_dim; d += W) store(wide + d, load(from + d));
    if (is_key) rotate_head(wide, layer.head_dim);
    const auto put = [&](const SlotPlace& to) {
        uint8_t bytes[kMostNarrowDims / 2];
        quantize_int4(wide, bytes, layer.head_dim, is_key, (uint32_t*)cache.scales + to.scale, layer.block_size);
        place_bytes(bytes, layer.head_dim / 2, (uint8_t*)cache.data + to.element, cache, is_key);
    };
    put(at);
    if (remainder_slot >= 0) put(slot_place(cache, layer.block_size, remainder_slot, head, is_key));
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

// T: of keys and values, int8_t for integers of any width.
template <class S, class T> INLINE void write_token(const WriteArgs& args, int64_t token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) return;
    const int64_t frame = slot / args.cache.block_size, offset = slot % args.cache.block_size,
                  remainder_slot = args.remainder_slots ? args.remainder_slots[token] : -1;
    auto write = [&](const S* from, const CacheView& cache, bool is_key, int head) __attribute__((always_inline)) {
        if constexpr (std::is_same_v<T, int8_t>) {
            write_narrow(from, cache, args.cache, is_key, slot, remainder_slot, head);
        } else {
            T* to = (T*)cache.data + frame * cache.frame + head * cache.head + offset * cache.token;
            write_head(from, to, cache.dim, args.cache.head_dim);
        }
    };
    if constexpr (kSideBySide<T> == 2) {
        if (args.cache.key.beside == 2) return write_token_pairs<S>(args, token, frame, offset);
    }
    for (int head = 0; head < args.cache.kv_heads; ++head) {
        write((const S*)args.key.data + token * args.key.token + head * args.key.head, args.cache.key, true, head);
        write((const S*)args.value.data + token * args.value.token + head * args.value.head, args.cache.value, false,
              head);
    }
}

void write_kv(const WriteArgs& args) {
    with_type(args.type, [&]<class S>(S*) {
        with_written_type(args.cache.key.type, [&]<class T>(T*) {
            for_rows(args.tokens, 2 * int64_t(args.cache.kv_heads) * args.cache.head_dim,
                     [&](int64_t token) { write_token<S, T>(args, token); });
        });
    });
}

constexpr int64_t kSlotsInTask = 4;

// Cuts tokens into tasks. Tokens of one sequence share lines, and stay together; those of many wait for a line of
// memory for nearly every dimension of a key.
INLINE int64_t tokens_in_task(const WriteArgs& write, int64_t row_elements) {
    int64_t shared = 0;
    for (int64_t token = 1; token < write.tokens; ++token) shared += write.slots[token] == write.slots[token - 1] + 1;
    return 2 * shared < write.tokens ? kSlotsInTask : greater<int64_t>(1, kSerialElements / row_elements);
}

// Fetches the lines of a slot, unless it follows the slot of the token before. They go to the second-level cache: the
// first has too few misses in flight for them.
template <class T> INLINE void fetch_slot(const WriteArgs& write, int64_t token) {
    const int64_t* slot = write.slots + token;
    if (*slot < 0 || (token > 0 && *slot == slot[-1] + 1)) return;
    for (int head = 0; head < write.cache.kv_heads; ++head)
        for (const CacheView* cache : {&write.cache.key, &write.cache.value}) {
            const bool is_key = cache == &write.cache.key;
            const SlotPlace place = slot_place(*cache, write.cache.block_size, *slot, head, is_key);
            const int64_t dims = cache->type == DType::u4 ? write.cache.head_dim / 2 : write.cache.head_dim;
            // A key's dimensions lie apart, `beside` of them together; a value's lie in one piece.
            const int64_t bytes = sizeof(T) * dims * (is_key ? cache->dim / cache->beside : cache->dim);
            const int64_t stride = is_key ? cache->dim * sizeof(T) : 64;
            const char* at = (const char*)cache->data + place.element * sizeof(T);
            for (int64_t i = 0; i < bytes; i += stride) __builtin_prefetch(at + i, 0, 2);
            if (cache->scales) __builtin_prefetch((const float*)cache->scales + place.scale, 0, 2);
        }
}

void prepare_heads(const HeadsArgs& args) {
    const WriteArgs& write = args.write;
    const int64_t row = (args.heads + 2 * int64_t(write.cache.kv_heads)) * write.cache.head_dim;
    const int64_t piece = tokens_in_task(write, row);
    with_type(write.type, [&]<class S>(S*) {
        with_written_type(write.cache.key.type, [&]<class T>(T*) {
            const auto prepare = [&](int64_t token) __attribute__((always_inline)) {
                S* at = (S*)args.qkv + token * row;
                for (int head = 0; head < args.heads + write.cache.kv_heads; ++head, at += write.cache.head_dim) {
                    const float* norm = head < args.heads ? args.q_norm : args.k_norm;
                    const int64_t angle = args.positions[token] * args.half;
                    if (norm) norm_row(at, norm, args.eps, at, write.cache.head_dim);
                    if (args.cos) rotate_head(at, args.cos + angle, args.sin + angle, args.half);
                }
                write_token<S, T>(write, token);
            };
            auto run = [&](int64_t task, int) {
                const int64_t first = task * piece, end = lesser(write.tokens, first + piece);
                fetch_slot<T>(write, first);
                for (int64_t token = first; token < end; ++token) {
                    if (token + 1 < end) fetch_slot<T>(write, token + 1);
                    prepare(token);
                }
            };
            parallel((write.tokens + piece - 1) / piece, run);
        });
    });
}

}}  // namespace pagemill
