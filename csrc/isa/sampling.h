// Tokens and log probabilities from rows of logits. A row is one task on one thread, and all sums go in one order, so a
// row's result is a function of its own numbers. Sums of weights are fp64.
#pragma once

#include "../threads.h"
#include "math.h"
#include "simd.h"

namespace pagemill { namespace {

constexpr int64_t kPiece = 64;  // logits with one maximum and one sum; the last piece of a row is padded with -inf

INLINE int64_t pieces_of(int64_t n) { return (n + kPiece - 1) / kPiece; }

INLINE const float* piece_at(const float* x, int64_t n, int64_t piece, float* padded) {
    const float* begin = x + piece * kPiece;
    const int64_t left = n - piece * kPiece;
    if (left >= kPiece) return begin;
    for (int64_t i = 0; i < kPiece; ++i) padded[i] = i < left ? begin[i] : -kInf;
    return padded;
}

// The largest logit; NaN if one is NaN or +inf. maxima [pieces]
float scan(const float* x, int64_t n, float* maxima) {
    float padded[kPiece];
    F most = broadcast(-kInf), faults = zero();
    for (int64_t piece = 0; piece < pieces_of(n); ++piece) {
        const float* values = piece_at(x, n, piece, padded);
        F largest = broadcast(-kInf);
        for (int i = 0; i < kPiece; i += W) {
            const F v = load(values + i);
            faults = select_less(v, broadcast(kInf), faults, broadcast(1.0f));
            largest = max(largest, v);
        }
        maxima[piece] = maximum(largest);
        most = max(most, largest);
    }
    return maximum(faults) > 0 ? __builtin_nanf("") : maximum(most);
}

int64_t first_of(const float* x, const float* maxima, float most) {
    int64_t piece = 0;
    while (maxima[piece] != most) ++piece;
    int64_t i = piece * kPiece;
    while (x[i] != most) ++i;
    return i;
}

void mask_logits(const MaskArgs& a) {
    auto mask = [&](int64_t item, int) {
        float* x = a.logits + a.places[item] * a.n;
        if (const uint32_t* bits = a.allowed.of(item))
            for_vectors(a.n, [&](int64_t i, auto part) {
                part.store(x + i, select_set(bits[i / 32] >> i % 32, part.load(x + i), broadcast(-kInf)));
            });
    };
    parallel(a.items, mask);
}

// Weights are probabilities times a factor of the row: exp((x - most) / temperature).
struct Weigh {
    float most, inverse;  // inverse: 1 / temperature

