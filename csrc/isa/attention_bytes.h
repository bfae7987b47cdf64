// The pass over a partition of keys and values in integers of 8 and 4 bits, by instructions that multiply bytes (VNNI):
// each adds the products of 4 neighbouring dimensions of 16 keys, or of 4 neighbouring tokens of 16 dimensions.
//
// A query, and a partition's weights, become integers of L bytes, a share of their largest magnitude: 2 bytes for
// queries in 16 bits, 3 for fp32. Each of their bytes is multiplied by itself. Sums of products are exact, so their
// order changes no bit; what is left to round is done once per score and output.
#pragma once

#include "attention_plan.h"
#include "attention_tiles.h"
#include "linear_tiles.h"
#include "narrow_kv.h"
#include "simd.h"

#if defined(__AVX512VNNI__)
namespace pagemill { namespace {

INLINE bool lies_for_bytes(const LayerCache& cache) {
    return cache.key.beside == 4 && cache.value.beside == 4 && cache.block_size % 16 == 0 && cache.head_dim % 16 == 0;
}

INLINE __m512i add_products(__m512i sum, __m512i bytes, int32_t four) {
    return _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi32(four));
}

// 64 bytes of keys or values as one or two vectors of bytes without sign; int8 is kRaisedBy higher.
constexpr int kRaisedBy = 128;
INLINE void load_bytes(const int8_t* p, __m512i (&x)[1]) {
    x[0] = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(int8_t(0x80)));
}
INLINE void load_bytes(const u4* p, __m512i (&x)[2]) {
    const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(0x0f);
    x[0] = _mm512_and_si512(both, mask);
    x[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
template <class T> constexpr int kVectorsInLine = 1;
template <> constexpr int kVectorsInLine<u4> = 2;
template <class T> constexpr int kDimsInLine = 16 * kVectorsInLine<T>;  // of values; of keys a quarter
// Groups of dimensions that have scales and lows of their own.
template <class T> int groups_of(int) { return 1; }
template <> inline int groups_of<u4>(int head_dim) { return head_dim / kKeyGroup; }

// Numbers as integers of L bytes: number = unit * sum of 256^l byte l. NaN and infinities become a unit that is NaN.
template <int L> struct Bytes {
    static constexpr float kMost = L == 2 ? 127 * 256 : 127 * 65536;

    // put(i, l, 16 bytes in the vector's elements) for the numbers from 16 i on.
    template <class Put> INLINE static float split(const float* x, int count, Put&& put) {
        F top = zero(), all = zero();
        for (int i = 0; i < count; i += 16) {
            const F each = load(x + i);
            top = max(abs(each), top);
            all = fma(each, zero(), all);
        }
        const float most = maximum(top), spoilt = sum(all);
        const F factor = broadcast(most > 0.0f ? kMost / most : 0.0f);
        for (int i = 0; i < count; i += 16) {
            __m512i whole = _mm512_cvtps_epi32((load(x + i) * factor).v);
            for (int l = 0; l < L; ++l) {
                const __m512i byte = _mm512_srai_epi32(_mm512_slli_epi32(whole, 24), 24);
                put(i / 16, l, byte);
                whole = _mm512_srai_epi32(_mm512_sub_epi32(whole, byte), 8);
            }
        }
        return most / kMost + spoilt;
    }
    INLINE static F join(const __m512i* sums) {
        F x{_mm512_cvtepi32_ps(sums[L - 1])};
        for (int l = L - 2; l >= 0; --l) x = fma(x, broadcast(256.0f), {_mm512_cvtepi32_ps(sums[l])});
        return x;
    }
};

template <class K, class V, int L> struct BytePass {
    static constexpr int kRows = kTaskRows, kHeight = L == 2 ? 6 : 4, kPieces = kPartition / 16, kAhead = 8;
    static constexpr int kMostGroups = kMostNarrowDims / kKeyGroup;
    // Vectors side by side.
    static constexpr int beside(int height) { return height * 4 * L <= 24 ? 4 : 2; }
    static int most_rows(const AttentionArgs&) { return kRows; }

    const AttentionArgs& args;
    const AttentionTask &task, *next;
    const int group, padded, dims, groups;
    const Tiles tiles;
    // Scores, weighted values and scales, of keys and values and of their remainders.
    struct Buffers { float *scores, *part, *scales; };
    float* queries = nullptr;
    Buffers own, precise;
    int32_t* weights;

    BytePass(const AttentionArgs& args, const AttentionTask& task, const AttentionTask* next, int padded)
        : args(args), task(task), next(next), group(args.heads / args.cache.kv_heads), padded(padded),
          dims(args.cache.head_dim), groups(groups_of<K>(dims)), tiles(task.tokens * group, kHeight) {}

    // A query: its bytes in fours, by dimensions and then by byte; what each byte's sum begins with (int8), or the
    // groups' sums (4 bits); and its unit.
    int64_t query_size() const { return dims / 4 * L + greater(L, groups) + 1; }
    int64_t scratch_size() const {
        const int64_t queries = task.heads * tiles.rows * query_size();
        return queries + kHeight * L * (kPartition / 4 + 1) + (has_remainders() ? 2 : 1) * buffers_size();
    }
    int64_t buffers_size() const { return kHeight * (kScoreRow + padded) + (2 * groups + 2) * kScoreRow; }
    bool has_remainders() const { return kVectorsInLine<K> == 2 && args.remainders.tables; }

    void begin(float* memory) {
        queries = memory;
        weights = (int32_t*)(queries + task.heads * tiles.rows * query_size());
        const auto buffers = [&](float* at) {
            return Buffers{at, at + kHeight * kScoreRow, at + kHeight * (kScoreRow + padded)};
        };
        own = buffers((float*)(weights + kHeight * L * (kPartition / 4 + 1)));
        if (has_remainders()) precise = buffers(own.scores + buffers_size());
        for (int h = 0; h < task.heads; ++h)
            for (int64_t tile = 0; tile < tiles.count; ++tile)
                for (int r = 0; r < tiles.height(tile); ++r) pack_query(h, tile, r);
    }

    float* tile_at(int h, int64_t tile) const { return queries + (h * tiles.rows + tiles.begin(tile)) * query_size(); }

    void pack_query(int h, int64_t tile, int r) const {
        const int height = tiles.height(tile);
        auto* fours = (int32_t*)tile_at(h, tile);
        float wide[kMostNarrowDims];
        with_type(args.type, [&]<class Q>(Q*) {
            const Q* q = query_at<Q>(args, task, group, task.head + h, tiles.begin(tile) + r);
            if constexpr (kVectorsInLine<K> == 2) widen_query(q, args, wide);
            else
                for (int d = 0; d < dims; ++d) wide[d] = widen_one(q + d) * args.scale;
        });
        int32_t sums[L] = {}, by_group[kMostGroups][L] = {};
        const float unit = Bytes<L>::split(wide, dims, [&](int i, int l, __m512i bytes) {
            int8_t lanes[16];
            _mm_storeu_si128((__m128i*)lanes, _mm512_cvtepi32_epi8(bytes));
            const int32_t total = _mm512_reduce_add_epi32(bytes);
            sums[l] += total;
            by_group[i / 2][l] += total;
            for (int f = 0; f < 4; ++f) {
                // Lines of 4-bit keys have 4 dimensions and the 4 that are 16 further.
                const int step = kVectorsInLine<K> == 2 ? i / 2 * 8 + f * 2 + i % 2 : i * 4 + f;
                std::memcpy(fours + (step * L + l) * height + r, lanes + f * 4, 4);
            }
        });
        int32_t* begin = fours + dims / 4 * L * height;
        for (int l = 0; l < L; ++l) begin[l * height + r] = -kRaisedBy * sums[l];
        float* after = (float*)begin;
        for (int g = 0; kVectorsInLine<K> == 2 && g < groups; ++g) {
            float total = float(by_group[g][L - 1]);
            for (int l = L - 2; l >= 0; --l) total = total * 256.0f + float(by_group[g][l]);
            after[g * height + r] = total;
        }
        after[greater(L, groups) * height + r] = unit;
    }

    // Where the keys and values of 16 tokens lie, and their scales.
    struct Place {
        const char *key, *value;
        const float *key_scale, *value_scale;
    };
    // A partition's pieces of 16 tokens, and those that are read next; `lines`: of keys, then of values, then of the
    // keys that are read next, to fetch ahead.
    struct Located {
        Place own[kPieces], next[kPieces];
        const char* lines[2 * kPieces + kAhead];
        int first, count;
    };

    // `count` pieces from `token` on; those behind `last` are the last one's.
    void locate(int row, int head, int64_t token, int64_t last, int count, Place* to, bool remainders = false) const {
        const CacheView &key = args.cache.key, &value = args.cache.value;
        const int size = args.cache.block_size;
        int64_t block = token / size, offset = token - block * size, frame = frame_of(args, row, block, remainders);
        for (int i = 0; i < count; ++i) {
            to[i] = {(const char*)key.data + frame * key.frame + head * key.head + offset * key.token,
                     (const char*)value.data + frame * value.frame + head * value.head + offset / 4 * value.token,
                     (const float*)key.scales + frame * key.scale_frame + head * key.scale_head + offset,
                     (const float*)value.scales + frame * value.scale_frame + head * value.scale_head + offset};
            if (token + 16 > last) continue;
            token += 16;
            if ((offset += 16) < size) continue;
            offset = 0;
            frame = frame_of(args, row, ++block, remainders);
        }
    }

    void locate(int row, int head, int h, int64_t base, KeyRange all, Located& at) const {
        at.first = int(all.begin) / 16;
        at.count = (int(all.end) + 15) / 16 - at.first;
        locate(row, head, base + at.first * 16, base + all.end - 1, at.count, at.own);
        const NextKeys then(args, task, next, base, int(all.begin), h);
        locate(then.row, then.head, then[0], then.last, kPieces, at.next);
        for (int i = 0; i < at.count; ++i) {
            at.lines[i] = at.own[i].key;
            at.lines[at.count + i] = at.own[i].value;
        }
        for (int i = 0; i < kAhead; ++i) at.lines[2 * at.count + i] = at.next[i].key;
    }
    // Remainders, with which nothing is fetched ahead.
    void locate_remainders(int row, int head, int64_t base, KeyRange all, Located& at) const {
        at.first = int(all.begin) / 16;
        at.count = (int(all.end) + 15) / 16 - at.first;
        locate(row, head, base + at.first * 16, base + all.end - 1, at.count, at.own, true);
        for (const char*& line : at.lines) line = at.own[0].key;
    }
    // Lines of 64 bytes in a piece.
    int key_lines() const { return dims / 4 / kVectorsInLine<K>; }
    int value_lines() const { return dims / 4 / kVectorsInLine<V>; }

    // Scales of keys [groups], their lows if they have them, scales of values and their lows: kScoreRow each by token,
    // zero outside the range.
    void load_scales(KeyRange all, const Located& at, float* scales) const {
        for (int i = 0; i < at.count; ++i) {
            const int token = (at.first + i) * 16;
            const __mmask16 in = __mmask16(first_tokens(int(all.end) - token) & ~first_tokens(int(all.begin) - token));
            const auto put = [&](const float* from, float* to, float* lows) {
                const __m512i words = _mm512_maskz_loadu_epi32(in, from);
                if (!lows) return _mm512_storeu_si512(to + token, words);
                store(to + token, scale_in((Integers)words));
                store(lows + token, low_in((Integers)words));
            };
            for (int g = 0; g < groups; ++g)
                put(at.own[i].key_scale + g * args.cache.block_size, scales + g * kScoreRow,
                    kVectorsInLine<K> == 2 ? scales + (groups + g) * kScoreRow : nullptr);
            float* of_values = value_scales(scales);
            put(at.own[i].value_scale, of_values, kVectorsInLine<V> == 2 ? of_values + kScoreRow : nullptr);
        }
        // Softmax takes vectors in pairs, and scores are computed for some vectors beyond the range.
        const auto clear = [&](int v) {
            for (int g = 0; g < 2 * groups + 2; ++g) store(scales + g * kScoreRow + v * 16, zero());
        };
        if (at.first > 0) clear(at.first - 1);
        for (int v = at.first + at.count; v < at.first + at.count + 4; ++v) clear(v);
    }
    float* value_scales(float* scales) const { return scales + 2 * groups * kScoreRow; }
    static unsigned first_tokens(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

    // scores [MR][kScoreRow] of NV pieces from piece `piece` on.
    template <int MR> void score(const float* tile, const Located& at, int piece, bool fetch, const Buffers& to) const {
        constexpr int NV = beside(MR), P = kVectorsInLine<K>;
        const auto* fours = (const int32_t*)tile;
        const int32_t* begin = fours + dims / 4 * L * MR;
        const float *group_sums = (const float*)begin, *units = group_sums + greater(L, groups) * MR;
        const char *keys[NV], *ahead[NV];
        int64_t ahead_stride[NV];
        int ahead_lines[NV];
        for (int v = 0; v < NV; ++v) {
            const int own = lesser(piece + v, at.count - 1), then = own + kAhead;
            const bool of_keys = then < at.count || then >= 2 * at.count;
            keys[v] = at.own[own].key;
            ahead[v] = at.lines[then];
            ahead_stride[v] = of_keys ? args.cache.key.dim : 64;
            ahead_lines[v] = !fetch || piece + v >= at.count ? 0 : of_keys ? key_lines() : value_lines();
            if (ahead_lines[v] == 0) continue;
            fetch_line(at.next[own].key_scale);
            if (P == 2) fetch_line(at.next[own].key_scale + args.cache.block_size);
            fetch_line(at.next[own].value_scale);
        }
        const int lines = key_lines(), in_group = lines / groups;
        __m512i sums[MR][NV][L];
        for (int line = 0; line < lines; line += in_group) {
            for (int r = 0; r < MR; ++r)
                for (int v = 0; v < NV; ++v)
                    for (int l = 0; l < L; ++l)
                        sums[r][v][l] = P == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(begin[l * MR + r]);
            for (int i = line; i < line + in_group; ++i) {
                __m512i x[NV][P];
                for (int v = 0; v < NV; ++v) load_bytes((const K*)(keys[v] + i * args.cache.key.dim), x[v]);
                for (int v = 0; v < NV && fetch; ++v)
                    if (i < ahead_lines[v]) fetch_line(ahead[v] + i * ahead_stride[v]);
                for (int p = 0; p < P; ++p, fours += L * MR)
                    for (int l = 0; l < L; ++l)
                        for (int r = 0; r < MR; ++r)
                            for (int v = 0; v < NV; ++v)
                                sums[r][v][l] = add_products(sums[r][v][l], x[v][p], fours[l * MR + r]);
            }
            const int g = line / in_group;
            for (int v = 0; v < NV; ++v) {
                const int token = (at.first + piece + v) * 16;
                const F scale = load(to.scales + g * kScoreRow + token);
                for (int r = 0; r < MR; ++r) {
                    float* score = to.scores + r * kScoreRow + token;
                    F x = Bytes<L>::join(sums[r][v]) * scale;
                    if (P == 2)
                        x = fma(broadcast(group_sums[g * MR + r]), load(to.scales + (groups + g) * kScoreRow + token),
                                x);
                    x = x * broadcast(units[r]);
                    store(score, g ? load(score) + x : x);
                }
            }
        }
    }

    // part [MR][padded] from dimension `dim` on: lines of ND vectors.
    template <int MR, int ND> void value(const Located& at, int dim, int from, int until, const float* units,
                                         const float* lows, bool fetch, float* part) const {
        constexpr int P = kVectorsInLine<V>, lines = ND / P;
        const int line = dim / kDimsInLine<V>, token_lines = dims / kDimsInLine<V>;
        __m512i sums[MR][ND][L];
        for (int r = 0; r < MR; ++r)
            for (int l = 0; l < L; ++l)
                for (int d = 0; d < ND; ++d)
                    sums[r][d][l] = P == 2 ? _mm512_setzero_si512() : _mm512_set1_epi32(begins(r)[l]);
        for (int token = from / 16 * 16; token < until; token += 16) {
            const int piece = token / 16 - at.first,
                      then = lesser(at.count + piece + kAhead, 2 * at.count + kAhead - 1);
            const bool of_keys = then >= 2 * at.count;
            const char *lines_at = at.own[piece].value + line * 64, *ahead = at.lines[then];
            const int64_t ahead_stride = of_keys ? args.cache.key.dim : 64;
            const int32_t* fours = weights + token / 4;
            for (int quad = 0; quad < 4; ++quad, lines_at += args.cache.value.token, ++fours) {
                __m512i x[lines][P];
                for (int i = 0; i < lines; ++i) load_bytes((const V*)(lines_at + i * 64), x[i]);
                for (int i = 0; i < lines && fetch; ++i) {
                    const int own = quad * token_lines + line + i;
                    fetch_line(ahead + own * ahead_stride);
                    if (P > kVectorsInLine<K> && of_keys) fetch_line(ahead + (own + 4 * token_lines) * ahead_stride);
                }
                for (int l = 0; l < L; ++l)
                    for (int r = 0; r < MR; ++r)
                        for (int d = 0; d < ND; ++d)
                            sums[r][d][l] =
                                add_products(sums[r][d][l], x[d / P][d % P], fours[(r * L + l) * (kPartition / 4)]);
            }
        }
        for (int r = 0; r < MR; ++r)
            for (int d = 0; d < ND; ++d)
                store(part + r * padded + dim + d * 16,
                      fma(Bytes<L>::join(sums[r][d]), broadcast(units[r]), broadcast(lows[r])));
    }

    int32_t* begins(int r) const { return weights + kHeight * L * kPartition / 4 + r * L; }

    // Weights [from, until) of row r, multiplied by the values' scales, as bytes; returns their unit.
    float split_weights(const float* scores, int r, int from, int until) const {
        __m512i sums[L];
        for (__m512i& sum : sums) sum = _mm512_setzero_si512();
        const int first = from / 16 * 16;
        auto* to = (int8_t*)(weights + r * L * (kPartition / 4)) + first;
        const auto put = [&](int i, int l, __m512i bytes) __attribute__((always_inline)) {
            _mm_storeu_si128((__m128i*)(to + l * kPartition + i * 16), _mm512_cvtepi32_epi8(bytes));
            sums[l] = _mm512_add_epi32(sums[l], bytes);
        };
        const float unit = Bytes<L>::split(scores + first, until - first, put);
        for (int l = 0; l < L; ++l) begins(r)[l] = -kRaisedBy * _mm512_reduce_add_epi32(sums[l]);
        return unit;
    }

    // As of VectorPass.
    template <class Emit> void partition(int64_t base, int h, const KeyRange* ranges, KeyRange all, Emit&& emit) const {
        Located at;
        const int row = args.order[task.first].row;
        locate(row, task.head + h, h, base, all, at);
        load_scales(all, at, own.scales);
        KeyRange precise_ranges[kTaskTokens], precise_all{0, 0};
        Located remainders;
        if constexpr (kVectorsInLine<K> == 2) precise_all = precise_keys(args, task, base, precise_ranges);
        if (precise_all.begin < precise_all.end) {
            locate_remainders(row, task.head + h, base, precise_all, remainders);
            load_scales(precise_all, remainders, precise.scales);
        }
        for (int64_t tile = 0; tile < tiles.count; ++tile)
            with_count<kHeight>(tiles.height(tile), [&]<int MR>() {
                const int first_row = int(tiles.begin(tile)), token = first_row / group,
                          tokens = (first_row + MR - 1) / group - token + 1;
                const KeyRange span = span_of(ranges + token, tokens);
                KeyRange added{0, 0};
                if (precise_all.begin < precise_all.end) added = span_of(precise_ranges + token, tokens);
                const bool adds = added.begin < added.end;
                const int from = int(span.begin), until = int(span.end);
                Softmax result[MR];
                float units[MR], lows[MR];
                for (int v = from / 16; v * 16 < until; v += beside(MR))
                    score<MR>(tile_at(h, tile), at, v - at.first, tile == 0, own);
                if (adds) {
                    for (int v = int(added.begin) / 16; v * 16 < added.end; v += beside(MR))
                        score<MR>(tile_at(h, tile), remainders, v - remainders.first, false, precise);
                    for (int r = 0; r < MR; ++r)
                        add_scores(own.scores + r * kScoreRow, precise.scores + r * kScoreRow,
                                   precise_ranges[(first_row + r) / group]);
                }
                float* of_values = value_scales(own.scales);
                const TokenScales by_token{nullptr, of_values,
                                           kVectorsInLine<V> == 2 ? of_values + kScoreRow : nullptr};
                for (int r = 0; r < MR; ++r) {
                    const KeyRange& seen = ranges[(first_row + r) / group];
                    result[r] =
                        softmax(own.scores + r * kScoreRow, int(seen.begin), int(seen.end), from, until, args.soft_cap,
                                by_token, lows + r, adds ? precise.scores + r * kScoreRow : nullptr);
                    units[r] = from < until ? split_weights(own.scores + r * kScoreRow, r, from, until) : 0.0f;
                }
                if (from < until) value_rows<MR>(at, from, until, units, lows, tile == 0, own.part);
                if (adds) add_remainders<MR>(remainders, precise_ranges, first_row, added);
                emit(first_row, MR, result, own.part);
            });
    }

    // Adds what the remainders of values [span) bring to the weighted values of a tile.
    template <int MR>
    void add_remainders(const Located& at, const KeyRange* ranges, int first_row, const KeyRange& span) const {
        const int from = int(span.begin), until = int(span.end), first = from / 16, last = (until + 15) / 16;
        const float* of_values = value_scales(precise.scales);
        float units[MR], lows[MR];
        for (int r = 0; r < MR; ++r) {
            const KeyRange& own_keys = ranges[(first_row + r) / group];
            float* row = precise.scores + r * kScoreRow;
            F low = zero();
            for (int v = first; v < last; ++v) {
                const __mmask16 in =
                    __mmask16(first_tokens(int(own_keys.end) - v * 16) & ~first_tokens(int(own_keys.begin) - v * 16));
                const F weight{_mm512_maskz_loadu_ps(in, row + v * 16)};
                low = fma(weight, load(of_values + kScoreRow + v * 16), low);
                store(row + v * 16, F{_mm512_maskz_mul_ps(in, weight.v, load(of_values + v * 16).v)});
            }
            lows[r] = sum(low);
            units[r] = split_weights(row, r, from, until);
        }
        value_rows<MR>(at, from, until, units, lows, false, precise.part);
        for (int r = 0; r < MR; ++r) {
            const KeyRange& own_keys = ranges[(first_row + r) / group];
            if (own_keys.begin >= own_keys.end) continue;
            float* to = own.part + r * padded;
            for (int d = 0; d < dims; d += W) store(to + d, load(to + d) + load(precise.part + r * padded + d));
        }
    }

    template <int MR> void value_rows(const Located& at, int from, int until, const float* units, const float* lows,
                                      bool fetch, float* part) const {
        constexpr int ND = beside(MR), least = kVectorsInLine<V>;
        int dim = 0;
        for (; dim + 16 * ND <= dims; dim += 16 * ND) value<MR, ND>(at, dim, from, until, units, lows, fetch, part);
        for (; dim < dims; dim += 16 * least) value<MR, least>(at, dim, from, until, units, lows, fetch, part);
    }
};

}}  // namespace pagemill
#endif
