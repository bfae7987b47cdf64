// The set below this one (PAGEMILL_BELOW), where it is compiled too. This set's CPUs have all of its instructions, so
// what further ones do not change is taken from it, with the same bits and speed, and not compiled again.
#pragma once

#include "../kernels.h"

#if defined(PAGEMILL_BELOW)
#define TABLE_OF_SET(set) kernels_##set
#define TABLE_OF(set) TABLE_OF_SET(set)

namespace pagemill {

const Kernels& TABLE_OF(PAGEMILL_BELOW)();
namespace {

inline const Kernels& below() { return TABLE_OF(PAGEMILL_BELOW)(); }

// FromBelow<&Kernels::rms_norm>::call is that set's rms_norm. A table has its address: tables are made by the compiler,
// since a CPU without a set's instructions must not run a line of it.
template <auto kernel> struct FromBelow;
template <class Result, class... Args, Result (*Kernels::*kernel)(Args...)> struct FromBelow<kernel> {
    static Result call(Args... args) { return (below().*kernel)(args...); }
};

}  // namespace
}  // namespace pagemill

// Sets that multiply otherwise than the one below, and do nothing else otherwise. The set with products of bf16 also
// rounds to it by an instruction.
#if defined(__AMX_BF16__) || !defined(__AVX512BF16__)
#define ONLY_PRODUCTS_DIFFER
#endif
#endif
