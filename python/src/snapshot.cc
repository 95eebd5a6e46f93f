#include "snapshot.h"

#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <string_view>
#include <tuple>

#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

using TeamQuotaTuple = std::tuple<std::int64_t, std::int64_t, bool>;
using ThresholdsTuple = std::tuple<double, double, std::int64_t, std::int64_t, std::vector<std::int64_t>>;

py::bytes bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

std::vector<float> floats_of(const py::bytes& bytes) {
  const std::string_view view = bytes;
  if (view.size() % sizeof(float) != 0)
    throw UsageError("a residual, velocity or factor that is no list of float32");
  std::vector<float> out(view.size() / sizeof(float));
  if (!out.empty()) std::memcpy(out.data(), view.data(), view.size());
  return out;
}

py::dict to_python(const StateSnapshot::Parameter& parameter) {
  py::dict out;
  out["name"] = parameter.name;
  out["count"] = parameter.count;
  out["residual"] = bytes_of(parameter.residual);
  out["velocity"] = bytes_of(parameter.velocity);
  out["scale"] = parameter.scale;
  out["factor"] = bytes_of(parameter.factor);
  out["factor_rank"] = parameter.factor_rank;
  return out;
}

py::dict to_python(const StateSnapshot::Controllers& controllers) {
  const TeamQuota& quota = controllers.team_quota;
  const Thresholds& thresholds = controllers.thresholds;
  py::dict out;
  out["parameters"] = controllers.parameters;
  out["team_quota"] = TeamQuotaTuple(quota.entries, quota.step, quota.inertia);
  out["thresholds"] = ThresholdsTuple(thresholds.local, thresholds.global, thresholds.k, thresholds.steps,
                                      thresholds.regions);
  return out;
}

StateSnapshot::Parameter parameter_of(const py::dict& values) {
  StateSnapshot::Parameter out;
  out.name = values["name"].cast<std::string>();
  out.count = values["count"].cast<std::int64_t>();
  out.residual = floats_of(values["residual"].cast<py::bytes>());
  out.velocity = floats_of(values["velocity"].cast<py::bytes>());
  out.scale = values["scale"].cast<double>();
  out.factor = floats_of(values["factor"].cast<py::bytes>());
  out.factor_rank = values["factor_rank"].cast<int>();
  return out;
}

StateSnapshot::Controllers controllers_of(const py::dict& values) {
  StateSnapshot::Controllers out;
  out.parameters = values["parameters"].cast<std::vector<std::string>>();
  const auto [entries, step, inertia] = values["team_quota"].cast<TeamQuotaTuple>();
  out.team_quota = {.entries = entries, .step = step, .inertia = inertia};
  const auto [local, global, k, steps, regions] = values["thresholds"].cast<ThresholdsTuple>();
  out.thresholds = {.local = static_cast<float>(local),
                    .global = static_cast<float>(global),
                    .k = k,
                    .steps = steps,
                    .regions = regions};
  return out;
}

}  // namespace

py::dict to_python(const StateSnapshot& snapshot) {
  py::list parameters;
  for (const StateSnapshot::Parameter& parameter : snapshot.parameters)
    parameters.append(to_python(parameter));
  py::list controllers;
  for (const StateSnapshot::Controllers& each : snapshot.controllers) controllers.append(to_python(each));
  py::dict out;
  out["step"] = snapshot.step;
  out["rank"] = snapshot.rank;
  out["size"] = snapshot.size;
  out["parameters"] = parameters;
  out["controllers"] = controllers;
  return out;
}

StateSnapshot snapshot_of(const py::dict& values) {
  try {
    StateSnapshot out;
    out.step = values["step"].cast<std::int64_t>();
    out.rank = values["rank"].cast<int>();
    out.size = values["size"].cast<int>();
    for (const py::handle each : values["parameters"].cast<py::list>())
      out.parameters.push_back(parameter_of(each.cast<py::dict>()));
    for (const py::handle each : values["controllers"].cast<py::list>())
      out.controllers.push_back(controllers_of(each.cast<py::dict>()));
    return out;
  } catch (const py::error_already_set& e) {  // a key that is missing
    throw UsageError(std::string("this is no compression state of weft: ") + e.what());
  } catch (const py::cast_error&) {
    throw UsageError("this is no compression state of weft: a value has another type than it should");
  }
}

}  // namespace weft::python
