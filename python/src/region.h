// Memory of the core that Python reads and writes in place, by the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "weft/dtype.h"

namespace weft::python {

struct Region {
  std::shared_ptr<void> owner;  // the memory lives as long as this
  Dense values;                 // float32 or float64
};

void bind_region(pybind11::module_& module);

}  // namespace weft::python
