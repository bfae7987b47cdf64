// Where keys and values in integers lie, in pieces of 16 tokens, and how what is read next is fetched ahead.
#pragma once

#include "attention_plan.h"
#include "attention_tiles.h"
#include "simd.h"

#if defined(__AVX512VNNI__)
namespace pagemill { namespace {

// The keys and values of 16 tokens, and their scales.
struct BytePiece {
    const char *key, *value;
    const uint32_t *key_scale, *value_scale;
};

constexpr int kBytePieces = kPartition / 16;

// The pieces of one head from `token` on. `count` of them differ, and the others are the last of these.
struct BytePieces {
    BytePiece at[kBytePieces];
    int row = -1, head = 0, count = 0;
    int64_t token = 0;

    bool are(int of_row, int of_head, int64_t from) const { return row == of_row && head == of_head && token == from; }

    // `most` pieces, up to token `last`.
    void locate(const AttentionArgs& args, int of_row, int of_head, int64_t from, int64_t last, int most,
                bool remainders = false) {
        const CacheView &key = args.cache.key, &value = args.cache.value;
        const int size = args.cache.block_size;
        row = of_row;
        head = of_head;
        token = from;
        count = from < last ? int(lesser<int64_t>(most, (last - from) / 16 + 1)) : 1;
        int64_t block = from / size, offset = from - block * size, frame = frame_of(args, row, block, remainders);
        for (int i = 0; i < most; ++i) {
            at[i] = {(const char*)key.data + frame * key.frame + head * key.head + offset * key.token,
                     (const char*)value.data + frame * value.frame + head * value.head + offset / 4 * value.token,
                     (const uint32_t*)key.scales + frame * key.scale_frame + head * key.scale_head + offset,
                     (const uint32_t*)value.scales + frame * value.scale_frame + head * value.scale_head + offset};
            if (from + 16 > last) continue;
            from += 16;
            if ((offset += 16) < size) continue;
            offset = 0;
            frame = frame_of(args, row, ++block, remainders);
        }
    }

    // The same tokens' of another head.
    void locate_beside(const AttentionArgs& args, const BytePieces& others, int of_head) {
        const CacheView &key = args.cache.key, &value = args.cache.value;
        const int heads = of_head - others.head;
        row = others.row;
        head = of_head;
        token = others.token;
        count = others.count;
        for (int i = 0; i < kBytePieces; ++i) {
            const BytePiece& other = others.at[lesser(i, count - 1)];
            at[i] = {other.key + heads * key.head, other.value + heads * value.head,
                     other.key_scale + heads * key.scale_head, other.value_scale + heads * value.scale_head};
        }
    }
};

// What is fetched ahead, in fours of lines of 64 bytes, spread over what is computed meanwhile. The second-level cache
// has room for all that is read next: piece by piece, keys and values together, as they lie. For the first-level cache
// it is a partition's keys, its values, and the first keys that are read next.
class ByteFetches {
  public:
    // Of all fours in 16ths, what is fetched while scores and while weights are computed.
    static constexpr int kWithScores = 6, kWithWeights = 6;

    ByteFetches() = default;
    // The partition's pieces, and those that are read next; a piece has so many fours.
    ByteFetches(const BytePieces& own, const BytePieces& next, int key_fours, int value_fours, int64_t key_stride)
        : key_fours_(key_fours), value_fours_(value_fours), key_stride_(key_stride) {
        if (fetches_to_second_level) {
            add({next.at, next.count, true, true});
        } else {
            const int before = lesser(greater(kAhead / key_fours, 1), kBytePieces), fetched = lesser(before, own.count);
            add({own.at + fetched, own.count - fetched, true, false});
            add({own.at, own.count, false, true});
            add({next.at, lesser(before, next.count), true, false});
        }
        advance();
    }

    // So many turns follow, which fetch a share of all fours, or what is left of them. Branches foretell turns of whole
    // quarters.
    void begin(int sixteenths, int turns) {
        const int fours = sixteenths ? total_ * sixteenths / 16 : left_;
        rate_ = (4 * fours + turns - 1) / greater(turns, 1);
    }
    INLINE void turn() {
        for (due_ += rate_; due_ >= 4 && left_; due_ -= 4) {
#pragma GCC unroll 4
            for (int line = 0; line < 4; ++line) fetch_line(at_ + line * stride_);
            at_ += 4 * stride_;
            --left_;
            if (--of_piece_ == 0 && left_) advance();
        }
    }
    void end() { rate_ = due_ = 0; }

  private:
    static constexpr int kAhead = 48;  // fours of keys that are fetched before a partition begins
    // Pieces whose keys are fetched, or values, or both.
    struct Run {
        const BytePiece* at;
        int count;
        bool keys, values;
    };

    void add(const Run& run) {
        if (run.count == 0) return;
        runs_[count_++] = run;
        left_ = total_ += run.count * (run.keys * key_fours_ + run.values * value_fours_);
    }

    void advance() {
        if (in_keys_ && runs_[run_].values) {
            in_keys_ = false;
        } else {
            if (++piece_ == runs_[run_].count) {
                ++run_;
                piece_ = 0;
            }
            in_keys_ = runs_[run_].keys;
        }
        const BytePiece& piece = runs_[run_].at[piece_];
        at_ = in_keys_ ? piece.key : piece.value;
        stride_ = in_keys_ ? key_stride_ : 64;
        of_piece_ = in_keys_ ? key_fours_ : value_fours_;
    }

    int key_fours_ = 0, value_fours_ = 0;
    int64_t key_stride_ = 0;
    Run runs_[3];
    int count_ = 0, run_ = 0, piece_ = -1;
    bool in_keys_ = false;
    const char* at_ = nullptr;
    int64_t stride_ = 0;
    int of_piece_ = 0;  // fours that are left of it
    int total_ = 0, left_ = 0;
    int due_ = 0, rate_ = 0;  // quarters of fours
};

}}  // namespace pagemill
#endif
