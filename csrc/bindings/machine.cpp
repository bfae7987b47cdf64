// The instruction set whose kernels run, and their threads.
#include "arguments.h"
#include "bindings.h"

#include "../kernels.h"
#include "../threads.h"

#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>  // IWYU pragma: keep
#include <nanobind/stl/vector.h>  // IWYU pragma: keep

namespace pagemill {

void bind_machine(nb::module_& m) {
    m.def("isa", [] { return std::string(kernels().isa); }, "Name of the instruction set whose kernels run.");
    m.def("available_isas", &available_isas, "Instruction sets of this CPU that there are kernels for, best first.");
    m.def(
        "use_isa",
        [](const std::string& name) {
            if (!use_isa(name)) throw std::invalid_argument("this CPU has no kernels named " + name);
        },
        "Makes another set's kernels run; weights packed before keep theirs.");
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", [](int count) {
        if (count < 1) throw std::invalid_argument("num_threads must be at least 1, not " + std::to_string(count));
        Run run;
        set_num_threads(count);
    });
}

}  // namespace pagemill
