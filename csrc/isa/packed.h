// Weights in panels of neighbouring outputs, as linear layers read them (linear.h): how they are packed, and how rows
// come back. k that lie side by side in a panel.
#pragma once

#include "../memory.h"
#include "../threads.h"
#include "affine.h"
#include "coded.h"
#include "linear_tiles.h"
#include "simd.h"

namespace pagemill { namespace {

template <class T> constexpr int64_t kTogether = 1;
template <> constexpr int64_t kTogether<bf16> = kHasPairs ? 2 : 1;
constexpr int64_t kPackedTogether = 128;  // k: so much of a panel stays in the first-level cache for all its outputs

// A panel of a weight, padded with zeros.
template <class T> void pack_panel(const PackedLinear& packed, const void* weight, int64_t panel, T* out) {
    constexpr int64_t beside = kTogether<T>;
    const int64_t k = packed.k, padded = packed_k(packed), filled = lesser<int64_t>(NR, packed.n - panel * NR);
    if (filled < NR || padded > k) std::memset((void*)out, 0, NR * padded * sizeof(T));
    for (int64_t begin = 0; begin < k; begin += kPackedTogether)
        for (int64_t i = 0; i < filled; ++i) {
            const T* row = (const T*)weight + (panel * NR + i) * k;
            const int64_t end = lesser(k, begin + kPackedTogether), whole = end / beside * beside;
            T* to = out + (begin * NR + i * beside);
            for (int64_t j = begin; j < whole; j += beside, to += NR * beside)
                std::memcpy((void*)to, row + j, beside * sizeof(T));
            if (whole < end) *to = row[whole];
        }
}

PackedBytes bytes_of_panels(const PackedLinear& packed) {
    const int64_t panels = panels_of(packed), k = packed_k(packed);
    PackedBytes bytes{.panels = whole_pages(panels * NR * k * item_size(packed.type)), .bias = bias_bytes(panels * NR)};
    if (is_affine(packed)) bytes.panels = affine_bytes(packed);
#if defined(__AMX_BF16__)
    const int64_t steps = panels * k / kPairedStep;
    if (packed.format == Format::coded) {
        bytes.panels = steps * kCodedStepBytes;
        bytes.patches = (steps + 1) * sizeof(uint32_t);
    }
#endif
    return bytes;
}

bool pack_panels(PackedLinear& packed, const void* weight, DType x) {
#if defined(__AMX_BF16__)
    const auto pack_pairs = [&](int64_t panel, bf16* out) { pack_panel(packed, weight, panel, out); };
    if (packed.type == DType::bf16 && x == DType::bf16 && pack_coded(packed, weight, pack_pairs)) return true;
#endif
    const int64_t panels = panels_of(packed), panel_size = NR * packed_k(packed);
    packed.bytes = bytes_of_panels(packed).panels;
    packed.panels = allocate_shared(packed.bytes);
    if (!packed.panels) return false;
    with_type(packed.type, [&]<class T>(T*) {
        auto pack = [&](int64_t panel, int) {
            pack_panel(packed, weight, panel, (T*)packed.panels + panel * panel_size);
        };
        parallel(panels, pack);
    });
    return true;
}

bool pack_linear(PackedLinear& packed, const void* weight, const float* bias, DType x) {
    return pack_panels(packed, weight, x) && pack_bias(packed, bias, panels_of(packed) * NR);
}

// Elements [0, count) of output i's row, of a panel or of its beginning, times `scale`.
template <class T, class Y> void embed_row(const T* panel, int64_t i, int64_t count, float scale, Y* y) {
    constexpr int64_t beside = kTogether<T>;
    for (int64_t begin = 0; begin < count; begin += W) {
        const int64_t left = lesser<int64_t>(W, count - begin);
        T row[W] = {};
        for (int64_t j = begin; j < begin + left; ++j)
            row[j - begin] = panel[(j / beside * NR + i) * beside + j % beside];
        store_upto(y + begin, load(row) * broadcast(scale), left);
    }
}

#if defined(__AMX_BF16__)
template <class Y> void embed_coded(const PackedLinear& packed, int64_t row, float scale, Y* y) {
    Decoder decoder(packed, row / NR);
    for (int64_t begin = 0; begin < packed.k; begin += kPairedStep) {
        alignas(64) bf16 step[kStepBytes / 2];
        decoder.steps((char*)step, 1);
        embed_row(step, row % NR, lesser(kPairedStep, packed.k - begin), scale, y + begin);
    }
}
#endif

void embed_packed(const PackedLinear& packed, const int64_t* ids, float scale, void* y, DType type, int64_t tokens) {
    with_type(packed.type, [&]<class T>(T*) {
        with_type(type, [&]<class Y>(Y*) {
            auto unpack = [&](int64_t token, int) {
                const int64_t row = ids[token];
                Y* out = (Y*)y + token * packed.k;
#if defined(__AMX_BF16__)
                if (packed.format == Format::coded) return embed_coded(packed, row, scale, out);
#endif
                if (is_affine(packed)) return embed_affine(packed, row, scale, out);
                embed_row((const T*)packed.panels + row / NR * NR * packed_k(packed), row % NR, packed.k, scale, out);
            };
            parallel(tokens, unpack);
        });
    });
}

}}  // namespace pagemill
