// bf16 weights in 12 bits, without loss, for tiles: sign and mantissa as they are, and instead of the exponent a code
// of 4 bits, one of the 16 exponents that the weight has most. The few weights with another one are patched after
// decoding. What lies in memory is a quarter less, and so is the time of reading it. Panels are those of pairs, cut
// into steps of 32 k; a step is decoded to where tile products read it as if it had lain there.
#pragma once

#include "../memory.h"
#include "../threads.h"
#include "linear_tiles.h"
#include "simd.h"

#include <cstdlib>

#if defined(__AMX_BF16__)
namespace pagemill { namespace {

constexpr int64_t kStepBytes = 32 * NR * 2;  // of a panel of pairs: 16 lines of two tiles, which lie beside each other
constexpr int64_t kLineBytes = NR * 2 * 2;
constexpr int64_t kUnits = 8;  // in a coded step; a unit is 4 lines of a tile
constexpr int64_t kUnitBytes = 3 * 64, kCodedStepBytes = kUnits * kUnitBytes;
constexpr int64_t kMostPatches = 4;  // per step of a panel, on average: a weight with more is held as it is
constexpr int kCodes = 16;

// A unit has a line of words that hold the codes of its 4 lines, the first one's in the lowest bits; then, for each two
// lines, a line with sign and mantissa of the first where bf16 has them, and those of the second where the first has
// its exponent, bytes exchanged.
INLINE __m512i sign_and_mantissa() { return _mm512_set1_epi16(int16_t(0x807f)); }
INLINE __m512i exchange_bytes(__m512i words) { return _mm512_shldi_epi16(words, words, 8); }

INLINE int64_t unit_place(int64_t unit) { return unit / 4 * 64 + unit % 4 * 4 * kLineBytes; }

INLINE __m512i decode_line(__m512i signs, __m512i codes, __m512i exponents) {
    constexpr int kSelectedOr = 0xea;  // first & second | third
    return _mm512_ternarylogic_epi64(signs, sign_and_mantissa(), _mm512_permutexvar_epi16(codes, exponents),
                                     kSelectedOr);
}

// Decodes the steps of a panel in their order, unit by unit.
struct Decoder {
    const char* from;
    const uint32_t *begins, *patches;
    __m512i exponents;  // twice, as a fifth bit of the index is another code's

    Decoder(const PackedLinear& weight, int64_t panel) {
        const int64_t steps = packed_k(weight) / kPairedStep, all = panels_of(weight) * steps;
        from = (const char*)weight.panels + panel * steps * kCodedStepBytes;
        begins = weight.patches + panel * steps;
        patches = weight.patches + all + 1;
        exponents = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)weight.exponents));
    }

    INLINE void unit(char* to) {
        const __m512i codes = _mm512_load_si512(from), a = _mm512_load_si512(from + 64),
                      b = _mm512_load_si512(from + 128);
        _mm512_store_si512(to, decode_line(a, codes, exponents));
        _mm512_store_si512(to + kLineBytes, decode_line(exchange_bytes(a), _mm512_srli_epi16(codes, 4), exponents));
        _mm512_store_si512(to + 2 * kLineBytes, decode_line(b, _mm512_srli_epi16(codes, 8), exponents));
        _mm512_store_si512(to + 3 * kLineBytes,
                           decode_line(exchange_bytes(b), _mm512_srli_epi16(codes, 12), exponents));
        from += kUnitBytes;
        __asm__ volatile("" ::: "memory");  // the tile intrinsics do not tell the compiler what they read
    }

    // After the last unit of a step.
    INLINE void patch(char* step) {
        for (uint32_t i = begins[0]; i < begins[1]; ++i) {
            const uint16_t value = uint16_t(patches[i]);
            std::memcpy(step + (patches[i] >> 16), &value, sizeof value);
        }
        ++begins;
        __asm__ volatile("" ::: "memory");
    }

    void steps(char* to, int64_t count) {
        for (; count > 0; --count, to += kStepBytes) {
            for (int64_t u = 0; u < kUnits; ++u) unit(to + unit_place(u));
            patch(to);
        }
    }
};

// The most frequent exponents among every so many weights, where bf16 has them; that of zeros too, if panels are
// padded.
void choose_exponents(const uint16_t* weights, int64_t n, int64_t k, uint16_t* exponents) {
    constexpr int64_t kSeen = 65536;
    int64_t found[256] = {};
    if (n % NR || k % kPairedStep) found[0] = kSeen;
    const int64_t count = n * k, every = (count / kSeen) | 1;
    for (int64_t i = 0; i < count; i += every) ++found[weights[i] >> 7 & 255];
    for (int code = 0; code < kCodes; ++code) {
        int most = 0;
        for (int e = 1; e < 256; ++e)
            if (found[e] > found[most]) most = e;
        exponents[code] = uint16_t(most << 7);
        found[most] = -1;
    }
}

