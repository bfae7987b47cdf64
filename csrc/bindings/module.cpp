// Python's view of the kernels: the module, whose parts are in the files beside.
#include "bindings.h"

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace pagemill;

NB_MODULE(_kernels, m) {
    m.doc() =
        "CPU kernels. Arguments are arrays, or addresses, strides in elements and dtypes (0 fp32, 1 bf16, "
        "2 fp16).";
#if defined(NDEBUG)
    nb::set_leak_warnings(false);  // modules that still hold objects at exit are not cleared by the interpreter
#endif
    m.attr("interface") = PAGEMILL_INTERFACE;
    m.attr("sources") = PAGEMILL_SOURCES;
    bind_machine(m);
    bind_elementwise(m);
    bind_copies(m);
    bind_sampling(m);
    bind_linear(m);
    bind_adapters(m);
    bind_attention(m);
    bind_decoder(m);
}
