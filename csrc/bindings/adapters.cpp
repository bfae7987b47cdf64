// What adapters add to layers.
#include "arguments.h"
#include "bindings.h"

#include "../decoder.h"
#include "../kernels.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

using namespace nanobind::literals;

namespace pagemill {
namespace {

// An adapter's addition to a layer of `n` outputs and `k` inputs: (a, b, begin, count, scale) of each part, in arrays
// that belong to Python.
class Addition {
  public:
    LowRank low_rank;

    Addition(int64_t n, int64_t k, const std::vector<std::tuple<Input, Input, int64_t, int64_t, float>>& parts) {
        low_rank.n = n;
        low_rank.k = k;
        if (parts.empty()) throw std::invalid_argument("an addition has one part at least");
        low_rank.type = dtype_of(std::get<0>(parts.front()).dtype());
        for (const auto& [a, b, begin, count, scale] : parts) {
            const ElementType type = kElementTypes[int(low_rank.type)];
            LowRankPart part{
                .a = elements("a", a, type, {kAny, k, kRankBlock}),
                .b = elements("b", b, type, {(count + kOutputPanel - 1) / kOutputPanel, kAny, kOutputPanel}),
                .begin = begin,
                .count = count,
                .scale = scale};
            part.rank = int64_t(b.shape(1));
            if (int64_t(a.shape(0)) != (part.rank + kRankBlock - 1) / kRankBlock)
                throw std::invalid_argument("a and b have different ranks");
            if (begin < 0 || count < 1 || begin + count > n)
                throw std::invalid_argument("a part's outputs are not among the layer's");
            parts_.push_back(part);
        }
        low_rank.parts = parts_.data();
        low_rank.num_parts = int(parts_.size());
    }
    Addition(const Addition&) = delete;

  private:
    std::vector<LowRankPart> parts_;
};

// x [tokens, k] and y [tokens, n], at these strides; (addition, tokens) of each run.
void add_low_rank(const std::vector<std::tuple<const Addition*, Input>>& runs, int64_t tokens, Address x, int64_t x_row,
                  Address y, int64_t y_row, int type) {
    std::vector<LowRankRun> all;
    for (const auto& [addition, some] : runs) {
        const auto count = int64_t(some.size());
        const auto* each = elements<int64_t>("tokens", some, {count});
        for (int64_t i = 0; i < count; ++i)
            if (each[i] < 0 || each[i] >= tokens) throw std::out_of_range("a token is not among the rows");
        all.push_back({&addition->low_rank, each, count});
    }
    Run run;
    kernels().add_low_rank({.x = at<void>(x),
                            .x_row = x_row,
                            .y = at<void>(y),
                            .y_row = y_row,
                            .type = dtype(type),
                            .runs = all.data(),
                            .num_runs = int(all.size())});
}

void set_addition(Adapter& adapter, const Decoder& decoder, size_t layer, int place, const Addition& addition) {
    if (layer >= decoder.num_layers() || place < 0 || place >= Adapter::kPlaces)
        throw std::invalid_argument("the decoder has no such layer or place");
    const auto& weight = decoder.weight(layer, static_cast<Adapter::Place>(place));
    if (weight.n != addition.low_rank.n || weight.k != addition.low_rank.k)
        throw std::invalid_argument("the addition is for a weight of another shape");
    adapter.additions.resize(decoder.num_layers() * Adapter::kPlaces);
    adapter.additions[layer * Adapter::kPlaces + place] = &addition.low_rank;
}

}  // namespace

void bind_adapters(nb::module_& m) {
    nb::class_<Addition>(m, "LowRank")
        .def(nb::init<int64_t, int64_t, const std::vector<std::tuple<Input, Input, int64_t, int64_t, float>>&>(),
             "out_features"_a, "in_features"_a, "parts"_a);
    m.def("add_low_rank", &add_low_rank);
    nb::class_<Adapter>(m, "Adapter").def(nb::init<>()).def("set", &set_addition);
}

}  // namespace pagemill
