// Copies of frames and records.
#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

using namespace nanobind::literals;

namespace pagemill {
namespace {

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

}  // namespace

void bind_copies(nb::module_& m) {
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
}

}  // namespace pagemill