    F operator()(F x) const { return exp_nonpositive((x - broadcast(most)) * broadcast(inverse)); }
};

// sums [pieces]; returns their sum in order.
double weigh_pieces(const float* x, int64_t n, Weigh weigh, double* sums) {
    float padded[kPiece];
    double total = 0;
    for (int64_t piece = 0; piece < pieces_of(n); ++piece) {
        const float* values = piece_at(x, n, piece, padded);
        F all = zero();
        for (int i = 0; i < kPiece; i += W) all = all + weigh(load(values + i));
        total += sums[piece] = double(sum(all));
    }
    return total;
}

INLINE double below(double target, double total) { return target < total ? target : __builtin_nextafter(total, 0.0); }

// The first token, in vocabulary order, at which the sum of weights exceeds the uniform number's share of all.
int64_t draw_from_all(const float* x, int64_t n, Weigh weigh, double uniform, double* sums) {
    const double total = weigh_pieces(x, n, weigh, sums);
    double target = below(uniform * total, total), before = 0;
    int64_t piece = 0;
    while (before + sums[piece] <= target) before += sums[piece++];
    float padded[kPiece], weights[kPiece];
    const float* values = piece_at(x, n, piece, padded);
    for (int i = 0; i < kPiece; i += W) store(weights + i, weigh(load(values + i)));
    double inside = 0;
    for (float weight : weights) inside += weight;
    target = below(target - before, inside);
    double reached = 0;
    int64_t i = 0;
    while ((reached += weights[i]) <= target) ++i;
    return piece * kPiece + i;
}

// The k-th largest (from 1) of `count` values, which are reordered.
float kth_largest(float* values, int64_t count, int64_t k) {
    int64_t low = 0, high = count;  // the answer lies in values[low .. high), place k - 1 in descending order
    for (;;) {
        const float a = values[low], b = values[low + (high - low) / 2], c = values[high - 1];
        const float pivot = greater(lesser(a, b), lesser(greater(a, b), c));
        int64_t above = low, equal = low;  // [low, above) > pivot, [above, equal) == pivot
        for (int64_t i = low; i < high; ++i) {
            const float v = values[i];
            if (v < pivot) continue;
            values[i] = values[equal];
            values[equal] = v;
            if (v > pivot) {
                values[equal] = values[above];
                values[above++] = v;
            }
            ++equal;
        }
        if (k <= above) high = above;
        else if (k <= equal) return pivot;
        else low = equal;
    }
}

// The k-th largest of a row. values [n] is written over.
float kth_of_row(const float* x, int64_t n, const float* maxima, int64_t k, float* values) {
    const int64_t pieces = pieces_of(n);
    float least = -kInf;  // no more than the k-th largest
    if (k <= pieces) {
        std::memcpy(values, maxima, pieces * sizeof(float));
        least = kth_largest(values, pieces, k);
    }
    int64_t count = 0;
    for (int64_t piece = 0; piece < pieces; ++piece)
        if (maxima[piece] >= least)
            for (int64_t i = piece * kPiece; i < lesser(n, (piece + 1) * kPiece); ++i)
                if (x[i] >= least) values[count++] = x[i];
    return kth_largest(values, count, k);
}

// A candidate as a number that sorts by logit, the largest first, then by token.
INLINE uint64_t candidate(float x, int64_t token) {
    const uint32_t u = bits_of(x + 0.0f);  // -0 is 0
    return uint64_t(u & 0x80000000 ? u : ~u & 0x7fffffff) << 32 | uint64_t(token);
}
INLINE float logit_of(uint64_t candidate) {
    const uint32_t u = uint32_t(candidate >> 32);
    return float_of(u & 0x80000000 ? u : ~u & 0x7fffffff);
}
INLINE int64_t token_of(uint64_t candidate) { return int64_t(candidate & 0xffffffff); }

// Logits of at least `cut`, sorted. found and other [n] hold them; the one that is returned has the result.
uint64_t* candidates_above(const float* x, int64_t n, const float* maxima, float cut, uint64_t* found, uint64_t* other,
                           int64_t& count) {
    count = 0;
    for (int64_t piece = 0; piece < pieces_of(n); ++piece)
        if (maxima[piece] >= cut)
            for (int64_t i = piece * kPiece; i < lesser(n, (piece + 1) * kPiece); ++i)
                if (x[i] >= cut) found[count++] = candidate(x[i], i);
    if (count <= 48) {
        for (int64_t i = 1; i < count; ++i) {
            const uint64_t value = found[i];
            int64_t at = i;
            for (; at > 0 && found[at - 1] > value; --at) found[at] = found[at - 1];
            found[at] = value;
        }
        return found;
    }
    for (int shift = 32; shift < 64; shift += 8) {  // by digits of the logit; tokens are in order already
        int64_t begin[257] = {};
        for (int64_t i = 0; i < count; ++i) ++begin[(found[i] >> shift & 255) + 1];
        for (int digit = 0; digit < 255; ++digit) begin[digit + 1] += begin[digit];
        for (int64_t i = 0; i < count; ++i) other[begin[found[i] >> shift & 255]++] = found[i];
        uint64_t* const sorted = other;
        other = found;
        found = sorted;
    }
    return found;
}

struct RowScratch {
    float *maxima, *values;
    double* sums;
    uint64_t *found, *other;

