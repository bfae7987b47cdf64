// The pass over a partition for few bf16 queries and a cache in bf16, in pairs, or in floating point of 8 bits, which
// are widened to pairs in registers. It reads them where they lie. Its sums are those of TileProducts.
#pragma once

#include "attention_bf16.h"
#include "attention_float8.h"
#include "attention_plan.h"
#include "attention_tiles.h"
#include "simd.h"

#if defined(__AVX512BF16__)
namespace pagemill { namespace {

// Scores of keys [begin, end) of a partition become weights, in place, as put_weights holds them; zero over the rest of
// [from, to), in whole steps.
Softmax softmax_of_pairs(float* s, const KeyRange& own, int from, int to, const AttentionArgs& args) {
    from = from / kPairStep * kPairStep;
    to = (to + kPairStep - 1) / kPairStep * kPairStep;
    if (args.soft_cap != 0.0f) cap_scores(s + from, to - from, args.scale, args.soft_cap);
    const Weigher weigher(natural_scale(args));
    alignas(64) bf16 weights[kPartition];
    const auto weigh = [&](float reference) {
        const F shift = broadcast(weigher.shift(reference));
        F lanes = zero();
        for (int key = from; key < to; key += kPairStep) {
            const __m512i w = weigher(s + key, shift, keys_in(own, key));
            _mm512_store_si512(weights + key, w);
            lanes = add_weights(lanes, w);
        }
        return sum(lanes);
    };
    float reference = own.begin < own.end ? s[own.begin] : 0.0f, sum = weigh(reference);
    if (!is_sound(own, sum)) {
        F top = broadcast(-kInf);
        for (int key = from; key < to; key += kPairStep) top = greatest(top, s + key, keys_in(own, key));
        sum = weigh(reference = greatest_lane(top));
    }
    put_weights(s + from / 2 * kFactors, weights + from, to - from);
    return softmax_of(own, reference * natural_scale(args), sum);
}

// Reads vectors of pairs of keys or values. Where two vectors come at once (kTogether), the second one goes to `more`.
template <class T> struct PairReader {
    static constexpr int kTogether = 2;
    const Widener<T> widener;

    // A pair of dimensions of 16 tokens, and the next pair.
    INLINE __m512i keys(const T* at, int64_t dim, __m512i& more) const { return split(widener.keys(at, dim), more); }
    // Vector v of NV of two tokens' values.
    template <int NV> INLINE __m512i values(const T* at, int64_t token, int v, __m512i& more) const {
        if (NV == 1) return widener.values(at, token, 0xffff, 0xffff).first;
        return v % 2 ? more : split(widener.values(at + v * W, token), more);
    }

  private:
    INLINE static __m512i split(const typename Widener<T>::Pairs& pairs, __m512i& more) {
        more = pairs.second;
        return pairs.first;
    }
};
template <> struct PairReader<bf16> {
    static constexpr int kTogether = 1;

    INLINE __m512i keys(const bf16* at, int64_t, __m512i&) const { return _mm512_loadu_si512(at); }
    template <int NV> INLINE __m512i values(const bf16* at, int64_t, int v, __m512i&) const {
        return _mm512_loadu_si512(at + v * 2 * W);
    }
};

// A partition's keys and values as they are read: pieces of 16 tokens, first the keys', then the values', then the keys
// that the task reads next. Memory is slower than the products, so each piece is fetched some pieces ahead.
template <class T> struct PairPieces {
    // As many bytes ahead, whatever the element.
    static constexpr int kMost = kPartition / W, kAhead = 12 / int(sizeof(T));

    const T* at[2 * kMost + kAhead];
    int count, lines;  // of keys, as many of values; of a piece
    int64_t dim, token;  // from one dimension of keys, and from one token of values, to the next; in bf16, of pairs

    const T* key(int i) const { return at[i]; }
    const T* value(int i) const { return at[count + i]; }
    // The piece that is fetched with another, if `further` ones were fetched between, and the way to its next line.
    INLINE const T* ahead(int piece, int further, int64_t& line) const {
        const int then = lesser(piece + kAhead + further, 2 * count + kAhead - 1);
        const bool is_value = then >= count && then < 2 * count;
        line = is_value ? 64 / int(sizeof(T)) : sizeof(T) == 1 ? 4 * dim : dim;
        return at[then];
    }
    INLINE void fetch(int piece, int further) const {
        int64_t line;
        const T* from = ahead(piece, further, line);
        for (int i = 0; i < lines; ++i) fetch_line(from + i * line);
    }
};

// scores [MR][kScoreRow] = q [dims / 2][kFactors][MR] · NV pieces of keys from piece `piece` on.
template <int MR, class T>
void score_pairs(const float* q, const PairPieces<T>& pieces, int piece, int dims, float* scores) {
    constexpr int NV = pair_vectors(MR), kTogether = PairReader<T>::kTogether;
    const PairReader<T> reader;
    const T *at[NV], *ahead[NV];
    int64_t line[NV];
    for (int v = 0; v < NV; ++v) {
        const int own = lesser(piece + v, pieces.count - 1);
        at[v] = pieces.key(own);
        ahead[v] = pieces.ahead(own, 0, line[v]);
    }
    PairChains<MR, NV> chains;
    for (int step = 0; step < dims; step += kPairStep) {
        chains.begin_step();
        for (int d = step; d < lesser(step + kPairStep, dims); d += 2 * kTogether) {
            const int64_t offset = sizeof(T) == 1 ? d * pieces.dim : d / 2 * pieces.dim;
            __m512i more[NV];
            const auto pairs = [&](int v) { return reader.keys(at[v] + offset, pieces.dim, more[v]); };
            chains.add(pairs, q + d / 2 * kFactors * MR, 1, MR, true, true);
            if (kTogether == 2)
                chains.add([&](int v) { return more[v]; }, q + (d / 2 + 1) * kFactors * MR, 1, MR, true, true);
            for (int v = 0; v < NV; ++v) fetch_line(ahead[v] + d / (2 * kTogether) * line[v]);
        }
        chains.end_step(scores, kScoreRow, step == 0);
    }
    chains.end(scores, kScoreRow);
}

// out [MR][row] = sum over keys begin .. end - 1 of weights [MR][kScoreRow] * NV vectors of values from dimension `dim`
// on.
template <int MR, int NV, class T>
void value_pairs(const float* weights, const PairPieces<T>& pieces, int dim, int begin, int end, float* out,
                 int64_t row) {
    constexpr int kTogether = PairReader<T>::kTogether;
    const PairReader<T> reader;
    const int first_piece = begin / W;
    const int64_t pair = kTogether * pieces.token;
    PairChains<MR, NV> chains;
    for (int step = begin / kPairStep * kPairStep; step < end; step += kPairStep) {
        chains.begin_step();
        const int until = lesser(end, step + kPairStep);
        for (int key = greater(begin, step); key < until;) {
            const int piece = key / W - first_piece, stop = lesser(until, key / W * W + W), in_piece = key % W / 2;
            int64_t line;
            const T* at = pieces.value(piece) + in_piece * pair + dim * (2 / kTogether);
            const T* ahead = pieces.ahead(pieces.count + piece, MR, line);
            const int in_pair = pieces.lines * kTogether / 8;  // kTogether-th parts of lines
            int part = in_piece * in_pair + dim / W;
            auto add = [&](bool first, bool second) __attribute__((always_inline)) {
                for (int v = 0; v < NV; v += kTogether) fetch_line(ahead + (part + v) / kTogether * line);
                __m512i more;
                const auto pairs = [&](int v) { return reader.template values<NV>(at, pieces.token, v, more); };
                chains.add(pairs, weights + key / 2 * kFactors, kScoreRow, 1, first, second);
                at += pair;
                part += in_pair;
                key += first + second;
            };
            if (key % 2) add(false, true);
            while (key + 2 <= stop) add(true, true);
            if (key < stop) add(true, false);
        }
        chains.end_step(out, row, step <= begin);
    }
    chains.end(out, row);
}

template <int MR, class T> void value_rows_of_pairs(const float* weights, const PairPieces<T>& pieces, int dims,
                                                    int begin, int end, float* out) {
    constexpr int NV = pair_vectors(MR);
    int dim = 0;
    for (; dim + NV * W <= dims; dim += NV * W) value_pairs<MR, NV>(weights, pieces, dim, begin, end, out + dim, dims);
    for (; dim < dims; dim += W) value_pairs<MR, 1>(weights, pieces, dim, begin, end, out + dim, dims);
}

template <class T> struct PairPass {
    const AttentionArgs& args;
    const AttentionTask &task, *next;  // as of VectorPass
    const int group, padded, rows;
    float *queries = nullptr, *scores, *part;

    // None if keys and values cannot be read where they lie.
    static int most_rows(const AttentionArgs& args) {
        if (kIsFloat8<T>) return kPairRows;
        return args.cache.key.beside == 2 && args.cache.value.beside == 2 && args.cache.block_size % W == 0 &&
                       args.cache.head_dim % W == 0
                   ? kPairRows
                   : 0;
    }

    PairPass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int padded)
        : args(args), task(task), next(next), group(args.heads / args.cache.kv_heads), padded(padded),
          rows(task.tokens * group) {}

