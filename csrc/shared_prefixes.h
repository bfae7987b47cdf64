// Which rows of a step begin with the same frames, so that these are attended once for all of them.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <vector>

namespace pagemill {

// A step's query tokens in the order that attention takes them in. Found once per step and layer group: it depends on
// tables, positions, context lengths, windows and key ranges only.
class SharedPrefixes {
  public:
    // With fp32 caches, rows of at most this many query tokens share: more read their keys once for many queries
    // anyway. Keys and values that are converted on the way are converted once for all rows, however many tokens these
    // have.
    static constexpr int kMaxTokens = 8;

    // share false: every row by itself.
    SharedPrefixes(const AttentionArgs& args, bool share);
    // Gives `args` the order. They must not outlive this.
    void apply(AttentionArgs& args) const;

  private:
    std::vector<QueryToken> order_;
    std::vector<SharedPrefix> prefixes_;
};

// Rows of a step as kernels for other devices attend them together: neighbours, and over whole chunks of keys.
struct NeighbourArgs {
    const int32_t* tables;  // those of layer group g and row r begin at tables + g * group_stride + r * row_stride
    int64_t group_stride, row_stride;
    std::vector<int32_t> groups;  // whose frames must be the same
    const int32_t *rows, *limits, *chunks;  // [count]: row, keys that it may share, keys of a chunk
    int count, block_size;
    int most;  // rows that are attended together
    bool moves;  // whether rows may be given another order
};

// Finds the order in which rows have the most keys in common with the one before: whole chunks, of the same length for
// both. `common` [count] says how many, in that order, and is 0 for at least one of `most + 1` neighbours: rows that
// share less are cut apart there. `order` [count]: numbers of `rows`. Takes time in proportion to the entries of tables
// that are the same, not to their product with the logarithm of how many rows have them.
void order_neighbours(const NeighbourArgs& args, int32_t* order, int32_t* common);

}  // namespace pagemill
