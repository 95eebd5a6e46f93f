#include "region.h"

namespace weft::python {

namespace py = pybind11;

namespace {

py::buffer_info buffer_of(Region& region) {
  const bool wide = region.values.dtype == DType::float64;
  const auto item = static_cast<py::ssize_t>(wide ? sizeof(double) : sizeof(float));
  return {region.values.data,
          item,
          wide ? py::format_descriptor<double>::format() : py::format_descriptor<float>::format(),
          1,
          {static_cast<py::ssize_t>(region.values.count)},
          {item}};
}

}  // namespace

void bind_region(py::module_& module) {
  py::class_<Region>(module, "Region", py::buffer_protocol()).def_buffer(&buffer_of);
}

}  // namespace weft::python
