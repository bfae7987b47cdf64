// Compiled once per instruction set, with that set's flags and PAGEMILL_ISA naming it. All code lies in an anonymous
// namespace and no standard template is instantiated here, so that the linker can not merge it with another set's.
#include "../kernels.h"
#include "../memory.h"
#include "../threads.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace pagemill {
namespace {

template <class T> struct PointeeOf;
template <class T> struct PointeeOf<T*> { using type = T; };
template <class T> using Pointee = typename PointeeOf<T>::type;
template <int... I> struct Sequence {};
template <int N, int... I> struct UptoOf : UptoOf<N - 1, N - 1, I...> {};
template <int... I> struct UptoOf<0, I...> { using type = Sequence<I...>; };
template <int N> using Upto = typename UptoOf<N>::type;  // Sequence<0, ..., N - 1>

#include "simd.h"
#include "math.h"
#include "linear.h"
#include "elementwise.h"
#include "attention_tiles.h"
#include "attention_plan.h"
#include "attention.h"
#include "kv_write.h"
#include "sampling.h"

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)

constexpr Kernels table{NAME(PAGEMILL_ISA), pack_linear, linear, attend, write_kv, rms_norm, rotate, gated, embed, embed_packed, add_norm,
                        prepare_heads, choose_tokens, log_probabilities, exp_all, tanh_all};

}  // namespace

#define FUNCTION_OF(x) kernels_##x
#define FUNCTION(x) FUNCTION_OF(x)

const Kernels& FUNCTION(PAGEMILL_ISA)() { return table; }

}  // namespace pagemill
