// weft::DataParallel for Python, one strategy in a step whose loop is the user's: the table of moves is
// pushed by what autograd's hooks see. They say "gradient ready" and "backward ended"; everything else of a
// step is the table's. Waits notice signals.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_data_parallel(pybind11::module_& module);

}  // namespace weft::python
