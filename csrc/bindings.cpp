// Python's view of the kernels. Arrays are checked here: dtype, shape and contiguity. Tensors that an operator is
// called with come as addresses and strides, checked by the callers in pagemill.ops and pagemill.attention: each of
// torch's tensors takes 4.5 microseconds as an array (by DLPack), and 0.1 as an address (measured on a Zen 4 EPYC). The
// interpreter lock is released while a kernel runs.
#include "decoder.h"
#include "exchange.h"
#include "kernels.h"
#include "shared_prefixes.h"
#include "threads.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>  // IWYU pragma: keep
#include <nanobind/stl/string.h>  // IWYU pragma: keep
#include <nanobind/stl/tuple.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

namespace nb = nanobind;
using namespace nb::literals;
using namespace pagemill;

namespace {

using Address = uintptr_t;
template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }
DType dtype(int type) { return static_cast<DType>(type); }

using ElementType = nb::dlpack::dtype;
using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using OptionalInput = std::optional<Input>;
using Output = nb::ndarray<nb::device::cpu>;

constexpr ElementType element_type(nb::dlpack::dtype_code code, uint8_t bits) { return {uint8_t(code), bits, 1}; }

constexpr ElementType kBfloat16 = element_type(nb::dlpack::dtype_code::Bfloat, 16);
// In the order of DType.
constexpr ElementType kElementTypes[] = {nb::dtype<float>(), kBfloat16, element_type(nb::dlpack::dtype_code::Float, 16),
                                         nb::dtype<int8_t>(), nb::dtype<uint8_t>()};

std::string name_of(ElementType type) {
    const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    return (type.code < std::size(kinds) ? kinds[type.code] : "unknown") + std::to_string(type.bits);
}

// Raises TypeError for elements that there are no kernels for; only caches may be of int8, and of uint8, which is two
// integers of 4 bits.
DType dtype_of(ElementType type, bool cache = false) {
    const auto* const end = kElementTypes + (cache ? 5 : 3);
    const auto* const found = std::find(kElementTypes, end, type);
    if (found == end)
        throw nb::type_error(("the CPU kernels take float32, bfloat16 and float16, not " + name_of(type)).c_str());
    return static_cast<DType>(found - kElementTypes);
}

constexpr int64_t kAny = -1;

// The elements of an array of this shape, in which lengths may be kAny, without gaps; its outermost parts may lie
// `apart`. Raises ValueError for others.
template <class Array>
auto* elements(const char* name, const Array& array, ElementType type, std::initializer_list<int64_t> shape,
               bool apart = false) {
    bool fits = array.dtype() == type && array.ndim() == shape.size();
    int64_t stride = 1;
    std::string wanted, given;
    for (size_t i = shape.size(); fits && i-- > 0; stride *= int64_t(array.shape(i))) {
        const int64_t length = shape.begin()[i];
        fits = (length == kAny || length == int64_t(array.shape(i))) &&
               (array.size() == 0 || array.shape(i) == 1 || array.stride(i) == stride || (apart && i == 0));
    }
    if (fits) return array.data();
    for (const int64_t length : shape) wanted += " " + (length == kAny ? "any" : std::to_string(length));
    for (size_t i = 0; i < array.ndim(); ++i) given += " " + std::to_string(array.shape(i));
    throw std::invalid_argument(std::string(name) + " must be contiguous " + name_of(type) + " [" + wanted +
                                " ]; the array given is " + name_of(array.dtype()) + " [" + given + " ]");
}

template <class T> const T* elements(const char* name, const Input& array, std::initializer_list<int64_t> shape) {
    return static_cast<const T*>(elements(name, array, nb::dtype<T>(), shape));
}
template <class T> T* elements(const char* name, const Output& array, std::initializer_list<int64_t> shape) {
    return static_cast<T*>(elements(name, array, nb::dtype<T>(), shape));
}
template <class T> const T* elements(const char* name, const OptionalInput& array,
                                     std::initializer_list<int64_t> shape) {
    return array ? elements<T>(name, *array, shape) : nullptr;
}

