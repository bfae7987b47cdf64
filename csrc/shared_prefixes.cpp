#include "shared_prefixes.h"

#include "kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>
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

namespace {

class Neighbours {
  public:
    Neighbours(const NeighbourArgs& args, int32_t* order, int32_t* common)
        : args_(args), order_(order), common_(common), entries_(args.count), alike_(args.count), next_(args.count) {
        for (int i = 0; i < args.count; ++i)  // up to the last whole chunk
            entries_[i] = (args.limits[i] / args.chunks[i] * args.chunks[i] + args.block_size - 1) / args.block_size;
    }

    void find() {
        std::iota(order_, order_ + args_.count, 0);
        std::fill(common_, common_ + args_.count, 0);
        if (args_.moves) {
            const auto chunk = [&](int32_t row) { return entries_[row] ? args_.chunks[row] : INT32_MAX; };
            std::sort(order_, order_ + args_.count,
                      [&](int32_t a, int32_t b) { return std::pair(chunk(a), a) < std::pair(chunk(b), b); });
            for (int begin = 0, end = 0; begin < args_.count; begin = end) {
                while (end < args_.count && chunk(order_[end]) == chunk(order_[begin])) ++end;
                if (entries_[order_[begin]]) arrange(begin, end, 0);
            }
        } else {
            for (int i = 1; i < args_.count; ++i)
                if (args_.chunks[i] == args_.chunks[i - 1]) common_[i] = alike(i - 1, i, 0);
        }
        for (int i = 1; i < args_.count; ++i) {
            const int32_t row = order_[i], before = order_[i - 1], chunk = args_.chunks[row];
            const int64_t keys = int64_t(common_[i]) * args_.block_size;
            common_[i] = int32_t(std::min<int64_t>({keys, args_.limits[row], args_.limits[before]}) / chunk * chunk);
        }
        cut_apart();
    }

  private:
    // How many first entries of two rows are the same, of which so many are known to be.
    int32_t alike(int32_t a, int32_t b, int32_t known) const {
        int32_t end = std::min(entries_[a], entries_[b]);
        for (const int32_t group : args_.groups) {
            const int32_t* tables = args_.tables + group * args_.group_stride;
            const int32_t *of_a = tables + args_.rows[a] * args_.row_stride,
                          *of_b = tables + args_.rows[b] * args_.row_stride;
            constexpr int32_t kAtOnce = 64;
            int32_t at = known;
            while (at + kAtOnce <= end && !std::memcmp(of_a + at, of_b + at, kAtOnce * sizeof(int32_t))) at += kAtOnce;
            while (at < end && of_a[at] == of_b[at]) ++at;
            end = at;
        }
        return end;
    }

    // Compares a row with another one, of whose entries so many are known to be the same.
    void compare(int32_t row, int32_t with, int32_t known) {
        alike_[row] = alike(row, with, known);
        next_[row] =
            alike_[row] < entries_[row]
                ? args_.tables[args_.groups[0] * args_.group_stride + args_.rows[row] * args_.row_stride + alike_[row]]
                : -1;
    }

    // Orders rows begin .. end - 1, which have so many entries in common: the first, then those that have less and less
    // in common with it. Rows that have as much, and go on alike, may have more in common with each other.
    void arrange(int begin, int end, int32_t known) {
        for (int i = begin + 1; i < end; ++i) compare(order_[i], order_[begin], known);
        std::sort(order_ + begin + 1, order_ + end, [&](int32_t a, int32_t b) {
            return std::tuple(-alike_[a], next_[a], a) < std::tuple(-alike_[b], next_[b], b);
        });
        for (int i = begin + 1; i < end; ++i) common_[i] = alike_[order_[i]];
        for (int first = begin + 1, next = first; first < end; first = next) {
            const int32_t have = alike_[order_[first]], goes_on = next_[order_[first]];
            while (next < end && alike_[order_[next]] == have && next_[order_[next]] == goes_on) ++next;
            if (goes_on >= 0 && next - first > 1) arrange(first, next, have);
        }
    }

    // Lets as little as possible of what is common go where more rows than `most` follow each other.
    void cut_apart() {
        const int count = args_.count;
        std::vector<int64_t> lost(count);  // with a cut before this row, and the best ones before that
        std::vector<int> last(count, -1);
        const auto best_before = [&](int end) {
            int best = end - 1;
            for (int i = end - 1; i >= std::max(0, end - args_.most); --i)
                if (lost[i] < lost[best]) best = i;
            return best;
        };
        for (int i = 1; i < count; ++i) {
            last[i] = best_before(i);
            lost[i] = common_[i] + lost[last[i]];
        }
        for (int i = count ? best_before(count) : -1; i >= 0; i = last[i]) common_[i] = 0;
    }

    const NeighbourArgs& args_;
    int32_t *order_, *common_;
    std::vector<int32_t> entries_;  // by row: those of whole chunks
    std::vector<int32_t> alike_;  // by row: those that it had in common with the one that it was last compared with
    std::vector<int32_t> next_;  // by row: the entry behind these; -1 behind its last one
};

}  // namespace

void order_neighbours(const NeighbourArgs& args, int32_t* order, int32_t* common) {
    Neighbours(args, order, common).find();
}

}  // namespace pagemill
