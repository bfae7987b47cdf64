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

// body(Count<n>) for n of 1 .. N, with Upto<N>.
template <int N> struct Count { static constexpr int value = N; };
template <int... I, class Body> inline __attribute__((always_inline)) void with_count(int n, Sequence<I...>, Body&& body) {
    ((n == I + 1 ? body(Count<I + 1>{}) : void()), ...);
}

#include "simd.h"
#include "math.h"
#include "likeliest.h"
#include "packed.h"
#include "linear.h"
#include "quantized.h"
#include "elementwise.h"
#include "attention_tiles.h"
#include "attention_plan.h"
#include "attention_vectors.h"
#if defined(__AVX512BF16__)
#include "attention_weights.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#else
#include "attention_dots.h"
#endif
#include "attention_pairs.h"
#include "attention_tiled.h"
#endif
#include "attention.h"
#include "kv_write.h"
#include "sampling.h"

#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)

// As integers; linear.h takes the others.
bool quantized(const PackedLinear& weight) { return weight.format == Format::int8 || weight.format == Format::int4; }

void linear_of_any_format(const PackedLinear& weight, const void* x, int64_t x_row, void* y, int64_t y_row, DType type,
                          int64_t m) {
    if (m <= 0) return;
    if (quantized(weight)) linear_quantized(weight, x, x_row, y, y_row, type, m);
    else linear(weight, x, x_row, y, y_row, type, m);
}

void linear_likeliest(const PackedLinear& weight, const void* x, int64_t x_row, DType type, int64_t m, int64_t* tokens) {
    if (m <= 0) return;
    Likeliest likeliest{tokens, type};
    if (quantized(weight)) linear_quantized(weight, x, x_row, nullptr, 0, type, m, &likeliest);
    else linear(weight, x, x_row, nullptr, 0, type, m, &likeliest);
}

void embed_any_format(const PackedLinear& packed, const int64_t* ids, float scale, void* y, DType type, int64_t tokens) {
    if (quantized(packed)) embed_quantized(packed, ids, scale, y, type, tokens);
    else embed_packed(packed, ids, scale, y, type, tokens);
}

constexpr Kernels table{NAME(PAGEMILL_ISA), pack_linear, pack_quantized, pack_affine, linear_of_any_format, linear_likeliest, mlp, attend, write_kv,
                        rms_norm, rotate, gated, embed, embed_any_format, add_norm, prepare_heads, choose_tokens, log_probabilities,
                        exp_all, tanh_all};

}  // namespace

#define FUNCTION_OF(x) kernels_##x
#define FUNCTION(x) FUNCTION_OF(x)

const Kernels& FUNCTION(PAGEMILL_ISA)() { return table; }

}  // namespace pagemill
