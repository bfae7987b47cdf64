// A layer's keys and values, and attention over them.
#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"
#include "../shared_prefixes.h"

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>    // IWYU pragma: keep

using namespace nanobind::literals;

namespace pagemill {
namespace {

// Keys or values [frames, kv_heads, block_size, head_dim]; where some lie side by side they have one dimension more,
// keys the last one, values the last but one. Raises ValueError for integers without scales.
CacheView view(const Output& array, const std::optional<Output>& scales, bool is_key, int64_t block_size,
               std::optional<int> float8) {
    const bool beside = array.ndim() == 5;
    CacheView made{.data = array.data(),
                   .frame = array.stride(0),
                   .head = array.stride(1),
                   .token = array.stride(2),
                   .dim = array.stride(is_key || !beside ? 3 : 4),
                   .type = float8 ? dtype(*float8) : dtype_of(array.dtype(), true),
                   .beside = beside ? int(array.shape(is_key ? 4 : 3)) : 1};
    if (!is_integer(made.type)) return made;
    const bool whole = made.type == DType::i8;
    const int64_t dims = 2 * int64_t(array.size()) / int64_t(array.shape(0) * array.shape(1)) / block_size,
                  words = block_size * (!whole && is_key ? dims / kKeyGroup : 1);
    const auto type = whole ? nb::dtype<float>() : nb::dtype<int32_t>();
    const bool fits = scales && scales->dtype() == type && scales->ndim() == 3 && scales->stride(2) == 1 &&
                      scales->shape(0) == array.shape(0) && scales->shape(1) == array.shape(1) &&
                      int64_t(scales->shape(2)) == words;
    if (!fits)
        throw std::invalid_argument("a cache of " + name_of(array.dtype()) + " needs " + name_of(type) +
                                    " scales [frames, kv_heads, " + std::to_string(words) + "], tokens side by side");
    made.scales = scales->data();
    made.scale_frame = scales->stride(0);
    made.scale_head = scales->stride(1);
    return made;
}

LayerCache layer_cache(const Output& key, const Output& value, const std::optional<Output>& key_scale,
                       const std::optional<Output>& value_scale, std::optional<int> float8) {
    if (float8 && (key.dtype() != nb::dtype<uint8_t>() || value.dtype() != nb::dtype<uint8_t>() ||
                   dtype(*float8) < DType::e4m3 || dtype(*float8) > DType::e5m2))
        throw std::invalid_argument("floating point of 8 bits comes as uint8");
    if (key.ndim() < 4 || key.ndim() != value.ndim())
        throw std::invalid_argument("keys and values must have 4 or 5 dimensions, and equally many");
    const auto block_size = int64_t(key.shape(2));
    LayerCache made{.key = view(key, key_scale, true, block_size, float8),
                    .value = view(value, value_scale, false, block_size, float8),
                    .kv_heads = int(key.shape(1)),
                    .block_size = int(block_size)};
    const auto elements_of = [](const Output& array, const CacheView& view) {
        return array.size() * (view.type == DType::u4 ? 2 : 1);
    };
    const DType keys = made.key.type, values = made.value.type;
    if (elements_of(key, made.key) != elements_of(value, made.value) ||
        (keys != values && (keys != DType::i8 || values != DType::u4)))
        throw std::invalid_argument("keys and values must be equal in size and dtype, or int8 and uint8, not " +
                                    name_of(key.dtype()) + " and " + name_of(value.dtype()));
    made.head_dim = int(value.shape(value.ndim() - 1)) * (values == DType::u4 ? 2 : 1);
    if (values == DType::u4 && made.head_dim % 32)
        throw std::invalid_argument("heads of 4-bit integers must be multiples of 32, not " +
                                    std::to_string(made.head_dim));
    if (is_integer(keys) && made.head_dim > kMostNarrowDims)
        throw std::invalid_argument("heads of integers have at most " + std::to_string(kMostNarrowDims) +
                                    " dimensions, not " + std::to_string(made.head_dim));
    return made;
}

void write_cache(const LayerCache& cache, Address key, int64_t key_token, int64_t key_head, Address value,
                 int64_t value_token, int64_t value_head, int type, Address slots, Address remainder_slots,
                 int64_t tokens) {
    check_remainders(cache, remainder_slots != 0);
    const WriteArgs args{.key = {at<void>(key), key_token, key_head},
                         .value = {at<void>(value), value_token, value_head},
                         .type = dtype(type),
                         .cache = cache,
                         .slots = at<int64_t>(slots),
                         .remainder_slots = at<int64_t>(remainder_slots),
                         .tokens = tokens};
    Run run;
    kernels().write_kv(args);
}

void attend_cache(const LayerCache& cache, Address query, int type, int64_t query_token, int64_t query_head, int heads,
                  Address output, Address lse, Address tables, int64_t table_stride, Address query_start,
                  Address context_lens, Address positions, Address key_start, Address key_end, int rows, float scale,
                  int64_t window, float soft_cap, Address remainder_tables, int64_t remainder_stride,
                  int64_t remainder_window, bool share) {
    check_remainders(cache, remainder_tables != 0);
    AttentionArgs args{.query = {at<void>(query), query_token, query_head},
                       .type = dtype(type),
                       .output = at<void>(output),
                       .lse = at<float>(lse),
                       .cache = cache,
                       .tables = at<int32_t>(tables),
                       .table_stride = table_stride,
                       .query_start = at<int32_t>(query_start),
                       .context_lens = at<int32_t>(context_lens),
                       .positions = at<int64_t>(positions),
                       .key_start = at<int32_t>(key_start),
                       .key_end = at<int32_t>(key_end),
                       .rows = rows,
                       .heads = heads,
                       .scale = scale,
                       .window = window,
                       .soft_cap = soft_cap,
                       .remainders = {at<int32_t>(remainder_tables), remainder_stride, remainder_window}};
    Run run;
    const SharedPrefixes prefixes(args, share);
    prefixes.apply(args);
    kernels().attend(args);
}

// tables [groups, every row, entries]; groups: numbers of some; rows, limits, chunks, order and common [count].
void order_rows(const Input& tables, const std::vector<int32_t>& groups, const Input& rows, const Input& limits,
                const Input& chunks, int block_size, int most, bool moves, const Output& order, const Output& common) {
    const auto* all = elements<int32_t>("tables", tables, {kAny, kAny, kAny});
    const auto num_groups = int64_t(tables.shape(0)), every = int64_t(tables.shape(1)),
               entries = int64_t(tables.shape(2));
    const auto count = int64_t(rows.size());
    const NeighbourArgs args{.tables = all,
                             .group_stride = every * entries,
                             .row_stride = entries,
                             .groups = groups,
                             .rows = elements<int32_t>("rows", rows, {count}),
                             .limits = elements<int32_t>("limits", limits, {count}),
                             .chunks = elements<int32_t>("chunks", chunks, {count}),
                             .count = int(count),
                             .block_size = block_size,
                             .most = most,
                             .moves = moves};
    if (groups.empty() || block_size < 1 || most < 1) throw std::invalid_argument("there is nothing to compare");
    for (const int32_t group : groups)
        if (group < 0 || group >= num_groups) throw std::out_of_range("a group has no table");
    for (int64_t i = 0; i < count; ++i)
        if (args.rows[i] < 0 || args.rows[i] >= every || args.chunks[i] < 1 || args.limits[i] < 0 ||
            args.limits[i] > entries * block_size)
            throw std::out_of_range("a row has no table, or none that is so long");
    order_neighbours(args, elements<int32_t>("order", order, {count}), elements<int32_t>("common", common, {count}));
}

}  // namespace

void bind_attention(nb::module_& m) {
    nb::class_<LayerCache>(m, "Cache")
        .def(nb::new_(&layer_cache), "key"_a, "value"_a, "key_scale"_a.none(), "value_scale"_a.none(),
             "float8"_a = nb::none())
        .def("write", &write_cache)
        .def("attend", &attend_cache);
    m.def("order_rows", &order_rows, "See order_neighbours in shared_prefixes.h.");
}

}  // namespace pagemill
