// weft::DataParallel for Python: gradients by address, waits that notice signals, memory that stays until it
// is no longer read. The calls and their order are those of data_parallel/data_parallel.h.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_gradients(pybind11::module_& module);

}  // namespace weft::python
