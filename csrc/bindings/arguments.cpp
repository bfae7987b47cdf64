#include "arguments.h"

#include "../kernels.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>

namespace pagemill {

std::string name_of(ElementType type) {
    const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
    return (type.code < std::size(kinds) ? kinds[type.code] : "unknown") + std::to_string(type.bits);
}

DType dtype_of(ElementType type, bool cache) {
    const auto* const end = kElementTypes + (cache ? 5 : 3);
    const auto* const found = std::find(kElementTypes, end, type);
    if (found == end)
        throw nb::type_error(("the CPU kernels take float32, bfloat16 and float16, not " + name_of(type)).c_str());
    return static_cast<DType>(found - kElementTypes);
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

void check_remainders(const LayerCache& cache, bool given) {
    if (given && cache.key.type != DType::u4)
        throw std::invalid_argument("only keys and values of 4 bits have remainders");
}

}  // namespace pagemill
