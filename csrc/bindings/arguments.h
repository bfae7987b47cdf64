// Checks of what Python calls with. Arrays are checked here: dtype, shape and contiguity. Tensors that an operator is
// called with come as addresses and strides, checked by the callers in pagemill.ops and pagemill.attention: each of
// torch's tensors takes 4.5 microseconds as an array (by DLPack), and 0.1 as an address (measured on a Zen 4 EPYC). The
// interpreter lock is released while a kernel runs.
#pragma once

#include "../kernels.h"
#include "../threads.h"

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

namespace pagemill {

namespace nb = nanobind;

using Address = uintptr_t;
template <class T> T* at(Address address) { return reinterpret_cast<T*>(address); }
inline DType dtype(int type) { return static_cast<DType>(type); }

using ElementType = nb::dlpack::dtype;
using Input = nb::ndarray<nb::ro, nb::device::cpu>;
using OptionalInput = std::optional<Input>;
using Output = nb::ndarray<nb::device::cpu>;

constexpr ElementType element_type(nb::dlpack::dtype_code code, uint8_t bits) { return {uint8_t(code), bits, 1}; }

constexpr ElementType kBfloat16 = element_type(nb::dlpack::dtype_code::Bfloat, 16);
// In the order of DType.
constexpr ElementType kElementTypes[] = {nb::dtype<float>(), kBfloat16, element_type(nb::dlpack::dtype_code::Float, 16),
                                         nb::dtype<int8_t>(), nb::dtype<uint8_t>()};

std::string name_of(ElementType type);
// Raises TypeError for elements that there are no kernels for; only caches may be of int8, and of uint8, which is two
// integers of 4 bits.
DType dtype_of(ElementType type, bool cache = false);

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

// Held while a kernel runs.
struct Run {
    nb::gil_scoped_release released;
    Exclusive exclusive;
};

// Which of `outputs` are allowed in each of `rows`; bits uint32 [any, words].
AllowedOutputs allowed_outputs(const OptionalInput& bits, const OptionalInput& rows_of_bits, int64_t outputs,
                               int64_t rows);

// Raises ValueError where remainders are given for a cache that has none.
void check_remainders(const LayerCache& cache, bool given);

}  // namespace pagemill
