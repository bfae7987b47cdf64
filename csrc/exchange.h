// What ranks of a model in parts exchange, through memory that their processes share: each puts its part of a step's
// activations there, and takes all parts when all have come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace pagemill {

class Exchange {
  public:
    using Idle = std::function<void(double)>;

    // All ranks give the same `bytes` of shared memory, zeros at first and page-aligned. It is the caller's, and longer
    // than kHead. Throws std::invalid_argument.
    Exchange(void* memory, int64_t bytes, int rank, int size);
    Exchange(const Exchange&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Joins parts by rows: out [rows, sum of widths] gets from each rank r its part [rows, widths[r]], contiguous, in
    // bytes. Every rank calls it in the same order with the same rows and widths. `idle` is told now and then how many
    // seconds this rank has waited for others; it may throw, and then the ranks no longer belong together.
    void gather(const void* part, void* out, const std::vector<int64_t>& widths, int64_t rows, const Idle& idle);

    static constexpr int64_t kHead = 4096;

  private:
    struct Head;

    void meet(const Idle& idle);

    Head* head_;
    char* places_[2];
    int64_t place_bytes_;
    int rank_, size_;
    uint32_t met_ = 0;  // how often, modulo 2^32
};

}  // namespace pagemill