// Codes a step of a panel of pairs. Returns how many patches it takes (place in bytes << 16 | weight), of which the
// first `room` are written.
int64_t encode_step(const char* step, const uint16_t* exponents, char* to, uint32_t* patches, int64_t room) {
    int64_t count = 0;
    for (int64_t u = 0; u < kUnits; ++u, to += kUnitBytes) {
        __m512i codes = _mm512_setzero_si512(), signs[4];
        for (int i = 0; i < 4; ++i) {
            const int64_t at = unit_place(u) + i * kLineBytes;
            const __m512i line = _mm512_loadu_si512(step + at);
            const __m512i exponent = _mm512_and_si512(line, _mm512_set1_epi16(0x7f80));
            __m512i code = _mm512_setzero_si512();
            __mmask32 coded = 0;
            for (int c = 0; c < kCodes; ++c) {
                const __mmask32 equal = _mm512_cmpeq_epi16_mask(exponent, _mm512_set1_epi16(int16_t(exponents[c])));
                code = _mm512_mask_mov_epi16(code, equal, _mm512_set1_epi16(int16_t(c)));
                coded |= equal;
            }
            codes = _mm512_or_si512(codes, _mm512_sllv_epi16(code, _mm512_set1_epi16(int16_t(4 * i))));
            signs[i] = _mm512_and_si512(line, sign_and_mantissa());
            for (__mmask32 others = ~coded; others; others &= others - 1, ++count) {
                const int64_t place = at + 2 * __builtin_ctz(others);
                uint16_t value;
                std::memcpy(&value, step + place, sizeof value);
                if (count < room) patches[count] = uint32_t(place) << 16 | value;
            }
        }
        _mm512_storeu_si512(to, codes);
        _mm512_storeu_si512(to + 64, _mm512_or_si512(signs[0], exchange_bytes(signs[1])));
        _mm512_storeu_si512(to + 128, _mm512_or_si512(signs[2], exchange_bytes(signs[3])));
    }
    return count;
}

// Codes a bf16 weight, whose panels of pairs pack_panel(panel, out) makes. false: it takes too many patches, or there
// is no memory; nothing is kept then.
template <class PackPanel> bool pack_coded(PackedLinear& packed, const void* weight, const PackPanel& pack_panel) {
    const int64_t panels = panels_of(packed), steps = packed_k(packed) / kPairedStep, all = panels * steps;
    const int64_t room = steps * kMostPatches;
    choose_exponents((const uint16_t*)weight, packed.n, packed.k, packed.exponents);
    uint32_t* found = (uint32_t*)std::malloc(panels * room * sizeof(uint32_t));  // a panel's from panel * room on
    uint32_t* patches = (uint32_t*)std::malloc((all + 1 + panels * room) * sizeof(uint32_t));
    char* coded = (char*)allocate_shared(all * kCodedStepBytes);
    bool fits = found && patches && coded;
    auto pack = [&](int64_t panel, int thread) {
        char* pairs = (char*)thread_scratch(thread, steps * kStepBytes);
        pack_panel(panel, (bf16*)pairs);
        int64_t count = 0;
        for (int64_t s = panel * steps; s < (panel + 1) * steps && count <= room; ++s, pairs += kStepBytes) {
            const int64_t more = encode_step(pairs, packed.exponents, coded + s * kCodedStepBytes,
                                             found + panel * room + count, room - count);
            patches[s + 1] = uint32_t(more);
            count += more;
        }
        if (count > room) __atomic_store_n(&fits, false, __ATOMIC_RELAXED);
    };
    if (fits) parallel(panels, pack);
    if (fits) {
        patches[0] = 0;
        for (int64_t s = 0; s < all; ++s) patches[s + 1] += patches[s];
        for (int64_t panel = 0; panel < panels; ++panel) {
            const uint32_t begin = patches[panel * steps], end = patches[(panel + 1) * steps];
            std::memcpy(patches + all + 1 + begin, found + panel * room, (end - begin) * sizeof(uint32_t));
        }
        const size_t bytes = (all + 1 + patches[all]) * sizeof(uint32_t);
        packed.format = Format::coded;
        packed.panels = coded;
        void* const shorter = std::realloc(patches, bytes);
        packed.patches = shorter ? (uint32_t*)shorter : patches;
        packed.bytes = all * kCodedStepBytes + bytes;
    } else {
        std::free(patches);
        if (coded) release_shared(coded);
    }
    std::free(found);
    return fits;
}

}}  // namespace pagemill
#endif
