// weft._weft: the core for Python. It knows nothing of torch: tensors come as address, number of elements and
// type, so that one build serves every version of torch. What users call is in python/weft.
#include <pybind11/pybind11.h>

#include "data_parallel.h"
#include "errors.h"
#include "experts.h"
#include "region.h"
#include "session.h"
#include "stages.h"
#include "tables.h"

PYBIND11_MODULE(_weft, module) {
  module.doc() = "weft's core; use the package `weft`.";
  module.attr("__version__") = WEFT_VERSION;
  weft::python::bind_errors(module);
  weft::python::bind_session(module);
  weft::python::bind_region(module);
  weft::python::bind_data_parallel(module);
  weft::python::bind_tables(module);
  weft::python::bind_experts(module);
  weft::python::bind_stages(module);
}
