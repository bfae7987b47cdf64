// Which rows of a step begin with the same frames, so that these are attended once for all of them.
#pragma once

#include "kernels.h"

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

}  // namespace pagemill
