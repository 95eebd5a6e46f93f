// Sharded tables for Python: weft::HybridEmbedding in a step whose loop is the user's. The table of moves is
// pushed: by layers that read rows, by the optimizer that hands over their gradients. Waits notice signals.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_tables(pybind11::module_& module);

}  // namespace weft::python