    RowScratch(int thread, int64_t n) {
        const int64_t padded = pieces_of(n) * kPiece, bytes = padded * 20 + pieces_of(n) * 12;
        sums = static_cast<double*>(thread_scratch(thread, bytes));
        found = reinterpret_cast<uint64_t*>(sums + pieces_of(n));
        other = found + padded;
        values = reinterpret_cast<float*>(other + padded);
        maxima = values + padded;
    }
};

// What is kept of sorted candidates by top_p, which asks for `wanted` weight; the token among them that the uniform
// number chooses. weights [count, padded to whole vectors] are written. `reached`: whether they have that much.
int64_t draw_from_sorted(const uint64_t* sorted, int64_t count, Weigh weigh, float top_p, double total, double uniform,
                         float* weights, bool& reached) {
    for (int64_t i = 0; i < count; ++i) weights[i] = logit_of(sorted[i]);
    for_vectors(count, [&](int64_t i, auto part) { part.store(weights + i, weigh(part.load(weights + i))); });
    double sum = 0;
    if (total == 0)
        for (int64_t i = 0; i < count; ++i) total += weights[i];
    const double wanted = double(top_p) * total;
    int64_t last = 0;
    while ((sum += weights[last]) < wanted && last + 1 < count) ++last;
    reached = sum >= wanted;
    if (top_p >= 1) last = count - 1;
    while (last + 1 < count && logit_of(sorted[last + 1]) >= logit_of(sorted[last])) ++last;
    double kept = 0;
    for (int64_t i = 0; i <= last; ++i) kept += weights[i];
    const double target = below(uniform * kept, kept);
    double before = 0;
    int64_t i = 0;
    while ((before += weights[i]) <= target) ++i;
    return token_of(sorted[i]);
}

int64_t draw_truncated(const float* x, int64_t n, Weigh weigh, float temperature, int64_t top_k, float top_p,
                       float min_p, double uniform, RowScratch s) {
    constexpr float kLeast = -__FLT_MAX__;  // -inf is never drawn
    float cut = kLeast;
    if (min_p > 0) cut = greater(cut, weigh.most + temperature * __builtin_logf(min_p));
    if (top_k > 0) cut = greater(cut, kth_of_row(x, n, s.maxima, lesser(top_k, n), s.values));
    int64_t count;
    bool reached;
    if (top_k > 0 || min_p > 0) {
        const uint64_t* sorted = candidates_above(x, n, s.maxima, cut, s.found, s.other, count);
        return draw_from_sorted(sorted, count, weigh, top_p, 0.0, uniform, s.values, reached);
    }
    // Only top_p: tokens below (1 - top_p) / n cannot matter, and mostly those below (1 - top_p) / 100 do not.
    const double total = weigh_pieces(x, n, weigh, s.sums);
    int64_t token = 0;
    const double shares[] = {100.0, 3000.0, double(n)};
    for (const double share : shares) {
        const float weight = float((1.0 - double(top_p)) * total / share);
        cut = greater(kLeast, lesser(weigh.most, weigh.most + temperature * __builtin_logf(weight)));
        const uint64_t* sorted = candidates_above(x, n, s.maxima, cut, s.found, s.other, count);
        token = draw_from_sorted(sorted, count, weigh, top_p, total, uniform, s.values, reached);
        if (reached) break;
    }
    return token;
}

void choose_tokens(const ChooseArgs& a) {
    auto choose = [&](int64_t item, int thread) {
        const float* x = a.logits + a.places[item] * a.n;
        const RowScratch scratch(thread, a.n);
        const float most = scan(x, a.n, scratch.maxima), temperature = a.temperature[item];
        const Weigh weigh{most, 1.0f / temperature};
        int64_t& token = a.tokens[item];
        if (most != most) token = kNotFinite;
        else if (most == -kInf) token = kAllForbidden;
        else if (temperature == 0) token = first_of(x, scratch.maxima, most);
        else if (a.top_k[item] > 0 || a.top_p[item] < 1 || a.min_p[item] > 0)
            token = draw_truncated(x, a.n, weigh, temperature, a.top_k[item], a.top_p[item], a.min_p[item],
                                   a.uniforms[item], scratch);
        else token = draw_from_all(x, a.n, weigh, a.uniforms[item], scratch.sums);
    };
    parallel(a.items, choose);
}

void log_probabilities(const LogprobArgs& a) {
    auto row = [&](int64_t item, int thread) {
        const float* x = a.logits + a.places[item] * a.n;
        const RowScratch scratch(thread, a.n);
        const float most = scan(x, a.n, scratch.maxima), own = x[a.tokens[item]];
        if (!(most > -kInf)) {
            a.own[item] = __builtin_nanf("");
            a.ranks[item] = 1;
            for (int64_t i = 0; i < a.k; ++i) {
                a.top_tokens[item * a.k + i] = i;
                a.top_logprobs[item * a.k + i] = __builtin_nanf("");
            }
            return;
        }
        const double sum_of_all = weigh_pieces(x, a.n, {most, 1.0f}, scratch.sums);
        const double log_sum = double(most) + __builtin_log(sum_of_all);
        float padded[kPiece];
        F more = zero();
        for (int64_t piece = 0; piece < pieces_of(a.n); ++piece)
            if (scratch.maxima[piece] > own) {
                const float* values = piece_at(x, a.n, piece, padded);
                for (int i = 0; i < kPiece; i += W)
                    more = more + select_less(broadcast(own), load(values + i), broadcast(1.0f), zero());
            }
        a.ranks[item] = 1 + int64_t(sum(more));
        a.own[item] = float(double(own) - log_sum);
        if (a.k == 0) return;
        const float cut = kth_of_row(x, a.n, scratch.maxima, a.k, scratch.values);
        int64_t count;
        const uint64_t* sorted = candidates_above(x, a.n, scratch.maxima, cut, scratch.found, scratch.other, count);
        for (int64_t i = 0; i < a.k; ++i) {
            a.top_tokens[item * a.k + i] = token_of(sorted[i]);
            a.top_logprobs[item * a.k + i] = float(double(logit_of(sorted[i])) - log_sum);
        }
    };
    parallel(a.items, row);
}

}}  // namespace pagemill
