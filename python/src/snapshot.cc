#include "snapshot.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <string_view>

#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::float32, DType::float64, DType::int64}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw UsageError("this is no compression state of weft: a row of type '" + name + "'");
}

py::dict to_python(const StateValue& value) {
  const StateRow& row = value.row;
  py::dict out;
  out["owner"] = row.key.owner;
  out["kind"] = row.key.kind;
  out["name"] = row.key.name;
  out["dtype"] = name_of(row.dtype);
  out["rule"] = name_of(row.rule);
  out["peer"] = row.peers.rank;
  out["peers"] = row.peers.size;
  if (row.rule == LayoutRule::sum) out["divisor"] = row.divisor;
  out["shape"] = row.shard.shape;
  out["first"] = row.shard.first;
  out["extent"] = row.shard.extent;
  out["values"] = py::bytes(reinterpret_cast<const char*>(value.bytes.data()), value.bytes.size());
  return out;
}

StateValue value_of(const py::dict& values) {
  using Numbers = std::vector<std::int64_t>;
  StateValue out;
  out.row = {.key = {values["owner"].cast<std::string>(), values["kind"].cast<std::string>(),
                     values["name"].cast<std::string>()},
             .dtype = dtype_named(values["dtype"].cast<std::string>()),
             .rule = layout_rule_of(values["rule"].cast<std::string>()),
             .shard = {.shape = values["shape"].cast<Numbers>(),
                       .first = values["first"].cast<Numbers>(),
                       .extent = values["extent"].cast<Numbers>()},
             .peers = {values["peer"].cast<int>(), values["peers"].cast<int>()}};
  // (One of before it was told has none.)
  if (out.row.rule == LayoutRule::sum)
    out.row.divisor = values.contains("divisor") ? values["divisor"].cast<double>() : 0;
  const py::bytes raw = values["values"].cast<py::bytes>();
  const std::string_view view = raw;
  out.bytes.resize(view.size());
  if (!view.empty()) std::memcpy(out.bytes.data(), view.data(), view.size());
  return out;
}

}  // namespace

py::dict to_python(const StateSnapshot& snapshot) {
  py::list rows;
  for (const StateValue& value : snapshot.rows) rows.append(to_python(value));
  py::dict out;
  out["rank"] = snapshot.rank;
  out["size"] = snapshot.size;
  out["rows"] = rows;
  return out;
}

StateSnapshot snapshot_of(const py::dict& values) {
  try {
    StateSnapshot out;
    out.rank = values["rank"].cast<int>();
    out.size = values["size"].cast<int>();
    for (const py::handle each : values["rows"].cast<py::list>())
      out.rows.push_back(value_of(each.cast<py::dict>()));
    return out;
  } catch (const py::error_already_set& e) {  // a key that is missing
    throw UsageError(std::string("this is no compression state of weft: ") + e.what());
  } catch (const py::cast_error&) {
    throw UsageError("this is no compression state of weft: a value has another type than it should");
  }
}

}  // namespace weft::python
