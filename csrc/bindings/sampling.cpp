// What logits allow, and tokens chosen from them.
#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"

#include <cstdint>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>  // IWYU pragma: keep

namespace pagemill {
namespace {

void mask(const Output& logits, const Input& places, const OptionalInput& bits, const OptionalInput& rows_of_bits) {
    const auto items = int64_t(places.size());
    const MaskArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                        .n = int64_t(logits.shape(1)),
                        .places = elements<int64_t>("places", places, {items}),
                        .items = items,
                        .allowed = allowed_outputs(bits, rows_of_bits, int64_t(logits.shape(1)), items)};
    Run run;
    kernels().mask_logits(args);
}

// Sampling's inputs [items] each, from rows `places` of logits [rows, n].
void choose(const Input& logits, const Input& places, const Input& temperature, const Input& top_k, const Input& top_p,
            const Input& min_p, const Input& uniforms, const Output& tokens) {
    const auto items = int64_t(places.size());
    const ChooseArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                          .n = int64_t(logits.shape(1)),
                          .places = elements<int64_t>("places", places, {items}),
                          .items = items,
                          .temperature = elements<float>("temperature", temperature, {items}),
                          .top_k = elements<int64_t>("top_k", top_k, {items}),
                          .top_p = elements<float>("top_p", top_p, {items}),
                          .min_p = elements<float>("min_p", min_p, {items}),
                          .uniforms = elements<double>("uniforms", uniforms, {items}),
                          .tokens = elements<int64_t>("tokens", tokens, {items})};
    Run run;
    kernels().choose_tokens(args);
}

void log_probabilities(const Input& logits, const Input& places, const Input& tokens, const Output& own,
                       const Output& ranks, const Output& top_tokens, const Output& top_logprobs) {
    const auto items = int64_t(places.size());
    LogprobArgs args{.logits = elements<float>("logits", logits, {kAny, kAny}),
                     .n = int64_t(logits.shape(1)),
                     .places = elements<int64_t>("places", places, {items}),
                     .items = items,
                     .tokens = elements<int64_t>("tokens", tokens, {items}),
                     .own = elements<float>("own", own, {items}),
                     .ranks = elements<int64_t>("ranks", ranks, {items}),
                     .top_tokens = elements<int64_t>("top_tokens", top_tokens, {items, kAny})};
    args.k = int64_t(top_tokens.shape(1));
    args.top_logprobs = elements<float>("top_logprobs", top_logprobs, {items, args.k});
    if (args.k > args.n)
        throw std::invalid_argument("top_tokens has " + std::to_string(args.k) + " columns, logits have " +
                                    std::to_string(args.n));
    Run run;
    kernels().log_probabilities(args);
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("mask_logits", &mask);
    m.def("choose_tokens", &choose);
    m.def("log_probabilities", &log_probabilities);
}

}  // namespace pagemill
