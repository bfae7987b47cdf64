// Keys and values to their slots, and what lies between a layer's joined projection and attention.

// One head of keys or values to its slot, any layout.
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

template <class S, class T> INLINE void write_token(const WriteArgs& args, int64_t token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) return;
    const int64_t frame = slot / args.block_size, offset = slot % args.block_size;
    const CacheView &k = args.key_cache, &v = args.value_cache;
    for (int head = 0; head < args.kv_heads; ++head) {
        write_head((const S*)args.key + token * args.key_token + head * args.key_head,
                   (T*)k.data + frame * k.frame + head * k.head + offset * k.token, k.dim, args.head_dim);
        write_head((const S*)args.value + token * args.value_token + head * args.value_head,
                   (T*)v.data + frame * v.frame + head * v.head + offset * v.token, v.dim, args.head_dim);
    }
}

void write_kv(const WriteArgs& args) {
    with_type(args.type, [&](auto* s) {
        with_type(args.cache_type, [&](auto* t) {
            for_rows(args.tokens, 2 * int64_t(args.kv_heads) * args.head_dim,
                     [&](int64_t token) { write_token<Pointee<decltype(s)>, Pointee<decltype(t)>>(args, token); });
        });
    });
}

void prepare_heads(const HeadsArgs& args) {
    const WriteArgs& write = args.write;
    const int64_t row = (args.heads + 2 * int64_t(write.kv_heads)) * write.head_dim;
    with_type(write.type, [&](auto* s) {
        using S = Pointee<decltype(s)>;
        with_type(write.cache_type, [&](auto* t) {
            for_rows(write.tokens, row, [&](int64_t token) {
                S* at = (S*)args.qkv + token * row;
                for (int head = 0; head < args.heads + write.kv_heads; ++head, at += write.head_dim) {
                    const float* norm = head < args.heads ? args.q_norm : args.k_norm;
                    const int64_t angle = args.positions[token] * args.half;
                    if (norm) norm_row(at, norm, args.eps, at, write.head_dim);
                    if (args.cos) rotate_head(at, args.cos + angle, args.sin + angle, args.half);
                }
                write_token<S, Pointee<decltype(t)>>(write, token);
            });
        });
    });
}
