// Stages of a list of modules for Python: the strategies of a job that has some, in a step whose pieces
// Python computes (stages_step.h). Waits notice signals.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_stages(pybind11::module_& module);

}  // namespace weft::python
