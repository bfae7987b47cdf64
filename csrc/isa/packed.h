// Weights in panels of neighbouring outputs, as linear layers read them (linear.h): how they are packed, and how rows come back.

constexpr int NR = 2 * W;  // outputs in a panel

// Two neighbouring k of one output, or of one row of x: what bf16 instructions take.
struct Pair { bf16 even, odd; };

#if defined(__AVX512BF16__)
constexpr bool kHasPairs = true;
#if defined(__AMX_BF16__)
constexpr int64_t kPairedStep = 32;  // a tile's
#else
constexpr int64_t kPairedStep = 2;
#endif

INLINE F load(const Pair* p) { return load((const float*)p); }
INLINE F multiply_add(F x, F w, F sum, const Pair*) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_castps_si512(x.v), (__m512bh)_mm512_castps_si512(w.v))};
}

#else
constexpr bool kHasPairs = false;
constexpr int64_t kPairedStep = 1;
#endif

template <class T> INLINE F multiply_add(F x, F w, F sum, const T*) { return fma(x, w, sum); }

// Length of a packed weight's rows: bf16 in pairs has zeros up to whole steps.
INLINE int64_t packed_k(const PackedLinear& weight) {
    return kHasPairs && weight.type == DType::bf16 ? (weight.k + kPairedStep - 1) / kPairedStep * kPairedStep : weight.k;
}

INLINE int64_t panels_of(const PackedLinear& weight) { return (weight.n + NR - 1) / NR; }

#if defined(__AMX_BF16__)
#include "coded.h"
#endif

// Padded with zeros to so many outputs; false: out of memory.
bool pack_bias(PackedLinear& packed, const float* bias, int64_t outputs) {
    if (!bias) return true;
    const size_t bytes = (outputs * sizeof(float) + 63) / 64 * 64;
    packed.bias = (float*)std::aligned_alloc(64, bytes);
    if (!packed.bias) return false;
    packed.bytes += bytes;
    std::memset(packed.bias, 0, bytes);
    std::memcpy(packed.bias, bias, packed.n * sizeof(float));
    return true;
}

#include "affine.h"

// k that lie side by side in a panel.
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
            for (int64_t j = begin; j < lesser(k, begin + kPackedTogether); ++j)
                out[(j / beside * NR + i) * beside + j % beside] = row[j];
        }
}

bool pack_panels(PackedLinear& packed, const void* weight, DType x) {
#if defined(__AMX_BF16__)
    const auto pack_pairs = [&](int64_t panel, bf16* out) { pack_panel(packed, weight, panel, out); };
    if (packed.type == DType::bf16 && x == DType::bf16 && pack_coded(packed, weight, pack_pairs)) return true;
#endif
    const int64_t panels = panels_of(packed), panel_size = NR * packed_k(packed);
    packed.bytes = (panels * panel_size * item_size(packed.type) + 4095) / 4096 * 4096;
    packed.panels = allocate_shared(packed.bytes);
    if (!packed.panels) return false;
    with_type(packed.type, [&](auto* t) {
        using T = Pointee<decltype(t)>;
        auto pack = [&](int64_t panel, int) { pack_panel(packed, weight, panel, (T*)packed.panels + panel * panel_size); };
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
        for (int64_t j = begin; j < begin + left; ++j) row[j - begin] = panel[(j / beside * NR + i) * beside + j % beside];
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
    with_type(packed.type, [&](auto* t) {
        with_type(type, [&](auto* u) {
            using T = Pointee<decltype(t)>;
            auto unpack = [&](int64_t token, int) {
                const int64_t row = ids[token];
                auto* out = (Pointee<decltype(u)>*)y + token * packed.k;
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
