// A decoder's steps, and what ranks exchange in them.
#include "arguments.h"
#include "bindings.h"
#include "linear.h"

#include "../decoder.h"
#include "../exchange.h"
#include "../kernels.h"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>  // IWYU pragma: keep
#include <nanobind/stl/tuple.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

using namespace nanobind::literals;

namespace pagemill {
namespace {

// Linears and norms belong to Python, which keeps them.
void make_decoder(Decoder* self, const OptionalInput& embedding, const Linear& head, const Input& final_norm, int heads,
                  int kv_heads, int head_dim, int type, float eps, int activation, float scale, float soft_cap,
                  float embedding_scale) {
    const DecoderShape shape{.heads = heads,
                             .kv_heads = kv_heads,
                             .head_dim = head_dim,
                             .type = dtype(type),
                             .eps = eps,
                             .activation = static_cast<Activation>(activation),
                             .scale = scale,
                             .soft_cap = soft_cap,
                             .embedding_scale = embedding_scale};
    const int64_t vocab = head.weight.n, hidden = head.weight.k;
    const void* table = embedding ? elements("embedding", *embedding, kElementTypes[type], {vocab, hidden}) : nullptr;
    new (self) Decoder(shape, table, head, elements<float>("final_norm", final_norm, {hidden}));
}

void add_layer(Decoder& decoder, const Input& input_norm, const Linear& qkv, const Linear& o, const Input& pre_mlp_norm,
               const Linear& gate_up, const Linear& down, const OptionalInput& q_norm, const OptionalInput& k_norm,
               const OptionalInput& post_attention_norm, const OptionalInput& post_mlp_norm, int rope, int group,
               int64_t window) {
    const int64_t hidden = qkv.weight.k, head_dim = decoder.shape().head_dim;
    decoder.add_layer({.input_norm = elements<float>("input_norm", input_norm, {hidden}),
                       .qkv = qkv,
                       .o = o,
                       .pre_mlp_norm = elements<float>("pre_mlp_norm", pre_mlp_norm, {hidden}),
                       .gate_up = gate_up,
                       .down = down,
                       .q_norm = elements<float>("q_norm", q_norm, {head_dim}),
                       .k_norm = elements<float>("k_norm", k_norm, {head_dim}),
                       .post_attention_norm = elements<float>("post_attention_norm", post_attention_norm, {hidden}),
                       .post_mlp_norm = elements<float>("post_mlp_norm", post_mlp_norm, {hidden}),
                       .rope = rope,
                       .group = group,
                       .window = window});
}

// (tables, slots) of each layer group; (cos, sin) of each rotary embedding.
using Pairs = std::vector<std::tuple<Input, Input>>;
// Tables and slots of each group; of its remainders too, if it has any, with their window.
using Groups = std::vector<std::tuple<Input, Input, OptionalInput, OptionalInput, int64_t>>;
using AdaptersTokens = std::vector<std::tuple<const Adapter*, Input>>;

Exchange::Idle idle_of(const nb::object& idle) {
    return [&idle](double seconds) {
        nb::gil_scoped_acquire held;
        if (!idle.is_none()) idle(seconds);
    };
}

void set_parts(Decoder& decoder, Exchange& exchange, std::vector<int64_t> heads, std::vector<int64_t> hidden,
               std::vector<int64_t> intermediate) {
    for (const auto* widths : {&heads, &hidden, &intermediate})
        if (int64_t(widths->size()) != exchange.size()) throw std::invalid_argument("each rank has a width");
    decoder.set_parts({&exchange, std::move(heads), std::move(hidden), std::move(intermediate)});
}

void gather(Exchange& exchange, Address part, Address out, const std::vector<int64_t>& widths, int64_t rows,
            const nb::object& idle) {
    const Exchange::Idle called = idle_of(idle);
    nb::gil_scoped_release released;
    exchange.gather(at<void>(part), at<void>(out), widths, rows, called);
}

void run_step(Decoder& decoder, const Input& token_ids, const Input& positions, int64_t max_positions,
              const Input& query_start, const Input& context_lens, const Groups& groups, const Pairs& angles,
              std::vector<const LayerCache*> caches, Address output, const nb::object& on_layer,
              const AdaptersTokens& adapters, Address embedded, const nb::object& idle) {
    const auto tokens = int64_t(token_ids.size()), rows = int64_t(context_lens.size());
    DecoderStep step{.token_ids = elements<int64_t>("token_ids", token_ids, {tokens}),
                     .positions = elements<int64_t>("positions", positions, {tokens}),
                     .tokens = tokens,
                     .max_positions = max_positions,
                     .query_start = elements<int32_t>("query_start", query_start, {rows + 1}),
                     .context_lens = elements<int32_t>("context_lens", context_lens, {rows}),
                     .rows = int(rows),
                     .caches = std::move(caches),
                     .output = at<void>(output),
                     .embedded = at<void>(embedded),
                     .idle = idle_of(idle)};
    if ((decoder.parts().exchange != nullptr) != (step.embedded != nullptr))
        throw std::invalid_argument("a decoder in parts, and no other, takes embedded tokens");
    if (decoder.parts().exchange && !adapters.empty())
        throw std::invalid_argument("a decoder in parts takes no adapters");
    const auto checked_tables = [&](const Input& tables) {
        return static_cast<const int32_t*>(elements("tables", tables, nb::dtype<int32_t>(), {rows, kAny}, true));
    };
    for (const auto& [tables, slots, remainder_tables, remainder_slots, window] : groups) {
        GroupTables& group = step.groups.emplace_back();
        group.tables = checked_tables(tables);
        group.stride = tables.stride(0);
        group.slots = elements<int64_t>("slots", slots, {tokens});
        if (!remainder_tables || !remainder_slots) continue;
        for (const LayerCache* cache : step.caches) check_remainders(*cache, true);
        group.remainders = {checked_tables(*remainder_tables), remainder_tables->stride(0), window};
        group.remainder_slots = elements<int64_t>("slots", *remainder_slots, {tokens});
    }
    for (const auto& [cos, sin] : angles) {
        const float* cosines = elements<float>("cos", cos, {kAny, kAny});
        const auto reached = int64_t(cos.shape(0)), half = int64_t(cos.shape(1));
        step.angles.push_back({.cos = cosines, .sin = elements<float>("sin", sin, {reached, half}), .half = half});
        step.max_positions = std::min(step.max_positions, reached);
    }
    for (const auto& [adapter, some] : adapters) {
        const auto count = int64_t(some.size());
        if (adapter->additions.size() != decoder.num_layers() * Adapter::kPlaces)
            throw std::invalid_argument("an adapter belongs to another decoder");
        const auto* each = elements<int64_t>("tokens", some, {count});
        if (!std::is_sorted(each, each + count)) throw std::invalid_argument("an adapter's tokens must ascend");
        step.adapters.push_back({adapter, each, count});
    }
    if (!on_layer.is_none())
        step.on_layer = [&](int layer) {
            nb::gil_scoped_acquire held;
            on_layer(layer);
        };
    Run run;
    decoder.run(step);
}

}  // namespace

void bind_decoder(nb::module_& m) {
    nb::class_<Exchange>(m, "Exchange")
        .def("__init__", [](Exchange* self, Address memory, int64_t bytes, int rank,
                            int size) { new (self) Exchange(at<void>(memory), bytes, rank, size); })
        .def("gather", &gather, "part"_a, "out"_a, "widths"_a, "rows"_a, "idle"_a.none());
    nb::class_<Decoder>(m, "Decoder")
        .def("__init__", &make_decoder)
        .def("add_layer", &add_layer)
        .def("run", &run_step, "token_ids"_a, "positions"_a, "max_positions"_a, "query_start"_a, "context_lens"_a,
             "groups"_a, "angles"_a, "caches"_a, "output"_a, "on_layer"_a.none() = nb::none(),
             "adapters"_a = AdaptersTokens(), "embedded"_a = Address(0), "idle"_a.none() = nb::none())
        .def("set_parts", &set_parts)
        .def_prop_ro(
            "seconds",
            [](const Decoder& decoder) {
                nb::dict seconds;
                for (int op = 0; op < Decoder::kOperators; ++op)
                    seconds[Decoder::kOperatorNames[op]] = decoder.seconds()[op];
                return seconds;
            },
            "Seconds spent in each operator so far.");
}

}  // namespace pagemill
