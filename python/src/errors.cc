#include "errors.h"

#include <string>
#include <string_view>

#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

// Of the process, as the interpreter's own exceptions are: a translator has no place for anything else.
struct Classes {
  PyObject* error = nullptr;
  PyObject* usage = nullptr;
  PyObject* transport = nullptr;
  PyObject* timeout = nullptr;
};
Classes classes;

PyObject* make_class(py::module_& module, const char* name, const char* text, const py::tuple& bases) {
  const std::string full = std::string("weft.") + name;
  PyObject* made = PyErr_NewExceptionWithDoc(full.c_str(), text, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  module.add_object(name, made);
  Py_INCREF(made);
  return made;
}

std::string_view name_of(TransportError::Kind kind) {
  constexpr std::string_view names[] = {"peer_lost", "mismatch", "corrupt", "refused", "closed"};
  return names[static_cast<std::size_t>(kind)];
}

template <class... Attributes>
void raise(PyObject* type, const char* what, const Attributes&... attributes) {
  const py::object instance = py::reinterpret_borrow<py::object>(type)(what);
  (py::setattr(instance, attributes.first, attributes.second), ...);
  PyErr_SetObject(type, instance.ptr());
}

void translate(std::exception_ptr error) {
  try {
    if (error) std::rethrow_exception(std::move(error));
  } catch (const UsageError& e) {
    raise(classes.usage, e.what());
  } catch (const TransportError& e) {
    raise(classes.transport, e.what(), std::pair("kind", py::str(std::string(name_of(e.kind())))),
          std::pair("peer", py::int_(e.peer())));
  } catch (const TimeoutError& e) {
    raise(classes.timeout, e.what(), std::pair("peer", py::int_(e.peer())),
          std::pair("seconds", py::float_(e.seconds())));
  } catch (const Error& e) {
    raise(classes.error, e.what());
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  const auto type = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
  classes.error = make_class(module, "Error", "Something went wrong in weft; one sentence says what.",
                             py::make_tuple(type(PyExc_RuntimeError)));
  const py::object base = type(classes.error);
  classes.usage = make_class(module, "UsageError", "Fix the call: nothing was sent, the job goes on.",
                             py::make_tuple(base, type(PyExc_ValueError)));
  classes.transport =
      make_class(module, "TransportError",
                 "A peer is lost or ranks disagree; `kind` and `peer` say which. Start the job again.",
                 py::make_tuple(base));
  classes.timeout = make_class(module, "TimeoutError",
                               "An operation's deadline passed; `peer` was waited for, `seconds` long.",
                               py::make_tuple(base, type(PyExc_TimeoutError)));
  py::register_local_exception_translator(&translate);
}

}  // namespace weft::python
