#include "kernels.h"
#include "memory.h"
#include "threads.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(PAGEMILL_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagemill {

const Kernels& kernels_generic();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
const Kernels& kernels_avx512_vnni();
const Kernels& kernels_avx512_bf16();
#if defined(PAGEMILL_AMX)
const Kernels& kernels_amx_bf16();
#endif
#endif

namespace {

#if defined(PAGEMILL_AMX)
// Tiles with products of bf16 and of int8: the CPU has them, the system saves their state, and it lets this process use
// them, which has to be asked for (once for all threads, present and future).
bool amx_bf16() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, kBf16 = 1u << 22, kTileState = 3u << 17;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (kTile | kInt8 | kBf16)) != (kTile | kInt8 | kBf16))
        return false;
    unsigned low = 0, high = 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));  // the caller has checked AVX-512, hence that this exists
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
    return (low & kTileState) == kTileState && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

struct Available {
    static constexpr int kMost = 6;
    const Kernels* sets[kMost] = {};
    const char* names[kMost + 1] = {};
    int count = 0;

    void add(const Kernels& set) {
        sets[count] = &set;
        names[count++] = set.isa;
    }

    Available() {
#if defined(__x86_64__)
        __builtin_cpu_init();
        unsigned a = 0, b = 0, c = 0, d = 0;
        const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
        const bool avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
        const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
        const bool bytes = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
        const bool bf16 = vnni && bytes && __builtin_cpu_supports("avx512bf16");
#if defined(PAGEMILL_AMX)
        if (bf16 && amx_bf16()) add(kernels_amx_bf16());
#endif
        // Intel's cores multiply pairs at half the rate of fp32, AMD's at twice.
        const bool slow_pairs = __builtin_cpu_is("intel");
        if (bf16 && !slow_pairs) add(kernels_avx512_bf16());
        if (vnni) add(kernels_avx512_vnni());
        if (avx512) add(kernels_avx512());
        if (bf16 && slow_pairs) add(kernels_avx512_bf16());
        if (avx2) add(kernels_avx2());
#endif
        add(kernels_generic());
    }
};

const Available& available() {
    static const Available instance;
    return instance;
}

const Kernels* find(const char* name) {
    for (int i = 0; i < available().count; ++i)
        if (!std::strcmp(available().names[i], name)) return available().sets[i];
    return nullptr;
}

const Kernels*& current() {
    static const Kernels* chosen = [] {
        const char* asked = std::getenv("PAGEMILL_ISA");
        const Kernels* set = asked ? find(asked) : nullptr;
        return set ? set : available().sets[0];
    }();
    return chosen;
}

}  // namespace

// Zen 4 reads a quarter more that way, Zen 5 less.
const bool fetches_to_second_level = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amdfam19h") && __builtin_cpu_supports("avx512f");
#else
    return false;
#endif
}();

const Kernels& kernels() { return *current(); }

const char* const* available_isas() { return available().names; }

bool use_isa(const char* name) {
    const Kernels* set = find(name);
    if (set) current() = set;
    return set != nullptr;
}

void release(PackedLinear& weight) {
    release_shared(weight.panels);
    release_shared(weight.scales);
    std::free(weight.patches);
    std::free(weight.bias);
    weight.panels = nullptr;
    weight.scales = nullptr;
    weight.patches = nullptr;
    weight.bias = nullptr;
}

void copy_frames(void* base, int64_t pieces, int64_t piece_stride, int64_t frame_stride, int64_t bytes,
                 const int64_t* source, const int64_t* target, int64_t count) {
    auto copy = [&](int64_t i, int) {
        char* piece = static_cast<char*>(base) + i * piece_stride;
        for (int64_t j = 0; j < count; ++j)
            std::memcpy(piece + target[j] * frame_stride, piece + source[j] * frame_stride, bytes);
    };
    parallel(pieces, copy);
}

}  // namespace pagemill