    int64_t query_size() const { return int64_t(args.cache.head_dim) / 2 * kFactors * rows; }  // of one KV head
    int64_t scratch_size() const { return task.heads * query_size() + rows * (kScoreRow + padded); }

    void begin(float* memory) {
        queries = memory;
        scores = queries + task.heads * query_size();
        part = scores + rows * kScoreRow;
        for (int h = 0; h < task.heads; ++h)
            for (int r = 0; r < rows; ++r) {
                const bf16* q = query_at<bf16>(args, task, group, task.head + h, r);
                float* to = queries + h * query_size() + r;
                for (int d = 0; d < args.cache.head_dim; d += 2, to += kFactors * rows) put_factors(to, rows, q + d);
            }
    }

    // As of VectorPass.
    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) const {
        with_count<kPairRows>(rows, [&]<int MR>() {
            const int from = int(all.begin), until = int(all.end);
            PairPieces<T> pieces;
            locate(base, h, from, until, pieces);
            const float* q = queries + h * query_size();
            Softmax result[MR];
            {
                const FlushSubnormals rounding;
                for (int i = 0; i < pieces.count; i += pair_vectors(MR))
                    score_pairs<MR>(q, pieces, i, args.cache.head_dim, scores + from / W * W + i * W);
                for (int r = 0; r < MR; ++r) {
                    const KeyRange& own = ranges[r / group];
                    pieces.fetch(pieces.count, r);
                    result[r] = softmax_of_pairs(scores + r * kScoreRow, own, from, until, args);
                }
                value_rows_of_pairs<MR>(scores, pieces, padded, from, until, part);
            }
            emit(0, MR, result, part);
        });
    }

    void locate(int64_t base, int h, int from, int until, PairPieces<T>& pieces) const {
        const int row = args.order[task.first].row, first = from / W;
        pieces.count = (until + W - 1) / W - first;
        pieces.lines = args.cache.head_dim * int(sizeof(T)) / 4;
        pieces.dim = args.cache.key.dim;
        pieces.token = args.cache.value.token;
        for (int i = 0; i < pieces.count; ++i) {
            const int64_t token = base + (first + i) * W;
            pieces.at[i] = key_at<T>(args, row, task.head + h, token);
            pieces.at[pieces.count + i] = value_at<T>(args, row, task.head + h, token);
        }
        const NextKeys then(args, task, next, base, from, h);
        for (int i = 0; i < PairPieces<T>::kAhead; ++i)
            pieces.at[2 * pieces.count + i] = key_at<T>(args, then.row, then.head, then[i]);
    }
};

}}  // namespace pagemill
#endif
