// The pass over a partition for few bf16 queries and a bf16 cache in pairs, which it reads where they lie. Its sums are
// those of TileProducts.
#pragma once

#include "attention_bf16.h"
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

// A partition's keys and values as they are read: pieces of 16 tokens, first the keys', then the values', then the keys
// that the task reads next. Memory is slower than the products, so each piece is fetched a constant number of pieces
// ahead.
struct PairPieces {
    static constexpr int kMost = kPartition / W, kAhead = 6;

    const bf16* at[2 * kMost + kAhead];
    int count, lines;  // of keys, as many of values; of a piece
    int64_t key_row, value_row;  // from one pair of dimensions, of tokens, to the next

    const bf16* key(int i) const { return at[i]; }
    const bf16* value(int i) const { return at[count + i]; }
    // From one of a piece's lines to the next.
    int64_t line_stride(int piece) const { return piece >= count && piece < 2 * count ? 32 : key_row; }
    INLINE void fetch(int piece) const {
        for (int line = 0; line < lines; ++line) fetch_line(at[piece] + line * line_stride(piece));
    }
};

// scores [MR][kScoreRow] = q [dims / 2][kFactors][MR] · NV pieces of keys from piece `piece` on.
template <int MR> void score_pairs(const float* q, const PairPieces& pieces, int piece, int dims, float* scores) {
    constexpr int NV = pair_vectors(MR);
    const bf16 *at[NV], *ahead[NV];
    int64_t ahead_row[NV];
    for (int v = 0; v < NV; ++v) {
        const int own = lesser(piece + v, pieces.count - 1), then = own + PairPieces::kAhead;
        at[v] = pieces.key(own);
        ahead[v] = pieces.at[then];
        ahead_row[v] = pieces.line_stride(then);
    }
    PairChains<MR, NV> chains;
    for (int step = 0; step < dims; step += kPairStep) {
        chains.begin_step();
        for (int d = step; d < lesser(step + kPairStep, dims); d += 2) {
            const int64_t offset = d / 2 * pieces.key_row;
            chains.add([&](int v) { return at[v] + offset; }, q + d / 2 * kFactors * MR, 1, MR, true, true);
            for (int v = 0; v < NV; ++v) fetch_line(ahead[v] + d / 2 * ahead_row[v]);
        }
        chains.end_step(scores, kScoreRow, step == 0);
    }
    chains.end(scores, kScoreRow);
}

// out [MR][row] = sum over keys begin .. end - 1 of weights [MR][kScoreRow] * NV vectors of values from dimension `dim`
// on.
template <int MR, int NV>
void value_pairs(const float* weights, const PairPieces& pieces, int dim, int begin, int end, float* out, int64_t row) {
    const int first_piece = begin / W;
    PairChains<MR, NV> chains;
    for (int step = begin / kPairStep * kPairStep; step < end; step += kPairStep) {
        chains.begin_step();
        const int until = lesser(end, step + kPairStep);
        for (int key = greater(begin, step); key < until;) {
            const int piece = key / W - first_piece, stop = lesser(until, key / W * W + W), in_piece = key % W / 2;
            const int then =
                lesser(pieces.count + piece + PairPieces::kAhead + MR, 2 * pieces.count + PairPieces::kAhead - 1);
            const int64_t ahead_row = pieces.line_stride(then);
            const bf16* at = pieces.value(piece) + in_piece * pieces.value_row + dim * 2;
            const bf16* ahead = pieces.at[then] + (in_piece * (pieces.lines / 8) + dim / W) * ahead_row;
            auto add = [&](bool first, bool second) __attribute__((always_inline)) {
                for (int v = 0; v < NV; ++v) fetch_line(ahead + v * ahead_row);
                chains.add([&](int v) { return at + v * 2 * W; }, weights + key / 2 * kFactors, kScoreRow, 1, first,
                           second);
                at += pieces.value_row;
                ahead += pieces.lines / 8 * ahead_row;
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

template <int MR> void value_rows_of_pairs(const float* weights, const PairPieces& pieces, int dims, int begin, int end,
                                           float* out) {
    constexpr int NV = pair_vectors(MR);
    int dim = 0;
    for (; dim + NV * W <= dims; dim += NV * W) value_pairs<MR, NV>(weights, pieces, dim, begin, end, out + dim, dims);
    for (; dim < dims; dim += W) value_pairs<MR, 1>(weights, pieces, dim, begin, end, out + dim, dims);
}

struct PairPass {
    const AttentionArgs& args;
    const AttentionTask &task, *next;  // as of VectorPass
    const int group, padded, rows;
    float *queries = nullptr, *scores, *part;

    // None if keys and values cannot be read where they lie.
    static int most_rows(const AttentionArgs& args) {
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
            PairPieces pieces;
            locate(base, h, from, until, pieces);
            const float* q = queries + h * query_size();
            Softmax result[MR];
            {
                const FlushSubnormals rounding;
                for (int i = 0; i < pieces.count; i += pair_vectors(MR))
                    score_pairs<MR>(q, pieces, i, args.cache.head_dim, scores + from / W * W + i * W);
                for (int r = 0; r < MR; ++r) {
                    const KeyRange& own = ranges[r / group];
                    pieces.fetch(
                        lesser(pieces.count + PairPieces::kAhead + r, 2 * pieces.count + PairPieces::kAhead - 1));
                    result[r] = softmax_of_pairs(scores + r * kScoreRow, own, from, until, args);
                }
                value_rows_of_pairs<MR>(scores, pieces, padded, from, until, part);
            }
            emit(0, MR, result, part);
        });
    }

    void locate(int64_t base, int h, int from, int until, PairPieces& pieces) const {
        const int row = args.order[task.first].row, first = from / W;
        pieces.count = (until + W - 1) / W - first;
        pieces.lines = args.cache.head_dim / 2;
        pieces.key_row = args.cache.key.dim;
        pieces.value_row = args.cache.value.token;
        for (int i = 0; i < pieces.count; ++i) {
            const int64_t token = base + (first + i) * W;
            pieces.at[i] = key_at<bf16>(args, row, task.head + h, token);
            pieces.at[pieces.count + i] = value_pairs_at(args, row, task.head + h, token);
        }
        const NextKeys then(args, task, next, base, from, h);
        for (int i = 0; i < PairPieces::kAhead; ++i)
            pieces.at[2 * pieces.count + i] = key_at<bf16>(args, then.row, then.head, then[i]);
    }
};

}}  // namespace pagemill
#endif
