// The pass over a partition of keys and values in integers of 8 and 4 bits, by instructions that multiply bytes (VNNI):
// each adds the products of 4 neighbouring dimensions of 16 keys, or of 4 neighbouring tokens of 16 dimensions.
//
// A query, and a partition's weights, become integers of some bytes (byte_numbers.h), each of which is multiplied
// separately. Sums of products are exact, so their order changes no bit; what is left to round is done once per score
// and output, of three bytes twice.
#pragma once

#include "attention_plan.h"
#include "attention_tiles.h"
#include "byte_numbers.h"
#include "byte_pieces.h"
#include "linear_tiles.h"
#include "narrow_kv.h"
#include "simd.h"

#if defined(__AVX512VNNI__)
namespace pagemill { namespace {

INLINE bool lies_for_bytes(const LayerCache& cache) {
    return cache.key.beside == 4 && cache.value.beside == 4 && cache.block_size % 16 == 0 && cache.head_dim % 16 == 0;
}

// 64 bytes of keys or values as one or two vectors.
INLINE void load_bytes(const int8_t* p, __m512i (&x)[1]) { x[0] = _mm512_loadu_si512(p); }
INLINE void load_bytes(const u4* p, __m512i (&x)[2]) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(0x0f);
    x[0] = _mm512_and_si512(both, mask);
    x[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
template <class T> constexpr int kVectorsInLine = 1;
template <> constexpr int kVectorsInLine<u4> = 2;
template <class T> constexpr int kDimsInLine = 16 * kVectorsInLine<T>;  // of values; of keys a quarter
// Keys' bytes are multiplied as bytes without sign; int8 is kRaisedBy higher.
constexpr int kRaisedBy = 128;
INLINE void load_key(const int8_t* p, __m512i (&x)[1]) {
    load_bytes(p, x);
    x[0] = _mm512_xor_si512(x[0], _mm512_set1_epi8(int8_t(kRaisedBy)));
}
INLINE void load_key(const u4* p, __m512i (&x)[2]) { load_bytes(p, x); }
// Groups of dimensions that have scales and lows of their own.
template <class T> int groups_of(int) { return 1; }
template <> inline int groups_of<u4>(int head_dim) { return head_dim / kKeyGroup; }

// Of 16 tokens from `token` on, those in a range.
INLINE unsigned first_tokens(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }
INLINE __mmask16 tokens_in(const KeyRange& range, int token) {
    return __mmask16(first_tokens(range.end - token) & ~first_tokens(range.begin - token));
}
// body(v, those in the range) for the 16 tokens from 16 v on that are partly or wholly in a range.
template <class Body> INLINE void for_tokens(const KeyRange& range, Body&& body) {
    int v = int(range.begin) / 16;
    const int whole = int(range.end) / 16;
    if (range.begin % 16 && v < whole) {
        body(v, tokens_in(range, v * 16));
        ++v;
    }
    for (; v < whole; ++v) body(v, __mmask16(0xffff));
    if (range.begin < range.end && v * 16 < range.end) body(v, tokens_in(range, v * 16));
}

// body.operator()<i>() for i of 0 .. N - 1. GCC keeps arrays of sums in registers if their indices are constants from
// the beginning.
template <int N, class Body> INLINE void repeat(Body&& body) {
    [&]<int... I>(Sequence<I...>) __attribute__((always_inline)) { (body.template operator()<I>(), ...); }(Upto<N>());
}

// kWide: queries are fp32, and they and weights take 3 bytes. Of 16 bits they take one; weights take 2 in rows that add
// remainders, and where one would lose too many of them.
template <class K, class V, bool kWide> struct BytePass {
    static constexpr int kBytes = kWide ? 3 : 1, kMostBytes = kWide ? 3 : 2;
    static constexpr int kRows = kTaskRows, kHeight = kWide ? 4 : 6;
    // Vectors side by side: with more, GCC moves sums through memory.
    static constexpr int kBeside = 2;
    static constexpr int keys_beside(int height) { return kVectorsInLine<K> == 2 && kWide && height > 3 ? 1 : kBeside; }
    static constexpr int kMostGroups = kMostNarrowDims / kKeyGroup;
    static int most_rows(const AttentionArgs&) { return kRows; }

    const AttentionArgs& args;
    const AttentionTask &task, *next;
    const int group, padded, dims, groups;
    const Tiles tiles;
    // Scores and weighted values, of keys and values and of their remainders.
    struct Buffers { float *scores, *part; };
    float* queries = nullptr;
    Buffers own, precise;
    uint8_t* weights;
    BytePieces pieces[2];  // of the partition, and those that are read next, in turns
    int current = 0;

    BytePass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int padded)
        : args(args), task(task), next(next), group(args.heads / args.cache.kv_heads), padded(padded),
          dims(args.cache.head_dim), groups(groups_of<K>(dims)), tiles(task.tokens * group, kHeight) {}

    // A query: its bytes in fours, by dimensions and then by byte; what each byte's sum begins with (int8), or the
    // groups' sums (4 bits); and its unit.
    int64_t query_size() const { return dims / 4 * kBytes + greater(kBytes, groups) + 1; }
    int64_t scratch_size() const {
        const int64_t queries = task.heads * tiles.rows * query_size();
        return queries + kHeight * kMostBytes * (kPartition / 4) + (has_remainders() ? 2 : 1) * buffers_size();
    }
    int64_t buffers_size() const { return kHeight * (kScoreRow + padded); }
    bool has_remainders() const { return kVectorsInLine<K> == 2 && args.remainders.tables; }

    void begin(float* memory) {
        queries = memory;
        weights = (uint8_t*)(queries + task.heads * tiles.rows * query_size());
        const auto buffers = [&](float* at) { return Buffers{at, at + kHeight * kScoreRow}; };
        own = buffers((float*)(weights + kHeight * kMostBytes * kPartition));
        if (has_remainders()) precise = buffers(own.scores + buffers_size());
        for (int h = 0; h < task.heads; ++h)
            for (int64_t tile = 0; tile < tiles.count; ++tile)
                for (int r = 0; r < tiles.height(tile); ++r) pack_query(h, tile, r);
    }

    float* tile_at(int h, int64_t tile) const { return queries + (h * tiles.rows + tiles.begin(tile)) * query_size(); }
    int32_t* after_bytes(float* tile, int height) const { return (int32_t*)tile + dims / 4 * kBytes * height; }
    float* units_of(float* tile, int height) const {
        return (float*)after_bytes(tile, height) + greater(kBytes, groups) * height;
    }

    void pack_query(int h, int64_t tile, int r) const {
        const int height = tiles.height(tile);
        auto* fours = (int32_t*)tile_at(h, tile);
        float wide[kMostNarrowDims];
        with_type(args.type, [&]<class Q>(Q*) {
            const Q* q = query_at<Q>(args, task, group, task.head + h, tiles.begin(tile) + r);
            if constexpr (kVectorsInLine<K> == 2) widen_query(q, args, wide);
            else
                for (int d = 0; d < dims; d += W) store(wide + d, load(q + d) * broadcast(args.scale));
        });
        __m512i sums[kMostGroups][kBytes];
        for (int g = 0; g < groups; ++g)
            for (__m512i& sum : sums[g]) sum = _mm512_setzero_si512();
        const auto put = [&](int i, int l, __m512i bytes) __attribute__((always_inline)) {
            int8_t lanes[16];
            _mm_storeu_si128((__m128i*)lanes, _mm512_cvtepi32_epi8(bytes));
            __m512i& sum = sums[kVectorsInLine<K> == 2 ? i / 2 : 0][l];
            sum = _mm512_add_epi32(sum, bytes);
            for (int f = 0; f < 4; ++f) {
                // Lines of 4-bit keys have 4 dimensions and the 4 that are 16 further.
                const int step = kVectorsInLine<K> == 2 ? i / 2 * 8 + f * 2 + i % 2 : i * 4 + f;
                std::memcpy(fours + (step * kBytes + l) * height + r, lanes + f * 4, 4);
            }
        };
        const float unit = SignedBytes<kBytes>::split(wide, dims, put);
        int32_t* begins = after_bytes((float*)fours, height);
        for (int l = 0; kVectorsInLine<K> == 1 && l < kBytes; ++l)
            begins[l * height + r] = -kRaisedBy * _mm512_reduce_add_epi32(sums[0][l]);
        for (int g = 0; kVectorsInLine<K> == 2 && g < groups; ++g) {
            float total = 0.0f;
            for (int l = kBytes - 1; l >= 0; --l) total = total * 256.0f + float(_mm512_reduce_add_epi32(sums[g][l]));
            ((float*)begins)[g * height + r] = total;
        }
        units_of((float*)fours, height)[r] = unit;
    }

    // A partition's pieces, from the `first` on.
    struct Located {
        const BytePiece* at;
        int first, count;

        Located(const BytePieces& pieces, const KeyRange& all)
            : at(pieces.at), first(int(all.begin) / 16), count((int(all.end) + 15) / 16 - first) {}
    };

    // Also finds what is read next.
    Located locate(int row, int h, int64_t base, const KeyRange& all) {
        current ^= 1;
        BytePieces &here = pieces[current], &then = pieces[current ^ 1];
        const Located at(here, all);
        const int64_t token = base + at.first * 16;
        if (!here.are(row, task.head + h, token))
            here.locate(args, row, task.head + h, token, base + all.end - 1, at.count);
        here.count = lesser(here.count, at.count);
        const NextKeys keys(args, task, next, base, int(all.begin), h);
        if (keys.row == row && keys.token == token) then.locate_beside(args, here, keys.head);
        else then.locate(args, keys.row, keys.head, keys[0], keys.last, kBytePieces);
        return at;
    }
    // Lines of 64 bytes in a piece.
    int key_lines() const { return dims / 4 / kVectorsInLine<K>; }
    int value_lines() const { return dims / 4 / kVectorsInLine<V>; }

    // Inline, since GCC takes calls of what only fetches for calls that do nothing, and leaves them out.
    INLINE void fetch_scales(const BytePiece& piece) const {
        fetch_line(piece.key_scale);
        if (kVectorsInLine<K> == 2) fetch_line(piece.key_scale + args.cache.block_size);
        fetch_line(piece.value_scale);
    }

    // scores [MR][kScoreRow], in the queries' units, of pieces [begin, end). With `then` the scales of these are
    // fetched.
    template <int MR> void score(float* tile, const Located& at, int begin, int end, const BytePiece* then,
                                 ByteFetches& ahead, float* scores) const {
        constexpr int NV = keys_beside(MR), P = kVectorsInLine<K>, B = kBytes;
        const int blocks = key_lines() / 4;  // of 4 lines; of 4 bits one group
        const int32_t* begins = after_bytes(tile, MR);
        const int64_t stride = args.cache.key.dim;
        for (int piece = begin; piece < end; piece += NV) {
            const BytePiece* of[NV];
            const char* keys[NV];
            for (int v = 0; v < NV; ++v) {
                const int i = lesser(piece + v, at.count - 1);
                of[v] = at.at + i;
                keys[v] = of[v]->key;
                if (then) fetch_scales(then[i]);
            }
            const auto* fours = (const int32_t*)tile;
            F x[MR * NV];
            __m512i sums[MR * NV][B];
            for (int block = 0; block < blocks; ++block) {
                if (P == 2 || block == 0)
                    repeat<MR * NV * B>([&]<int I>() __attribute__((always_inline)) {
                        constexpr int R = I / B / NV, Byte = I % B;
                        sums[I / B][Byte] = P == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(begins[Byte * MR + R]);
                    });
                for (int line = 0; line < 4; ++line, fours += P * B * MR) {
                    __m512i k[NV][P];
                    repeat<NV>([&]<int N>() __attribute__((always_inline)) {
                        load_key((const K*)keys[N], k[N]);
                        keys[N] += stride;
                    });
                    repeat<P * B * MR>([&]<int I>() __attribute__((always_inline)) {
                        constexpr int R = I % MR, Byte = I / MR % B;
                        const __m512i q = _mm512_set1_epi32(fours[I]);
                        repeat<NV>([&]<int N>() __attribute__((always_inline)) {
                            __m512i& sum = sums[R * NV + N][Byte];
                            sum = _mm512_dpbusd_epi32(sum, k[N][I / MR / B], q);
                        });
                    });
                }
                ahead.turn();
                if (P == 1) continue;
                repeat<NV>([&]<int N>() __attribute__((always_inline)) {
                    const Integers words = load_integers(of[N]->key_scale + block * args.cache.block_size);
                    const F scale = scale_in(words), low = low_in(words);
                    repeat<MR>([&]<int R>() __attribute__((always_inline)) {
                        F& total = x[R * NV + N];
                        const F sum = join(sums[R * NV + N]);
                        total = block ? fma(sum, scale, total) : sum * scale;
                        total = fma(broadcast(((const float*)begins)[block * MR + R]), low, total);
                    });
                });
            }
            repeat<NV>([&]<int N>() __attribute__((always_inline)) {
                const F scale{(Floats)load_integers(of[N]->key_scale)};
                repeat<MR>([&]<int R>() __attribute__((always_inline)) {
                    store(scores + R * kScoreRow + (at.first + piece + N) * 16,
                          P == 2 ? x[R * NV + N] : join(sums[R * NV + N]) * scale);
                });
            });
        }
    }

    // part [MR][padded] from dimension `dim` on: lines of ND vectors, by weights of B bytes.
    template <int B, int MR, int ND> void value(const Located& at, int dim, int from, int until, const float* units,
                                                const float* lows, ByteFetches& ahead, float* part) const {
        constexpr int P = kVectorsInLine<V>, lines = ND / P;
        const int64_t line = dim / kDimsInLine<V> * 64, stride = args.cache.value.token;
        __m512i sums[MR * ND][B];
        repeat<MR * ND * B>([&]<int I>()
                                __attribute__((always_inline)) { sums[I / B][I % B] = _mm512_setzero_si512(); });
        for (int token = from / 16 * 16; token < until; token += 16) {
            const char* lines_at = at.at[token / 16 - at.first].value + line;
            const int32_t* fours = (const int32_t*)(weights + (kMostBytes - B) * kPartition) + four_of(token);
            for (int quad = 0; quad < 4; ++quad, lines_at += stride, fours += 4) {
                __m512i x[lines][P];
                repeat<lines>([&]<int I>()
                                  __attribute__((always_inline)) { load_bytes((const V*)(lines_at + I * 64), x[I]); });
                repeat<MR * B>([&]<int I>() __attribute__((always_inline)) {
                    const __m512i w = _mm512_set1_epi32(fours[(I / B * kMostBytes + I % B) * (kPartition / 4)]);
                    repeat<ND>([&]<int D>() __attribute__((always_inline)) {
                        __m512i& sum = sums[I / B * ND + D][I % B];
                        sum = _mm512_dpbusd_epi32(sum, w, x[D / P][D % P]);
                    });
                });
            }
            ahead.turn();
        }
        repeat<MR * ND>([&]<int I>() __attribute__((always_inline)) {
            constexpr int R = I / ND, D = I % ND;
            store(part + R * padded + dim + D * 16, fma(join(sums[I]), broadcast(units[R]), broadcast(lows[R])));
        });
    }
    template <int B, int MR> void value_rows(const Located& at, int from, int until, const float* units,
                                             const float* lows, ByteFetches& ahead, float* part) const {
        constexpr int ND = kBeside, least = kVectorsInLine<V>;
        int dim = 0;
        for (; dim + 16 * ND <= dims; dim += 16 * ND) value<B, MR, ND>(at, dim, from, until, units, lows, ahead, part);
        for (; dim < dims; dim += 16 * least) value<B, MR, least>(at, dim, from, until, units, lows, ahead, part);
    }

    // What a row's bytes of weights are multiplied by, what is added to all dimensions of what they weigh, and whether
    // they are all kMostBytes; else they are the last ones of these.
    struct RowScale {
        float unit, low;
        bool most;
    };

    // Row r's bytes: weights of keys `seen`, times the values' scales, through `s`; zero over the rest of [from,
    // until). weight(v, keys): those of 16 v, …, zero where there is no such key. all: they take kMostBytes.
    template <class Weight> INLINE RowScale put_weights(const Located& at, float* s, int r, const KeyRange& seen,
                                                        int from, int until, bool all, ByteFetches& ahead,
                                                        Weight&& weight) const {
        // One byte makes small weights zero. A row takes more where a kLoss of all would be lost, which is about what
        // values lose. Those of 4 bits count from their middle, so that they lose the less.
        constexpr float kLoss = kVectorsInLine<V> == 2 ? 1.0f / 32 : 1.0f / 128;
        const bool most = kWide || all;
        const float middle = !most && kVectorsInLine<V> == 2 ? 7.5f : 0.0f;
        F low = zero(), sums = zero();
        __m512i top = _mm512_setzero_si512();  // as bits, of which those of NaN are the greatest
        const int first = int(seen.begin) / 16, last = (int(seen.end) + 15) / 16;
        for (int v = from / kWeightsTogether * 4; v < first; ++v) store(s + v * 16, zero());
        for_tokens(seen, [&](int v, __mmask16 in) __attribute__((always_inline)) {
            const F w = weight(v, in);
            const Integers words = load_integers(at.at[v - at.first].value_scale);
            F scale{(Floats)words};
            if (kVectorsInLine<V> == 2) {
                scale = scale_in(words);
                F added = low_in(words);
                if (!kWide) added = fma(scale, broadcast(middle), added);
                low.v = _mm512_mask3_fmadd_ps(w.v, added.v, low.v, in);
            }
            const F scaled{_mm512_maskz_mul_ps(in, w.v, scale.v)};
            if (!kWide) sums = sums + scaled;
            top = _mm512_max_epu32(top, _mm512_castps_si512(scaled.v));
            store(s + v * 16, scaled);
            if (v % 4 == 3) ahead.turn();
        });
        for (int v = last; v * 16 < until || v % 4; ++v) store(s + v * 16, zero());
        const float greatest = float_of(_mm512_reduce_max_epu32(top)), lows = kVectorsInLine<V> == 2 ? sum(low) : 0.0f;
        uint8_t* to = weights + r * kMostBytes * kPartition;
        const float all_weights = sum(sums);
        if (!most) {
            const SplitWeights one = split_weights<1>(s, from, until, greatest, to + (kMostBytes - 1) * kPartition);
            const float kept = one.unit * float(one.sum);
            if (!(__builtin_fabsf(all_weights - kept) > kLoss * all_weights))
                return {one.unit, lows - middle * kept, false};
        }
        return {split_weights<kMostBytes>(s, from, until, greatest, to).unit, lows - middle * all_weights, true};
    }

    // Rows' weights of one byte, beside those of others that take kMostBytes.
    void widen_weights(int r, int from, int until, RowScale& scale) const {
        if (scale.most) return;
        const int begin = from / kWeightsTogether * kWeightsTogether, size = until - begin;
        std::memset(weights + r * kMostBytes * kPartition + begin, 0,
                    (size + kWeightsTogether - 1) / kWeightsTogether * kWeightsTogether);
        scale.unit /= 256.0f;
    }

    // Scores of row r, in `unit`, become bytes of weights. plain: if given, what the weights are without the scales of
    // values.
    Softmax weigh(const Located& at, float* s, int r, const KeyRange& seen, int from, int until, float unit,
                  float* plain, bool all, ByteFetches& ahead, RowScale& scale) const {
        const bool none = seen.begin >= seen.end;
        const KeyRange keys = none ? KeyRange{0, 0} : seen;
        F top = broadcast(-kInf), total = zero();
        if (args.soft_cap != 0.0f) {
            for_tokens(keys, [&](int v, __mmask16) {
                store(s + v * 16, tanh(load(s + v * 16) * broadcast(unit / args.soft_cap)) * broadcast(args.soft_cap));
            });
            unit = 1.0f;
        }
        for_tokens(keys, [&](int v, __mmask16 in) __attribute__((always_inline)) {
            top.v = _mm512_mask_max_ps(top.v, in, top.v, load(s + v * 16).v);
        });
        const float greatest = maximum(top);
        const Exponential<kMostBytes> exponential(greatest, unit);
        const auto weight = [&](int v, __mmask16 in) __attribute__((always_inline)) {
            const F w = exponential(load(s + v * 16), in);
            total = total + w;
            if (plain) store(plain + v * 16, w);
            return w;
        };
        scale = put_weights(at, s, r, keys, from, until, all, ahead, weight);
        return none ? Softmax{-kInf, 0.0f} : Softmax{greatest * unit, sum(total)};
    }

    // As of VectorPass.
    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) {
        const int row = args.order[task.first].row;
        const Located at = locate(row, h, base, all);
        const BytePiece* then = pieces[current ^ 1].at;
        ByteFetches ahead(pieces[current], pieces[current ^ 1], key_lines() / 4, value_lines() / 4, args.cache.key.dim),
            none;
        KeyRange precise_ranges[kTaskTokens], precise_all{0, 0};
        BytePieces more;
        if constexpr (kVectorsInLine<K> == 2) precise_all = precise_keys(args, task, base, precise_ranges);
        const Located remainders(more, precise_all);
        if (precise_all.begin < precise_all.end)
            more.locate(args, row, task.head + h, base + remainders.first * 16, base + precise_all.end - 1,
                        remainders.count, true);
        for (int64_t tile = 0; tile < tiles.count; ++tile)
            with_count<kHeight>(tiles.height(tile), [&]<int MR>() {
                const int first_row = int(tiles.begin(tile)), token = first_row / group,
                          tokens = (first_row + MR - 1) / group - token + 1;
                const KeyRange span = span_of(ranges + token, tokens);
                KeyRange added{0, 0};
                if (precise_all.begin < precise_all.end) added = span_of(precise_ranges + token, tokens);
                const bool adds = kVectorsInLine<K> == 2 && added.begin < added.end, first = tile == 0;
                const int from = int(span.begin), until = int(span.end), begin = from / 16, end = (until + 15) / 16;
                Softmax result[MR];
                float units[MR], lows[MR];
                float* query = tile_at(h, tile);
                constexpr int NV = keys_beside(MR);
                if (first) ahead.begin(ByteFetches::kWithScores, (end - begin + NV - 1) / NV * (key_lines() / 4));
                score<MR>(query, at, begin - at.first, end - at.first, first ? then : nullptr, ahead, own.scores);
                if (adds) {
                    score<MR>(query, remainders, int(added.begin) / 16 - remainders.first,
                              (int(added.end) + 15) / 16 - remainders.first, nullptr, none, precise.scores);
                    for (int r = 0; r < MR; ++r)
                        add_scores(own.scores + r * kScoreRow, precise.scores + r * kScoreRow,
                                   precise_ranges[(first_row + r) / group]);
                }
                if (first) ahead.begin(ByteFetches::kWithWeights, (end - begin) / 4 * MR);
                RowScale scales[MR];
                bool most = kWide;
                for (int r = 0; r < MR; ++r) {
                    const int t = (first_row + r) / group;
                    const bool near = adds && precise_ranges[t].begin < precise_ranges[t].end;
                    result[r] = weigh(at, own.scores + r * kScoreRow, r, ranges[t], from, until, units_of(query, MR)[r],
                                      adds ? precise.scores + r * kScoreRow : nullptr, near, ahead, scales[r]);
                    most |= scales[r].most;
                }
                for (int r = 0; r < MR; ++r) {
                    if (most) widen_weights(r, from, until, scales[r]);
                    units[r] = scales[r].unit;
                    lows[r] = scales[r].low;
                }
                if (first) ahead.begin(0, (end - begin) * ((dims / 16 + 1) / kBeside));
                if (from < until) {
                    if (most) value_rows<kMostBytes, MR>(at, from, until, units, lows, ahead, own.part);
                    else value_rows<kBytes, MR>(at, from, until, units, lows, ahead, own.part);
                }
                ahead.end();
                if constexpr (kVectorsInLine<K> == 2)
                    if (adds) add_remainders<MR>(remainders, precise_ranges, first_row, added);
                emit(first_row, MR, result, own.part);
            });
    }

