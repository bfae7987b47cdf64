// What lies between matrix products.
#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"

#include <cstdint>

#include <nanobind/nanobind.h>

namespace pagemill {

void bind_elementwise(nb::module_& m) {
    m.def("rms_norm", [](Address x, int64_t x_outer, int64_t x_inner, Address weight, float eps, Address y, int type,
                         int64_t outer, int64_t inner, int64_t n) {
        Run run;
        kernels().rms_norm(at<void>(x), x_outer, x_inner, at<float>(weight), eps, at<void>(y), dtype(type), outer,
                           inner, n);
    });
    m.def("rotate", [](Address x, int64_t x_token, int64_t x_head, int type, Address cos, Address sin, int64_t tokens,
                       int64_t heads, int64_t half) {
        Run run;
        kernels().rotate(at<void>(x), x_token, x_head, dtype(type), at<float>(cos), at<float>(sin), tokens, heads,
                         half);
    });
    m.def("gated", [](Address x, int64_t x_row, Address y, int type, int activation, int64_t rows, int64_t n) {
        Run run;
        kernels().gated(at<void>(x), x_row, at<void>(y), dtype(type), static_cast<Activation>(activation), rows, n);
    });
    m.def("widen", [](Address x, int type, float soft_cap, Address y, int64_t n) {
        Run run;
        kernels().widen(at<void>(x), dtype(type), soft_cap, at<float>(y), n);
    });
    m.def("exp", [](Address x, Address y, int64_t n) { kernels().exp(at<float>(x), at<float>(y), n); });
    m.def("tanh", [](Address x, Address y, int64_t n) { kernels().tanh(at<float>(x), at<float>(y), n); });
}

}  // namespace pagemill