struct Run {
    nb::gil_scoped_release released;
    Exclusive exclusive;
};

// The bytes of an array without gaps, of any shape and as many bytes as the others. Raises ValueError for others.
template <class Array> auto* bytes_of(const Array& array, int64_t bytes) {
    int64_t stride = 1;
    bool fits = array.dtype() == nb::dtype<uint8_t>() && int64_t(array.size()) == bytes;
    for (size_t i = array.ndim(); fits && i-- > 0; stride *= int64_t(array.shape(i)))
        fits = array.shape(i) == 1 || array.stride(i) == stride;
    if (!fits) throw std::invalid_argument("records are uint8, equally long, and without gaps");
    return array.data();
}

void copy_arrays(const std::vector<Output>& targets, const std::vector<Input>& sources) {
    if (targets.size() != sources.size()) throw std::invalid_argument("each record has one target");
    const int64_t bytes = targets.empty() ? 0 : int64_t(targets[0].size());
    std::vector<void*> to;
    std::vector<const void*> from;
    to.reserve(targets.size());
    from.reserve(sources.size());
    for (const auto& target : targets) to.push_back(bytes_of(target, bytes));
    for (const auto& source : sources) from.push_back(bytes_of(source, bytes));
    Run run;
    copy_records(to.data(), from.data(), int64_t(to.size()), bytes);
}

AllowedOutputs allowed_outputs(const OptionalInput& bits, const OptionalInput& rows_of_bits, int64_t outputs,
                               int64_t rows) {
    if (bits.has_value() != rows_of_bits.has_value())
        throw std::invalid_argument("bits and their rows are given together or not");
    AllowedOutputs allowed{.words = (outputs + 31) / 32};
    allowed.bits = elements<uint32_t>("bits", bits, {kAny, allowed.words});
    allowed.rows = elements<int64_t>("rows of bits", rows_of_bits, {rows});
    const int64_t known = bits ? int64_t(bits->shape(0)) : 0;
    for (int64_t i = 0; allowed.rows && i < rows; ++i)
        if (allowed.rows[i] >= known) throw std::out_of_range("there are no bits " + std::to_string(allowed.rows[i]));
    return allowed;
}

class Linear {
  public:
    const Kernels& set = kernels();  // the panels' format is this set's
    PackedLinear weight;

