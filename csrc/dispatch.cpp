#include "kernels.h"
#include "threads.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace pagemill {

const Kernels& kernels_generic();
#if defined(__x86_64__)
const Kernels& kernels_avx2();
const Kernels& kernels_avx512();
#endif

namespace {

struct Available {
    const Kernels* sets[4] = {};
    const char* names[4] = {};
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
        if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
            add(kernels_avx512());
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

const Kernels& kernels() { return *current(); }

const char* const* available_isas() { return available().names; }

bool use_isa(const char* name) {
    const Kernels* set = find(name);
    if (set) current() = set;
    return set != nullptr;
}

void release(PackedLinear& weight) {
    std::free(weight.panels);
    std::free(weight.bias);
    weight.panels = nullptr;
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
