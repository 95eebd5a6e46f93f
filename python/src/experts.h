// Layers of experts for Python: weft::Experts in a step whose loop is the user's. The block's moves are pushed by the
// layer's forward and by autograd's backward (experts_step.h). Waits notice signals.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_experts(pybind11::module_& module);

}  // namespace weft::python