    Linear(const Input& values, const OptionalInput& bias, int x_type)
        : Linear(values, Format::dense, dtype_of(values.dtype())) {
        const void* data = elements("weight", values, values.dtype(), {weight.n, weight.k});
        const float* added = elements<float>("bias", bias, {weight.n});
        pack([&] { return set.pack_linear(weight, data, added, dtype(x_type)); });
    }
    Linear(const Input& values, const Input& scale, const Input& low, const OptionalInput& bias, int bits)
        : Linear(values, bits == 4 ? Format::affine4 : Format::affine8, DType::f32) {
        if (bits != 4 && bits != 8) throw std::invalid_argument("bits must be 4 or 8, not " + std::to_string(bits));
        check_blocks();
        const bool fine = bits == 8 && scale.ndim() == 2 && int64_t(scale.shape(1)) == weight.k / 16;
        if (fine) weight.format = Format::fine8;
        const int64_t blocks = weight.k / (fine ? 16 : 32);
        const AffineSource from{.values = elements<uint8_t>("values", values, {weight.n, weight.k}),
                                .scale = elements<float>("scale", scale, {weight.n, blocks}),
                                .low = elements<float>("low", low, {weight.n, blocks}),
                                .bias = elements<float>("bias", bias, {weight.n})};
        pack([&] { return set.pack_affine(weight, from); });
    }
    Linear(const Input& values, const OptionalInput& slopes, const OptionalInput& offsets, const Input& scales,
           const OptionalInput& bias, int type)
        : Linear(values, slopes ? Format::int4 : Format::int8, dtype(type)) {
        if (bool(slopes) != bool(offsets)) throw std::invalid_argument("slopes and offsets are given together or not");
        if (slopes) check_blocks();
        const auto kind = slopes ? nb::dtype<uint8_t>() : nb::dtype<int8_t>();
        const void* scale_bits = elements("scales", scales, kBfloat16, {weight.n, (weight.k + 191) / 192});
        const QuantizedSource from{.values = elements("values", values, kind, {weight.n, weight.k}),
                                   .slopes = elements<int16_t>("slopes", slopes, {weight.n, weight.k / 32}),
                                   .offsets = elements<int16_t>("offsets", offsets, {weight.n, weight.k / 32}),
                                   .scales = static_cast<const uint16_t*>(scale_bits),
                                   .bias = elements<float>("bias", bias, {weight.n})};
        pack([&] { return set.pack_quantized(weight, from); });
    }
    // From what `parts` has given, which is used where it lies.
    Linear(int64_t n, int64_t k, int format, int type, const std::vector<uint16_t>& exponents, const Input& panels,
           const OptionalInput& scales, const OptionalInput& bias, const OptionalInput& patches) {
        const bool is_coded = Format(format) == Format::coded;
        if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX || format < 0 || Format(format) > Format::fine8 ||
            type < 0 || dtype(type) > DType::f16 || exponents.size() != std::size(weight.exponents) ||
            (is_coded && set.isa != std::string("amx_bf16")))
            throw std::invalid_argument("there is no packed weight of such a shape or format here");
        weight = {.n = n, .k = k, .type = dtype(type), .format = Format(format)};
        if (Format(format) == Format::int4 || Format(format) >= Format::affine4) check_blocks();
        std::copy(exponents.begin(), exponents.end(), weight.exponents);
        const PackedBytes bytes = set.packed_bytes(weight);
        weight.panels = part<void>("panels", panels, bytes.panels);
        weight.scales = part<void>("scales", scales, bytes.scales);
        if (bias) weight.bias = part<float>("bias", bias, bytes.bias);
        if (is_coded) check_patches(patches, bytes);
    }
    ~Linear() {
        if (kept.empty()) release(weight);
    }
    Linear(const Linear&) = delete;

    nb::tuple parts(const nb::object& self) const {
        const PackedBytes bytes = set.packed_bytes(weight);
        const auto array = [&](const void* data, size_t size) -> nb::object {
            if (!data || !size) return nb::none();
            return nb::cast(nb::ndarray<nb::numpy, const uint8_t>(static_cast<const uint8_t*>(data), {size}, self));
        };
        const std::vector<uint16_t> exponents(std::begin(weight.exponents), std::end(weight.exponents));
        const size_t steps = bytes.patches / sizeof(uint32_t);
        const size_t patched = steps ? bytes.patches + weight.patches[steps - 1] * sizeof(uint32_t) : 0;
        return nb::make_tuple(weight.n, weight.k, int(weight.format), int(weight.type), exponents,
                              array(weight.panels, bytes.panels), array(weight.scales, bytes.scales),
                              array(weight.bias, bytes.bias), array(weight.patches, patched));
    }

    operator Projection() const { return {&weight, &set}; }

    void rows(const Input& ids, Address y) const {
        const auto count = int64_t(ids.size());
        const auto* each = elements<int64_t>("ids", ids, {count});
        Run run;
        set.embed_packed(weight, each, 1.0f, at<void>(y), weight.type, count);
    }

    void call(Address x, int64_t x_row, Address y, int64_t y_row, int type, int64_t rows) const {
        Run run;
        set.linear(weight, at<void>(x), x_row, at<void>(y), y_row, dtype(type), rows);
    }

    void argmax(Address x, int64_t x_row, int type, const Output& tokens, const OptionalInput& bits,
                const OptionalInput& rows_of_bits) const {
        const auto rows = int64_t(tokens.size());
        auto* each = elements<int64_t>("tokens", tokens, {rows});
        const AllowedOutputs allowed = allowed_outputs(bits, rows_of_bits, weight.n, rows);
        Run run;
        set.linear_argmax(weight, at<void>(x), x_row, dtype(type), rows, allowed, each);
    }

  private:
    std::vector<Input> kept;  // in whose memory the weight lies; none: in its own

    template <class T> T* part(const char* name, const OptionalInput& array, size_t bytes) {
        if (!array && !bytes) return nullptr;
        if (!array || array->dtype() != nb::dtype<uint8_t>() || array->ndim() != 1 || array->shape(0) != bytes ||
            (bytes > 1 && array->stride(0) != 1) || Address(array->data()) % 64)
            throw std::invalid_argument(std::string(name) + " must be " + std::to_string(bytes) +
                                        " neighbouring bytes, aligned to 64");
        kept.push_back(*array);
        weight.bytes += bytes;
        return static_cast<T*>(const_cast<void*>(array->data()));
    }

    // Patches are written where they say, so each must lie within its step.
    void check_patches(const OptionalInput& patches, const PackedBytes& bytes) {
        weight.patches = part<uint32_t>("patches", patches, patches ? size_t(patches->size()) : 0);
        const size_t steps = bytes.patches / sizeof(uint32_t), step_bytes = bytes.panels / (steps - 1) / 3 * 4,
                     words = patches ? size_t(patches->size()) / sizeof(uint32_t) : 0;
        bool fits = words >= steps && weight.patches[0] == 0 && weight.patches[steps - 1] == words - steps;
        for (size_t i = 1; fits && i < steps; ++i) fits = weight.patches[i - 1] <= weight.patches[i];
        for (size_t i = steps; fits && i < words; ++i) fits = (weight.patches[i] >> 16) + 2 <= step_bytes;
        if (!fits) throw std::invalid_argument("patches lie outside of their steps");
    }

    void check_blocks() const {
        if (weight.k % 32)
            throw std::invalid_argument("a row is whole blocks of 32 values, not " + std::to_string(weight.k));
    }
    Linear(const Input& values, Format format, DType type) {
        if (values.ndim() != 2)
            throw std::invalid_argument("a weight has 2 dimensions, not " + std::to_string(values.ndim()));
        weight.n = int64_t(values.shape(0));
        weight.k = int64_t(values.shape(1));
        weight.type = type;
        weight.format = format;
    }

    template <class Pack> void pack(const Pack& pack) {
        Run run;
        if (!pack()) throw std::bad_alloc();
    }
};

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

