// What adapters add to a linear layer's outputs: y += scale * B (A x), for the tokens that have one. Each token is
// summed in the same order whatever tokens lie beside it: over k in two chains, over ranks in one.
#pragma once

#include "../threads.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int kShrinkTokens = W == 16 ? 8 : 4,
              kExpandTokens = W == 16 ? 6 : 4;  // as many sums as there are registers for
constexpr int kExpandVectors = W == 16 ? 4 : 2;
constexpr int64_t kTokensInTask = 48, kPanelsInTask = 4;
constexpr int64_t kLowRankAhead = 3072;  // bytes: few tokens read all of a and b once, from memory

INLINE int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

template <size_t Bytes> INLINE void prefetch_lines(const char* first) {
    for (size_t at = 0; at < Bytes; at += 64) __builtin_prefetch(first + at);
}

// out [R][kRankBlock] = scale * x · block of A.
template <int R, class T>
void shrink_tile(const float* const* x, const T* a, int64_t k, float scale, float* out, int64_t out_row) {
    for (int v = 0; v < kRankBlock; v += W) {
        F even[R], odd[R];
        for (int r = 0; r < R; ++r) even[r] = odd[r] = zero();
        int64_t i = 0;
        for (; i + 2 <= k; i += 2) {
            prefetch_lines<2 * kRankBlock * sizeof(T)>((const char*)(a + i * kRankBlock) + kLowRankAhead);
            const F first = load(a + i * kRankBlock + v), second = load(a + (i + 1) * kRankBlock + v);
            for (int r = 0; r < R; ++r) {
                even[r] = fma(broadcast(x[r][i]), first, even[r]);
                odd[r] = fma(broadcast(x[r][i + 1]), second, odd[r]);
            }
        }
        for (; i < k; ++i) {
            const F last = load(a + i * kRankBlock + v);
            for (int r = 0; r < R; ++r) even[r] = fma(broadcast(x[r][i]), last, even[r]);
        }
        for (int r = 0; r < R; ++r) store(out + r * out_row + v, (even[r] + odd[r]) * broadcast(scale));
    }
}

// y [R][columns] += low [R][rank] · panel of B.
template <int R, class T, class Y>
void expand_tile(const float* low, int64_t low_row, const T* b, int64_t rank, int64_t columns, Y* const* y) {
    constexpr int width = kExpandVectors * W;
    for (int64_t begin = 0; begin < columns; begin += width) {
        F sums[R][kExpandVectors];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kExpandVectors; ++v) sums[r][v] = zero();
        for (int64_t i = 0; i < rank; ++i) {
            prefetch_lines<width * sizeof(T)>((const char*)(b + i * kOutputPanel + begin) + kLowRankAhead);
            F w[kExpandVectors];
            for (int v = 0; v < kExpandVectors; ++v) w[v] = load(b + i * kOutputPanel + begin + v * W);
            for (int r = 0; r < R; ++r) {
                const F x = broadcast(low[r * low_row + i]);
                for (int v = 0; v < kExpandVectors; ++v) sums[r][v] = fma(x, w[v], sums[r][v]);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < kExpandVectors && begin + v * W < columns; ++v) {
                Y* to = y[r] + begin + v * W;
                const int64_t left = columns - begin - v * W;
                store_upto(to, load_upto(to, left) + sums[r][v], left);
            }
    }
}

int64_t rank_blocks(const LowRank& low_rank) {
    int64_t blocks = 0;
    for (int i = 0; i < low_rank.num_parts; ++i) blocks += pieces(low_rank.parts[i].rank, kRankBlock);
    return blocks;
}

int64_t panel_groups(const LowRankPart& part) { return pieces(part.count, kPanelsInTask * kOutputPanel); }

struct LowRankRunner {
    const LowRankArgs& args;
    float* low;  // [all runs' tokens, low_row]
    int64_t low_row;

    // Of a run's tokens: the first row in `low`.
    int64_t first_row(int run) const {
        int64_t row = 0;
        for (int i = 0; i < run; ++i) row += args.runs[i].count;
        return row;
    }

    static int64_t shrink_tasks(const LowRankRun& run) {
        return pieces(run.count, kShrinkTokens) * rank_blocks(*run.low_rank);
    }

    static int64_t expand_tasks(const LowRankRun& run) {
        int64_t groups = 0;
        for (int i = 0; i < run.low_rank->num_parts; ++i) groups += panel_groups(run.low_rank->parts[i]);
        return pieces(run.count, kTokensInTask) * groups;
    }

