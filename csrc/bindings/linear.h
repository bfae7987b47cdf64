// A packed weight as Python holds it.
#pragma once

#include "arguments.h"

#include "../decoder.h"
#include "../kernels.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>

namespace pagemill {

class Linear {
  public:
    const Kernels& set = kernels();  // the panels' format is this set's
    PackedLinear weight;

    Linear(const Input& values, const OptionalInput& bias, int x_type);
    Linear(const Input& values, const Input& scale, const Input& low, const OptionalInput& bias, int bits);
    Linear(const Input& values, const OptionalInput& slopes, const OptionalInput& offsets, const Input& scales,
           const OptionalInput& bias, int type);
    // From what `parts` has given, which is used where it lies.
    Linear(int64_t n, int64_t k, int format, int type, const std::vector<uint16_t>& exponents, const Input& panels,
           const OptionalInput& scales, const OptionalInput& bias, const OptionalInput& patches);
    ~Linear();
    Linear(const Linear&) = delete;

    operator Projection() const { return {&weight, &set}; }

    nb::tuple parts(const nb::object& self) const;
    void rows(const Input& ids, Address y) const;
    void call(Address x, int64_t x_row, Address y, int64_t y_row, int type, int64_t rows) const;
    void argmax(Address x, int64_t x_row, int type, const Output& tokens, const OptionalInput& bits,
                const OptionalInput& rows_of_bits) const;

  private:
    std::vector<Input> kept;  // in whose memory the weight lies; none: in its own

    Linear(const Input& values, Format format, DType type);

    template <class Pack> void pack(const Pack& pack);
    template <class T> T* part(const char* name, const OptionalInput& array, size_t bytes);
    void check_patches(const OptionalInput& patches, const PackedBytes& bytes);
    void check_blocks() const;
};

}  // namespace pagemill
