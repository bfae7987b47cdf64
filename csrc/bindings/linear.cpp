#include "linear.h"

#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

using namespace nanobind::literals;

namespace pagemill {

template <class Pack> void Linear::pack(const Pack& pack) {
    Run run;
    if (!pack()) throw std::bad_alloc();
}

template <class T> T* Linear::part(const char* name, const OptionalInput& array, size_t bytes) {
    if (!array && !bytes) return nullptr;
    if (!array || array->dtype() != nb::dtype<uint8_t>() || array->ndim() != 1 || array->shape(0) != bytes ||
        (bytes > 1 && array->stride(0) != 1) || Address(array->data()) % 64)
        throw std::invalid_argument(std::string(name) + " must be " + std::to_string(bytes) +
                                    " neighbouring bytes, aligned to 64");
    kept.push_back(*array);
    weight.bytes += bytes;
    return static_cast<T*>(const_cast<void*>(array->data()));
}

Linear::Linear(const Input& values, const OptionalInput& bias, int x_type)
    : Linear(values, Format::dense, dtype_of(values.dtype())) {
    const void* data = elements("weight", values, values.dtype(), {weight.n, weight.k});
    const float* added = elements<float>("bias", bias, {weight.n});
    pack([&] { return set.pack_linear(weight, data, added, dtype(x_type)); });
}

Linear::Linear(const Input& values, const Input& scale, const Input& low, const OptionalInput& bias, int bits)
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

Linear::Linear(const Input& values, const OptionalInput& slopes, const OptionalInput& offsets, const Input& scales,
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

Linear::Linear(int64_t n, int64_t k, int format, int type, const std::vector<uint16_t>& exponents, const Input& panels,
               const OptionalInput& scales, const OptionalInput& bias, const OptionalInput& patches) {
    const bool is_coded = Format(format) == Format::coded;
    if (n < 1 || k < 1 || n > INT32_MAX || k > INT32_MAX || format < 0 || Format(format) > Format::fine8 || type < 0 ||
        dtype(type) > DType::f16 || exponents.size() != std::size(weight.exponents) ||
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

Linear::~Linear() {
    if (kept.empty()) release(weight);
}

nb::tuple Linear::parts(const nb::object& self) const {
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

void Linear::rows(const Input& ids, Address y) const {
    const auto count = int64_t(ids.size());
    const auto* each = elements<int64_t>("ids", ids, {count});
    Run run;
    set.embed_packed(weight, each, 1.0f, at<void>(y), weight.type, count);
}

void Linear::call(Address x, int64_t x_row, Address y, int64_t y_row, int type, int64_t rows) const {
    Run run;
    set.linear(weight, at<void>(x), x_row, at<void>(y), y_row, dtype(type), rows);
}

void Linear::argmax(Address x, int64_t x_row, int type, const Output& tokens, const OptionalInput& bits,
                    const OptionalInput& rows_of_bits) const {
    const auto rows = int64_t(tokens.size());
    auto* each = elements<int64_t>("tokens", tokens, {rows});
    const AllowedOutputs allowed = allowed_outputs(bits, rows_of_bits, weight.n, rows);
    Run run;
    set.linear_argmax(weight, at<void>(x), x_row, dtype(type), rows, allowed, each);
}

// Patches are written where they say, so each must lie within its step.
void Linear::check_patches(const OptionalInput& patches, const PackedBytes& bytes) {
    weight.patches = part<uint32_t>("patches", patches, patches ? size_t(patches->size()) : 0);
    const size_t steps = bytes.patches / sizeof(uint32_t), step_bytes = bytes.panels / (steps - 1) / 3 * 4,
                 words = patches ? size_t(patches->size()) / sizeof(uint32_t) : 0;
    bool fits = words >= steps && weight.patches[0] == 0 && weight.patches[steps - 1] == words - steps;
    for (size_t i = 1; fits && i < steps; ++i) fits = weight.patches[i - 1] <= weight.patches[i];
    for (size_t i = steps; fits && i < words; ++i) fits = (weight.patches[i] >> 16) + 2 <= step_bytes;
    if (!fits) throw std::invalid_argument("patches lie outside of their steps");
}

void Linear::check_blocks() const {
    if (weight.k % 32)
        throw std::invalid_argument("a row is whole blocks of 32 values, not " + std::to_string(weight.k));
}

Linear::Linear(const Input& values, Format format, DType type) {
    if (values.ndim() != 2)
        throw std::invalid_argument("a weight has 2 dimensions, not " + std::to_string(values.ndim()));
    weight.n = int64_t(values.shape(0));
    weight.k = int64_t(values.shape(1));
    weight.type = type;
    weight.format = format;
}

static void check_format(bool known, int format) {
    if (!known)
        throw std::invalid_argument("no rows of whole blocks have the GGUF format of number " + std::to_string(format));
}

// The blocks of a weight that becomes `values` [n, k].
static StoredWeight stored_weight(int format, const Input& blocks, const Output& values) {
    if (values.ndim() != 2)
        throw std::invalid_argument("values have 2 dimensions, not " + std::to_string(values.ndim()));
    const int64_t n = int64_t(values.shape(0)), k = int64_t(values.shape(1));
    const int64_t bytes = kernels().stored_bytes(format, k);
    check_format(bytes > 0, format);
    return {.format = format, .blocks = elements<uint8_t>("blocks", blocks, {n * bytes}), .n = n, .k = k};
}

void bind_linear(nb::module_& m) {
    m.def(
        "dequantize",
        [](int format, const Input& blocks, const Output& out) {
            const auto weights = int64_t(out.size());
            const auto* stored = elements<uint8_t>("blocks", blocks, {kAny});
            auto* wide = elements<float>("out", out, {weights});
            Run run;
            check_format(kernels().dequantize(format, stored, wide, weights), format);
        },
        "From whole blocks of a GGUF format, by its number, to fp32.");
    m.def(
        "round_stored",
        [](int format, const Input& blocks, const Output& values, const Output& scales) {
            const StoredWeight weight = stored_weight(format, blocks, values);
            auto* rounded = elements<int8_t>("values", values, {weight.n, weight.k});
            void* of_groups = elements("scales", scales, kBfloat16, {weight.n, (weight.k + 191) / 192});
            const std::unique_ptr<bool[]> finite(new bool[weight.n]);
            Run run;
            auto* each = static_cast<uint16_t*>(of_groups);
            check_format(kernels().round_stored(weight, rounded, each, finite.get()), format);
            return std::all_of(finite.get(), finite.get() + weight.n, [](bool is) { return is; });
        },
        "Rounds blocks of a GGUF format to 8 bits; returns whether all are finite. See kernels.h.");
    m.def(
        "keep_int4",
        [](int format, const Input& blocks, const Output& values, const Output& slopes, const Output& offsets,
           const Output& scales) {
            const StoredWeight weight = stored_weight(format, blocks, values);
            auto* whole = elements<uint8_t>("values", values, {weight.n, weight.k});
            auto* slope = elements<int16_t>("slopes", slopes, {weight.n, weight.k / 32});
            auto* offset = elements<int16_t>("offsets", offsets, {weight.n, weight.k / 32});
            void* of_groups = elements("scales", scales, kBfloat16, {weight.n, (weight.k + 191) / 192});
            const std::unique_ptr<bool[]> finite(new bool[weight.n]);
            Run run;
            auto* each = static_cast<uint16_t*>(of_groups);
            check_format(kernels().keep_int4(weight, whole, slope, offset, each, finite.get()), format);
            return std::all_of(finite.get(), finite.get() + weight.n, [](bool is) { return is; });
        },
        "Takes blocks of a GGUF format of 4 bits apart; returns whether all are finite. See kernels.h.");
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
}

}  // namespace pagemill
