// weft's three kinds of errors as Python exceptions: weft.UsageError (also a ValueError), weft.TransportError
// (kind, peer) and weft.TimeoutError (peer, seconds; also Python's own TimeoutError), all of them weft.Error,
// which is a RuntimeError.
#pragma once

#include <pybind11/pybind11.h>

namespace weft::python {

void bind_errors(pybind11::module_& module);

}  // namespace weft::python