    // Adds what the remainders of values [span) bring to the weighted values of a tile.
    template <int MR>
    void add_remainders(const Located& at, const KeyRange* ranges, int first_row, const KeyRange& span) const {
        const int from = int(span.begin), until = int(span.end);
        float units[MR], lows[MR];
        ByteFetches none;
        for (int r = 0; r < MR; ++r) {
            const KeyRange& own_keys = ranges[(first_row + r) / group];
            float* row = precise.scores + r * kScoreRow;
            const auto weight = [&](int v, __mmask16 in) __attribute__((always_inline)) {
                return F{_mm512_maskz_loadu_ps(in, row + v * 16)};
            };
            const RowScale scale = put_weights(at, row, r, own_keys.begin < own_keys.end ? own_keys : KeyRange{0, 0},
                                               from, until, true, none, weight);
            units[r] = scale.unit;
            lows[r] = scale.low;
        }
        value_rows<kMostBytes, MR>(at, from, until, units, lows, none, precise.part);
        for (int r = 0; r < MR; ++r) {
            const KeyRange& own_keys = ranges[(first_row + r) / group];
            if (own_keys.begin >= own_keys.end) continue;
            float* to = own.part + r * padded;
            for (int d = 0; d < dims; d += W) store(to + d, load(to + d) + load(precise.part + r * padded + d));
        }
    }
};

}}  // namespace pagemill
#endif
