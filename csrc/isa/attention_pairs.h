// Sums as tiles take them, for bf16 queries and a bf16 cache: a tile product (TDPBF16PS) adds to each of its sums a step of 32
// neighbouring k as two chains of multiply-adds from zero on, one over the even k and one over the odd, which are added to
// each other and then to the sum; subnormal numbers are taken for zero throughout. The products are exact, so the same on
// plain vectors in fp32 gives the same bits, and few rows need no tiles: they read keys and values where they lie.

constexpr int kPairStep = 32;
constexpr int kPairRows = 6;  // the most (token, head) rows that gain nothing from tiles

struct FlushSubnormals {
    const unsigned before = _mm_getcsr();
    FlushSubnormals() { _mm_setcsr(before | 0x8040); }
    ~FlushSubnormals() { _mm_setcsr(before); }
    FlushSubnormals(const FlushSubnormals&) = delete;
};

// A step's end: its two chains are added to each other, and to the sums at `out`, which begin with the first step.
template <int MR, int NV>
INLINE void add_step(const F (&even)[MR][NV], const F (&odd)[MR][NV], float* out, int64_t row, bool first) {
    for (int r = 0; r < MR; ++r)
        for (int v = 0; v < NV; ++v) {
            float* at = out + r * row + v * W;
            store(at, (first ? zero() : load(at)) + (even[r][v] + odd[r][v]));
        }
}

// As score_tile. A step's even dimensions come before its odd ones: the registers hold one chain of each sum.
template <int MR, class T>
void score_pairs(const float* q, const T* const* key, int64_t key_dim, int dims, float* scores) {
    constexpr int NV = vectors_beside(MR);
    const T *at[NV], *next[NV];
    for (int v = 0; v < NV; ++v) {
        at[v] = key[v];
        next[v] = key[NV + v];
    }
    const bool shares_line = key_dim * sizeof(T) <= 32;  // an even dimension with the next one
    for (int step = 0; step < dims; step += kPairStep) {
        F chains[2][MR][NV];
        const int stop = lesser(step + kPairStep, dims);
        for (int odd = 0; odd < 2; ++odd) {
            F acc[MR][NV];
            for (int r = 0; r < MR; ++r)
                for (int v = 0; v < NV; ++v) acc[r][v] = zero();
            for (int d = step + odd; d < stop; d += 2) {
                F k[NV];
                for (int v = 0; v < NV; ++v) k[v] = load(at[v] + d * key_dim);
                for (int v = 0; v < NV && (!odd || !shares_line); ++v) __builtin_prefetch(next[v] + d * key_dim);
                for (int r = 0; r < MR; ++r) {
                    const F x = broadcast(q[d * MR + r]);
                    for (int v = 0; v < NV; ++v) acc[r][v] = fma(x, k[v], acc[r][v]);
                }
            }
            for (int r = 0; r < MR; ++r)
                for (int v = 0; v < NV; ++v) chains[odd][r][v] = acc[r][v];
        }
        add_step<MR, NV>(chains[0], chains[1], scores, kScoreRow, step == 0);
    }
}

// As value_tile, a step's even keys before its odd ones.
template <int MR, int NV, class T>
void value_pairs(const float* weights, const Values<T>& values, int dim, int begin, int end, float* out, int64_t row) {
    for (int step = begin / kPairStep * kPairStep; step < end; step += kPairStep) {
        F chains[2][MR][NV];
        const int from = greater(begin, step), until = lesser(end, step + kPairStep);
        for (int odd = 0; odd < 2; ++odd) {
            F acc[MR][NV];
            for (int r = 0; r < MR; ++r)
                for (int v = 0; v < NV; ++v) acc[r][v] = zero();
            for (int key = from + ((from ^ odd) & 1); key < until;) {
                const int block = key / values.tokens, stop = lesser(until, (block + 1) * values.tokens);
                const int64_t offset = (key - block * values.tokens) * values.stride + dim;
                const T *at = values.block[block] + offset, *next = values.block[block + 1] + offset;
                for (; key < stop; key += 2, at += 2 * values.stride, next += 2 * values.stride) {
                    for (int v = 0; v < NV; v += 4 / sizeof(T)) __builtin_prefetch(next + v * W);
                    F x[NV];
                    for (int v = 0; v < NV; ++v) x[v] = load(at + v * W);
                    for (int r = 0; r < MR; ++r) {
                        const F w = broadcast(weights[r * kScoreRow + key]);
                        for (int v = 0; v < NV; ++v) acc[r][v] = fma(w, x[v], acc[r][v]);
                    }
                }
            }
            for (int r = 0; r < MR; ++r)
                for (int v = 0; v < NV; ++v) chains[odd][r][v] = acc[r][v];
        }
        add_step<MR, NV>(chains[0], chains[1], out, row, step <= begin);
    }
}

