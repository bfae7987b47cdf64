// Weights rounded to 8 bits as they are loaded, for quantized.h.
#pragma once

#include "../threads.h"
#include "quantized_panels.h"
#include "simd.h"

namespace pagemill { namespace {

// A scale is a 127th of its group's largest magnitude, in bf16, rounded up, so that no value exceeds 127 scales.
template <class T> void round_row(const T* x, int64_t k, int8_t* values, uint16_t* scales) {
    for (int64_t first = 0; first < k; first += kGroupK) {
        const int64_t length = lesser<int64_t>(kGroupK, k - first);
        F most = zero();
        for_vectors(length, [&](int64_t i, auto part) { most = max(most, abs(part.load(x + first + i))); });
        const uint32_t scale = (bits_of(maximum(most) * (1.0f / 127)) + 0xffff) >> 16;
        const float wide = float_of(scale << 16);
        const F inverse = broadcast(wide > 0 ? 1 / wide : 0);
        for_vectors(length, [&](int64_t i, auto part) {
            part.store(values + first + i, part.load(x + first + i) * inverse);
        });
        scales[first / kGroupK] = uint16_t(scale);
    }
}

void quantize_int8(const void* weight, DType type, int64_t n, int64_t k, int8_t* values, uint16_t* scales) {
    const int64_t groups = groups_of(steps_of(k));
    with_type(type, [&]<class T>(T*) {
        auto round = [&](int64_t row, int) {
            round_row((const T*)weight + row * k, k, values + row * k, scales + row * groups);
        };
        parallel(n, round);
    });
}

}}  // namespace pagemill
