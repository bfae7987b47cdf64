#include "shared_prefixes.h"

#include "kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pagemill {
namespace {

struct Candidate {
    int row;
    int64_t partitions;    // whole ones that all its queries see
    const int32_t* table;
    int64_t blocks;        // that these partitions touch
};

bool by_table(const Candidate& a, const Candidate& b) {
    return std::lexicographical_compare(a.table, a.table + a.blocks, b.table, b.table + b.blocks);
}

int64_t common_partitions(const Candidate& a, const Candidate& b, int block_size) {
    const int64_t limit = std::min(a.blocks, b.blocks);
    const int64_t blocks = std::mismatch(a.table, a.table + limit, b.table).first - a.table;
    return std::min({a.partitions, b.partitions, blocks * block_size / kPartition});
}

}  // namespace

SharedPrefixes::SharedPrefixes(const AttentionArgs& args, bool share) {
    std::vector<Candidate> candidates;
    for (int row = 0; share && args.tables && row < args.rows; ++row) {
        const int begin = args.query_start[row], end = args.query_start[row + 1];
        if (begin == end || (args.cache.key.type == DType::f32 && end - begin > kMaxTokens)) continue;
        KeyRange seen{0, INT64_MAX};  // without remainders
        for (int token = begin; token < end; ++token)
            seen = {std::max(seen.begin, key_range(args, row, token).begin),
                    std::min(seen.end, precise_range(args, row, token).begin)};
        const int64_t partitions = seen.begin == 0 ? seen.end / kPartition : 0;
        if (partitions > 0)
            candidates.push_back({row, partitions, args.tables + row * args.table_stride,
                                  (partitions * kPartition + args.cache.block_size - 1) / args.cache.block_size});
    }
    std::sort(candidates.begin(), candidates.end(), by_table);

    const size_t count = candidates.size();
    std::vector<int64_t> common(count + 1, 0);  // of a candidate and the one before it
    for (size_t i = 1; i < count; ++i)
        common[i] = common_partitions(candidates[i - 1], candidates[i], args.cache.block_size);
    order_.reserve(args.query_start[args.rows]);
    std::vector<bool> taken(args.rows, false);
    for (size_t first = 0; first < count;) {
        // A row goes on with those before it unless they, or it and the next, have more than twice as much in common.
        int64_t partitions = common[first + 1];
        size_t end = first + 1;
        for (; end < count && common[end] > 0; ++end) {
            if (2 * common[end] < std::max(partitions, common[end + 1])) break;
            partitions = std::min(partitions, common[end]);
        }
        if (end - first > 1) {
            const int begin = int(order_.size());
            for (size_t i = first; i < end; ++i) {
                const int row = candidates[i].row;
                taken[row] = true;
                for (int token = args.query_start[row]; token < args.query_start[row + 1]; ++token)
                    order_.push_back({token, row, int32_t(partitions)});
            }
            prefixes_.push_back({begin, int(order_.size()) - begin, int32_t(partitions)});
        }
        first = end;
    }
    for (int row = 0; row < args.rows; ++row)
        for (int token = args.query_start[row]; !taken[row] && token < args.query_start[row + 1]; ++token)
            order_.push_back({token, row, 0});
}

void SharedPrefixes::apply(AttentionArgs& args) const {
    args.order = order_.data();
    args.prefixes = prefixes_.data();
    args.num_prefixes = int(prefixes_.size());
}

}  // namespace pagemill