template <int MR, class T>
void value_rows_of_pairs(const float* weights, const Values<T>& values, int dims, int begin, int end, float* out) {
    constexpr int NV = vectors_beside(MR);
    int dim = 0;
    for (; dim + NV * W <= dims; dim += NV * W) value_pairs<MR, NV>(weights, values, dim, begin, end, out + dim, dims);
    for (; dim < dims; dim += W) value_pairs<MR, 1>(weights, values, dim, begin, end, out + dim, dims);
}

template <class T, int... R> const TileKernels<T>& pair_kernels(int rows, Sequence<R...>) {
    static constexpr TileKernels<T> table[] = {
        {score_pairs<R + 1, T>, value_rows_of_pairs<R + 1, T>, vectors_beside(R + 1)}...};
    return table[rows - 1];
}

// 2^x for x <= 0 (relative error below 3e-6), exactly 0 below 2^-126 where subnormal numbers are flushed.
INLINE F exp2_nonpositive(F x) {
    constexpr int kFraction = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;
    const F r{_mm512_reduce_ps(x.v, kFraction)};
    F p = broadcast(0.0135341678f);
    p = fma(p, r, broadcast(0.0520114601f));
    p = fma(p, r, broadcast(0.241442755f));
    p = fma(p, r, broadcast(0.693003833f));
    p = fma(p, r, broadcast(1.00000262f));
    return {_mm512_scalef_ps(p.v, x.v)};
}

// Two vectors of weights, rounded to bf16.
INLINE void store_weights(bf16* to, F low, F high) { _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)); }
INLINE void store_weights(float* to, F low, F high) {
    const auto rounded = [](F x) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v)), 16));
    };
    _mm512_storeu_ps(to, rounded(low));
    _mm512_storeu_ps(to + W, rounded(high));
}

// Scores of keys [begin, end) of a partition become weights 2^(factor * (score - maximum)), rounded to bf16 and held as O, in
// place from the row's start on; zero over the rest of [from, to). The sum is that of the weights before they are rounded.
// The maximum is returned scaled.
template <class O> INLINE Softmax softmax_to_bf16(float* s, int begin, int end, int from, int to, float scale, float soft_cap) {
    O* weights = (O*)s;
    from = from / kPairStep * kPairStep;
    to = (to + kPairStep - 1) / kPairStep * kPairStep;
    const int first = begin < end ? begin / kPairStep * kPairStep : from;
    const int last = begin < end ? (end + kPairStep - 1) / kPairStep * kPairStep : from;
    float lanes[W];
    for (int i = 0; i < W; ++i) lanes[i] = float(i);
    const F iota = load(lanes), none = broadcast(-kInf);
    for (int i = first; i < last && soft_cap != 0.0f; i += W)
        store(s + i, tanh(load(s + i) * broadcast(scale / soft_cap)) * broadcast(soft_cap));
    auto mask = [&](int i) {
        const F x = select_less(iota, broadcast(float(begin - i)), none, load(s + i));
        store(s + i, select_less(iota, broadcast(float(end - i)), x, none));
    };
    for (int i = first; i < last && i < begin; i += W) mask(i);
    for (int i = last - W; i >= first && i + W > end; i -= W) mask(i);
    F top_even = none, top_odd = none;
    for (int i = first; i < last; i += 2 * W) {
        top_even = max(top_even, load(s + i));
        top_odd = max(top_odd, load(s + i + W));
    }
    const float top = maximum(max(top_even, top_odd)), natural = soft_cap != 0.0f ? 1.0f : scale;
    const F factor = broadcast(natural * 1.44269504f), shift = broadcast(-top * (natural * 1.44269504f));
    F even = zero(), odd = zero();
    for (int i = first; i < last; i += 2 * W) {
        const F p = exp2_nonpositive(fma(load(s + i), factor, shift)), q = exp2_nonpositive(fma(load(s + i + W), factor, shift));
        even = even + p;
        odd = odd + q;
        store_weights(weights + i, p, q);
    }
    for (int i = from; i < first; i += kPairStep) store_weights(weights + i, zero(), zero());
    for (int i = last; i < to; i += kPairStep) store_weights(weights + i, zero(), zero());
    return begin < end ? Softmax{top * natural, sum(even + odd)} : Softmax{-kInf, 0.0f};
}

struct PairSums {
    using Rounding = FlushSubnormals;
    static constexpr int kRows = kPairRows, kMostRows = kPairRows;

    template <class E> static const TileKernels<E>& kernels(int rows) { return pair_kernels<E>(rows, Upto<kRows>{}); }
    static float query_factor(const AttentionArgs&) { return 1.0f; }
    static Softmax weigh(const AttentionArgs& args, float* scores, const KeyRange& own, int from, int until, const TokenScales*) {
        return softmax_to_bf16<float>(scores, int(own.begin), int(own.end), from, until, args.scale, args.soft_cap);
    }
};
