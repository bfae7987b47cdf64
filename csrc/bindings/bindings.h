// Each file beside adds its subject to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace pagemill {

void bind_machine(nanobind::module_& m);
void bind_elementwise(nanobind::module_& m);
void bind_copies(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_linear(nanobind::module_& m);
void bind_adapters(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);

}  // namespace pagemill