    void shrink(int64_t task, int thread) const {
        int number = 0;
        for (; task >= shrink_tasks(args.runs[number]); ++number) task -= shrink_tasks(args.runs[number]);
        const LowRankRun& run = args.runs[number];
        const int64_t blocks = rank_blocks(*run.low_rank), first = task / blocks * kShrinkTokens,
                      column = task % blocks;
        const LowRankPart* part = run.low_rank->parts;
        int64_t block = column;
        for (; block >= pieces(part->rank, kRankBlock); ++part) block -= pieces(part->rank, kRankBlock);
        const int64_t k = run.low_rank->k;
        const int count = int(lesser<int64_t>(kShrinkTokens, run.count - first));
        float* out = low + (first_row(number) + first) * low_row + column * kRankBlock;
        const float* rows[kShrinkTokens] = {};
        with_type(args.type, [&]<class X>(X*) {
            if constexpr (sizeof(X) == sizeof(float)) {
                for (int i = 0; i < count; ++i)
                    rows[i] = (const float*)args.x + (run.tokens[first + i] - args.first) * args.x_row;
            } else {
                float* wide = (float*)thread_scratch(thread, sizeof(float) * count * k);
                for (int i = 0; i < count; ++i) {
                    const X* x = (const X*)args.x + (run.tokens[first + i] - args.first) * args.x_row;
                    for_vectors(k, [&](int64_t at, auto some) { some.store(wide + i * k + at, some.load(x + at)); });
                    rows[i] = wide + i * k;
                }
            }
        });
        with_type(run.low_rank->type, [&]<class T>(T*) {
            const T* a = (const T*)part->a + block * k * kRankBlock;
            with_count<kShrinkTokens>(count,
                                      [&]<int R>() { shrink_tile<R, T>(rows, a, k, part->scale, out, low_row); });
        });
    }

    void expand(int64_t task, int) const {
        int number = 0;
        for (; task >= expand_tasks(args.runs[number]); ++number) task -= expand_tasks(args.runs[number]);
        const LowRankRun& run = args.runs[number];
        const int64_t tiles = pieces(run.count, kTokensInTask), begin = task % tiles * kTokensInTask;
        int64_t group = task / tiles, column = 0;
        const LowRankPart* part = run.low_rank->parts;
        for (; group >= panel_groups(*part); ++part) {
            group -= panel_groups(*part);
            column += pieces(part->rank, kRankBlock) * kRankBlock;
        }
        const int64_t end = lesser(begin + kTokensInTask, run.count);
        const float* rows = low + first_row(number) * low_row + column;
        const int64_t last_panel = lesser((group + 1) * kPanelsInTask, pieces(part->count, kOutputPanel));
        with_type(args.type, [&]<class Y>(Y*) {
            with_type(run.low_rank->type, [&]<class T>(T*) {
                for (int64_t panel = group * kPanelsInTask; panel < last_panel; ++panel) {
                    const T* b = (const T*)part->b + panel * part->rank * kOutputPanel;
                    const int64_t columns = lesser(kOutputPanel, part->count - panel * kOutputPanel);
                    for (int64_t token = begin; token < end; token += kExpandTokens) {
                        Y* y[kExpandTokens] = {};
                        const int count = int(lesser<int64_t>(kExpandTokens, end - token));
                        for (int i = 0; i < count; ++i)
                            y[i] = (Y*)args.y + (run.tokens[token + i] - args.first) * args.y_row + part->begin +
                                   panel * kOutputPanel;
                        with_count<kExpandTokens>(count, [&]<int R>() {
                            expand_tile<R, T, Y>(rows + token * low_row, low_row, b, part->rank, columns, y);
                        });
                    }
                }
            });
        });
    }
};

void add_low_rank(const LowRankArgs& args) {
    int64_t blocks = 0, tokens = 0, shrinks = 0, expands = 0;
    for (int i = 0; i < args.num_runs; ++i) {
        blocks = greater(blocks, rank_blocks(*args.runs[i].low_rank));
        tokens += args.runs[i].count;
        shrinks += LowRankRunner::shrink_tasks(args.runs[i]);
        expands += LowRankRunner::expand_tasks(args.runs[i]);
    }
    if (!tokens || !blocks) return;
    const int64_t low_row = blocks * kRankBlock;
    const LowRankRunner runner{args, (float*)caller_scratch(0, sizeof(float) * tokens * low_row), low_row};
    auto shrink = [&](int64_t task, int thread) { runner.shrink(task, thread); };
    auto expand = [&](int64_t task, int thread) { runner.expand(task, thread); };
    parallel(shrinks, shrink);
    parallel(expands, expand);
}

}}  // namespace pagemill