void check_remainders(const LayerCache& cache, bool given) {
    if (given && cache.key.type != DType::u4)
        throw std::invalid_argument("only keys and values of 4 bits have remainders");
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

void mask(const Output& logits, const Input& places, const OptionalInput& bits, const OptionalInput& rows_of_bits) {
    const auto items = int64_t(places.size());
    const MaskArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                        .n = int64_t(logits.shape(1)),
                        .places = elements<int64_t>("places", places, {items}),
                        .items = items,
                        .allowed = allowed_outputs(bits, rows_of_bits, int64_t(logits.shape(1)), items)};
    Run run;
    kernels().mask_logits(args);
}

// Sampling's inputs [items] each, from rows `places` of logits [rows, n].
void choose(const Input& logits, const Input& places, const Input& temperature, const Input& top_k, const Input& top_p,
            const Input& min_p, const Input& uniforms, const Output& tokens) {
    const auto items = int64_t(places.size());
    const ChooseArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                          .n = int64_t(logits.shape(1)),
                          .places = elements<int64_t>("places", places, {items}),
                          .items = items,
                          .temperature = elements<float>("temperature", temperature, {items}),
                          .top_k = elements<int64_t>("top_k", top_k, {items}),
                          .top_p = elements<float>("top_p", top_p, {items}),
                          .min_p = elements<float>("min_p", min_p, {items}),
                          .uniforms = elements<double>("uniforms", uniforms, {items}),
                          .tokens = elements<int64_t>("tokens", tokens, {items})};
    Run run;
    kernels().choose_tokens(args);
}

