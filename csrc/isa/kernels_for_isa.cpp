// Compiled once per instruction set, with that set's flags and PAGEMILL_ISA naming it. All code lies in an anonymous
// namespace and no standard template is instantiated here, so that the linker cannot merge it with another set's.
#include "../kernels.h"
#include "attention.h"
#include "below.h"
#include "linear.h"
#include "linear_tiles.h"
#include "packed.h"
#include "quantized.h"
#if !defined(ONLY_PRODUCTS_DIFFER)
#include "elementwise.h"
#include "kv_write.h"
#include "low_rank.h"
#include "round_weights.h"
#include "sampling.h"
#include "stored_weights.h"
#endif

namespace pagemill {
namespace {

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

void linear_argmax(const PackedLinear& weight, const void* x, int64_t x_row, DType type, int64_t m,
                   const AllowedOutputs& allowed, int64_t* tokens) {
    if (m <= 0) return;
    Argmax argmax{tokens, type, allowed};
    if (quantized(weight)) linear_quantized(weight, x, x_row, nullptr, 0, type, m, &argmax);
    else linear(weight, x, x_row, nullptr, 0, type, m, &argmax);
}

void embed_any_format(const PackedLinear& packed, const int64_t* ids, float scale, void* y, DType type,
                      int64_t tokens) {
    if (quantized(packed)) embed_quantized(packed, ids, scale, y, type, tokens);
    else embed_packed(packed, ids, scale, y, type, tokens);
}

PackedBytes packed_bytes(const PackedLinear& weight) {
    return quantized(weight) ? quantized_bytes(weight) : bytes_of_panels(weight);
}

#if defined(ONLY_PRODUCTS_DIFFER)
#define SHARED(kernel, own) .kernel = FromBelow<&Kernels::kernel>::call
#else
#define SHARED(kernel, own) .kernel = own
#endif

constexpr Kernels table{.isa = NAME(PAGEMILL_ISA),
                        .pack_linear = pack_linear,
                        .pack_quantized = pack_quantized,
                        SHARED(quantize_int8, quantize_int8),
                        SHARED(dequantize, dequantize),
                        SHARED(stored_bytes, stored_bytes),
                        SHARED(round_stored, round_stored),
                        SHARED(keep_int4, keep_int4),
                        .pack_affine = pack_affine,
                        .packed_bytes = packed_bytes,
                        .linear = linear_of_any_format,
                        .linear_argmax = linear_argmax,
                        .mlp = mlp,
                        SHARED(add_low_rank, add_low_rank),
                        .attend = attend,
                        SHARED(write_kv, write_kv),
                        SHARED(rms_norm, rms_norm),
                        SHARED(rotate, rotate),
                        SHARED(gated, gated),
                        SHARED(embed, embed),
                        .embed_packed = embed_any_format,
                        SHARED(add_norm, add_norm),
                        SHARED(prepare_heads, prepare_heads),
                        SHARED(mask_logits, mask_logits),
                        SHARED(choose_tokens, choose_tokens),
                        SHARED(log_probabilities, log_probabilities),
                        SHARED(widen, widen),
                        SHARED(exp, exp_all),
                        SHARED(tanh, tanh_all)};

}  // namespace

#define FUNCTION_OF(x) kernels_##x
#define FUNCTION(x) FUNCTION_OF(x)

const Kernels& FUNCTION(PAGEMILL_ISA)() { return table; }

}  // namespace pagemill
