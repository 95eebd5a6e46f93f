#include "exchange_options.h"

#include <algorithm>
#include <string>

#include "data_parallel/schemes.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

// Takes what `values` has under the field's name; the rest are knobs of the scheme.
class Reader {
 public:
  explicit Reader(const py::dict& values) : values_(values.attr("copy")()) {}
  template <class T>
  void take(const char* name, T& field) {
    if (!values_.contains(name)) return;
    try {
      field = values_.attr("pop")(name).cast<T>();
    } catch (const py::cast_error&) {
      throw UsageError(std::string("the option '") + name + "' has a value of another type than it should");
    }
  }
  void finish(SchemeOptions& scheme) const {
    for (const auto& [key, value] : values_) {
      const auto name = py::str(key).cast<std::string>();
      std::string knob = name;
      std::ranges::replace(knob, '_', '-');
      const auto has_name = [&](const SchemeKnob& k) { return k.name == knob; };
      if (std::ranges::none_of(scheme_knobs(), has_name))
        throw UsageError("there is no option '" + name + "'");
      find_scheme_knob(knob).set(scheme, py::str(value).cast<std::string>());
    }
  }

 private:
  py::dict values_;
};

}  // namespace

ExchangeOptions exchange_options_of(const py::dict& values) {
  ExchangeOptions all;
  DataParallelOptions& out = all.exchange;
  SchemeOptions& scheme = out.scheme;
  std::string dtype = "float32";
  Reader reader(values);
  reader.take("scheme", scheme.name);
  reader.take("dtype", dtype);
  reader.take("blocks", scheme.blocks);
  reader.take("seed", scheme.seed);
  reader.take("all_reduce", scheme.all_reduce);
  reader.take("threads", scheme.threads);
  reader.take("divisor", out.divisor);
  reader.take("clip_local", out.clip_local);
  reader.take("find_unused", out.find_unused);
  reader.take("unused_stay_out", out.unused_stay_out);
  reader.take("compared", all.compared);
  reader.finish(scheme);
  out.dtype = dtype == "float64" ? DType::float64 : DType::float32;
  return all;
}

}  // namespace weft::python