void log_probabilities(const Input& logits, const Input& places, const Input& tokens, const Output& own,
                       const Output& ranks, const Output& top_tokens, const Output& top_logprobs) {
    const auto items = int64_t(places.size());
    LogprobArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                     .n = int64_t(logits.shape(1)),
                     .places = elements<int64_t>("places", places, {items}),
                     .items = items,
                     .tokens = elements<int64_t>("tokens", tokens, {items}),
                     .own = elements<float>("own", own, {items}),
                     .ranks = elements<int64_t>("ranks", ranks, {items}),
                     .top_tokens = elements<int64_t>("top_tokens", top_tokens, {items, kAny})};
    args.k = int64_t(top_tokens.shape(1));
    args.top_logprobs = elements<float>("top_logprobs", top_logprobs, {items, args.k});
    if (args.k > args.n)
        throw std::invalid_argument("top_tokens has " + std::to_string(args.k) + " columns, logits have " +
                                    std::to_string(args.n));
    Run run;
    kernels().log_probabilities(args);
}

}  // namespace

NB_MODULE(_kernels, m) {
    m.doc() =
        "CPU kernels. Arguments are arrays, or addresses, strides in elements and dtypes (0 fp32, 1 bf16, "
        "2 fp16).";
#if defined(NDEBUG)
    nb::set_leak_warnings(false);  // modules that still hold objects at exit are not cleared by the interpreter
#endif
    m.attr("interface") = PAGEMILL_INTERFACE;
    m.attr("sources") = PAGEMILL_SOURCES;
    m.def("isa", [] { return std::string(kernels().isa); }, "Name of the instruction set whose kernels run.");
    m.def("available_isas", &available_isas, "Instruction sets of this CPU that there are kernels for, best first.");
    m.def(
        "use_isa",
        [](const std::string& name) {
            if (!use_isa(name)) throw std::invalid_argument("this CPU has no kernels named " + name);
        },
        "Makes another set's kernels run; weights packed before keep theirs.");
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        if (count < 1) throw std::invalid_argument("num_threads must be at least 1, not " + std::to_string(count));
        Run run;
        set_num_threads(count);
    });
    m.def("rms_norm", [](Address x, int64_t x_outer, int64_t x_inner, Address weight, float eps, Address y, int type,
                         int64_t outer, int64_t inner, int64_t n) {
        Run run;
        kernels().rms_norm(at<void>(x), x_outer, x_inner, at<float>(weight), eps, at<void>(y), dtype(type), outer,
                           inner, n);
    });
    m.def("rotate", [](Address x, int64_t x_token, int64_t x_head, int type, Address cos, Address sin, int64_t tokens,
                       int64_t heads, int64_t half) {
        Run run;
        kernels().rotate(at<void>(x), x_token, x_head, dtype(type), at<float>(cos), at<float>(sin), tokens, heads,
                         half);
    });
    m.def("gated", [](Address x, int64_t x_row, Address y, int type, int activation, int64_t rows, int64_t n) {
        Run run;
        kernels().gated(at<void>(x), x_row, at<void>(y), dtype(type), static_cast<Activation>(activation), rows, n);
    });
    m.def("exp", [](Address x, Address y, int64_t n) { kernels().exp(at<float>(x), at<float>(y), n); });
    m.def("tanh", [](Address x, Address y, int64_t n) { kernels().tanh(at<float>(x), at<float>(y), n); });
    m.def(
        "copy_frames",
        [](Address base, int64_t pieces, int64_t piece_stride, int64_t frame_stride, int64_t bytes, const Input& source,
           const Input& target) {
            const auto count = int64_t(source.size());
            const auto *from = elements<int64_t>("source", source, {count}),
                       *to = elements<int64_t>("target", target, {count});
            Run run;
            copy_frames(at<void>(base), pieces, piece_stride, frame_stride, bytes, from, to, count);
        },
        "Strides in bytes; see kernels.h.");
    m.def("copy_records", &copy_arrays, "targets"_a, "sources"_a, "See kernels.h.");
    m.def(
        "dequantize",
        [](int format, const Input& blocks, const Output& out) {
            const auto weights = int64_t(out.size());
            const auto* stored = elements<uint8_t>("blocks", blocks, {kAny});
            auto* wide = elements<float>("out", out, {weights});
            Run run;
            if (!dequantize(format, stored, wide, weights))
                throw std::invalid_argument("no GGUF format has the number " + std::to_string(format));
        },
        "From whole blocks of a GGUF format, by its number, to fp32.");
    m.def(
        "quantize_int8",
        [](const Input& weight, const Output& values, const Output& scales) {
            const int64_t n = weight.ndim() == 2 ? int64_t(weight.shape(0)) : 0,
                          k = weight.ndim() == 2 ? int64_t(weight.shape(1)) : 0;
            const void* from = elements("weight", weight, weight.dtype(), {n, k});
            auto* rounded = elements<int8_t>("values", values, {n, k});
            void* of_groups = elements("scales", scales, kBfloat16, {n, (k + 191) / 192});
            Run run;
            kernels().quantize_int8(from, dtype_of(weight.dtype()), n, k, rounded, static_cast<uint16_t*>(of_groups));
        },
        "Rounds a weight to 8 bits; see kernels.h.");
    m.def("mask_logits", &mask);
    m.def("choose_tokens", &choose);
    m.def("log_probabilities", &log_probabilities);
    nb::class_<Linear>(m, "Linear")
        .def(nb::init<const Input&, const OptionalInput&, int>(), "weight"_a, "bias"_a.none(), "x_dtype"_a)
        .def(nb::init<const Input&, const Input&, const Input&, const OptionalInput&, int>(), "values"_a, "scale"_a,
             "low"_a, "bias"_a.none(), "bits"_a)
        .def(nb::init<const Input&, const OptionalInput&, const OptionalInput&, const Input&, const OptionalInput&,
                      int>(),
             "values"_a, "slopes"_a.none(), "offsets"_a.none(), "scales"_a, "bias"_a.none(), "dtype"_a)
        .def(nb::init<int64_t, int64_t, int, int, const std::vector<uint16_t>&, const Input&, const OptionalInput&,
                      const OptionalInput&, const OptionalInput&>(),
             "n"_a, "k"_a, "format"_a, "type"_a, "exponents"_a, "panels"_a, "scales"_a.none(), "bias"_a.none(),
             "patches"_a.none())
        .def("parts", [](const nb::object& self) { return nb::cast<const Linear&>(self).parts(self); })
        .def("__call__", &Linear::call)
        .def("argmax", &Linear::argmax, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg().none(), nb::arg().none())
        .def("rows", &Linear::rows)
        .def_prop_ro("nbytes", [](const Linear& linear) { return linear.weight.bytes; });
    nb::class_<Addition>(m, "LowRank")
        .def(nb::init<int64_t, int64_t, const std::vector<std::tuple<Input, Input, int64_t, int64_t, float>>&>(),
             "out_features"_a, "in_features"_a, "parts"_a);
    m.def("add_low_rank", &add_low_rank);
    m.def("order_rows", &order_rows, "See order_neighbours in shared_prefixes.h.");
    nb::class_<Adapter>(m, "Adapter").def(nb::init<>()).def("set", &set_addition);
    nb::class_<LayerCache>(m, "Cache")
        .def(nb::new_(&layer_cache), "key"_a, "value"_a, "key_scale"_a.none(), "value_scale"_a.none(),
             "float8"_a = nb::none())
        .def("write", &write_cache)
        .def("attend", &attend_cache);
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
