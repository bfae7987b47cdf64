#include "kernels.h"
#include "memory.h"
#include "threads.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#include <sys/types.h>
#endif

namespace pagemill {

// PAGEMILL_SETS: SET(name) for each instruction set that there are kernels for.
#define SET(name) const Kernels& kernels_##name();
PAGEMILL_SETS
#undef SET

namespace {

#if defined(__x86_64__) && defined(__linux__)
// Tiles with products of bf16 and of int8: the CPU has them, the system saves their state, and it lets this process use
// them, which has to be asked for (once for all threads, present and future).
bool amx_bf16() {
#if defined(PAGEMILL_SOFTWARE_TILES)
    return true;
#endif
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

#if defined(__aarch64__)
struct ArmFeatures {
    bool dotprod = false, i8mm = false, bf16 = false;

    ArmFeatures() {
#if defined(__linux__)
        constexpr unsigned long kDotProd = 1ul << 20, kI8mm = 1ul << 13, kBf16 = 1ul << 14;  // of asm/hwcap.h
        dotprod = getauxval(AT_HWCAP) & kDotProd;
        i8mm = getauxval(AT_HWCAP2) & kI8mm;
        bf16 = getauxval(AT_HWCAP2) & kBf16;
#elif defined(__APPLE__)
        const auto has = [](const char* name) {
            int value = 0;
            size_t size = sizeof value;
            return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
        };
        dotprod = has("hw.optional.arm.FEAT_DotProd");
        i8mm = has("hw.optional.arm.FEAT_I8MM");
        bf16 = has("hw.optional.arm.FEAT_BF16");
#endif
    }
};
#endif

// The sets that this CPU has, best first.
std::vector<const Kernels*> find_available() {
    std::vector<const Kernels*> found;
#define SET(name) &kernels_##name(),
    const Kernels* const all[] = {PAGEMILL_SETS};
#undef SET
    const auto add = [&](const std::string& name) {
        for (const Kernels* set : all)
            if (name == set->isa) found.push_back(set);
    };
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
#if defined(__linux__)
    if (bf16 && amx_bf16()) add("amx_bf16");
#endif
    // Intel's cores multiply pairs at half the rate of fp32, AMD's at twice.
    const bool slow_pairs = __builtin_cpu_is("intel");
    if (bf16 && !slow_pairs) add("avx512_bf16");
    if (vnni) add("avx512_vnni");
    if (avx512) add("avx512");
    if (bf16 && slow_pairs) add("avx512_bf16");
    if (avx2) add("avx2");
#elif defined(__aarch64__)
    const ArmFeatures cpu;
    if (cpu.dotprod && cpu.i8mm && cpu.bf16) add("neon_bf16");
    if (cpu.dotprod) add("neon_dotprod");
#endif
    add("generic");
    return found;
}

const std::vector<const Kernels*>& available() {
    static const std::vector<const Kernels*> sets = find_available();
    return sets;
}

const Kernels* find(const std::string& name) {
    for (const Kernels* set : available())
        if (name == set->isa) return set;
    return nullptr;
}

const Kernels*& current() {
    static const Kernels* chosen = [] {
        const char* asked = std::getenv("PAGEMILL_ISA");
        const Kernels* set = asked ? find(asked) : nullptr;
        return set ? set : available().at(0);
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

// Zen 4 and Zen 5 read one stream faster if nothing of it is fetched ahead.
const bool foresees_streams = [] {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
#else
    return false;
#endif
}();

const Kernels& kernels() { return *current(); }

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels* set : available()) names.emplace_back(set->isa);
    return names;
}

bool use_isa(const std::string& name) {
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

void copy_records(void* const* targets, const void* const* sources, int64_t count, int64_t bytes) {
    constexpr int64_t kPart = 256 << 10;  // so that few long records keep all threads busy
    const int64_t parts = (bytes + kPart - 1) / kPart;
    auto copy = [&](int64_t i, int) {
        const int64_t record = i / parts, begin = i % parts * kPart;
        std::memcpy(static_cast<char*>(targets[record]) + begin, static_cast<const char*>(sources[record]) + begin,
                    std::min(kPart, bytes - begin));
    };
    parallel(count * parts, copy);
}

}  // namespace pagemill
