#include "gradients.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "session.h"
#include "snapshot.h"
#include "wait.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

using ParameterTuple = std::tuple<std::string, std::int64_t, int, std::int64_t>;  // name, count, use, rows
using Place = std::tuple<int, Address>;                                           // parameter, where it goes

template <class T>
std::span<T> span_at(Address address, std::int64_t count) {
  return {reinterpret_cast<T*>(address), static_cast<std::size_t>(count)};
}

// Takes what `values` has under the field's name; what is left over is unknown.
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
  void finish() const {
    for (const auto& [name, value] : values_)
      throw UsageError("there is no option '" + py::str(name).cast<std::string>() + "'");
  }

 private:
  py::dict values_;
};

DataParallelOptions options_of(const py::dict& values) {
  DataParallelOptions out;
  SchemeOptions& scheme = out.scheme;
  std::string dtype = "float32", residual{name_of(scheme.residual)}, quotas{name_of(scheme.quotas)};
  Reader reader(values);
  reader.take("scheme", scheme.name);
  reader.take("dtype", dtype);
  reader.take("density", scheme.density);
  reader.take("codec", scheme.codec);
  reader.take("blocks", scheme.blocks);
  reader.take("residual", residual);
  reader.take("teams", scheme.teams);
  reader.take("gather", scheme.gather);
  reader.take("quotas", quotas);
  reader.take("bucket_bytes", scheme.buckets.bucket_bytes);
  reader.take("dense_below", scheme.buckets.dense_below);
  reader.take("rank", scheme.columns);
  reader.take("min_compression", scheme.min_compression);
  reader.take("seed", scheme.seed);
  reader.take("all_reduce", scheme.all_reduce);
  reader.take("momentum_correction", scheme.momentum_correction);
  reader.take("threads", scheme.threads);
  reader.take("divisor", out.divisor);
  reader.take("clip_local", out.clip_local);
  reader.take("find_unused", out.find_unused);
  reader.finish();
  out.dtype = dtype == "float64" ? DType::float64 : DType::float32;
  scheme.residual = residual_rule_of(residual);
  scheme.quotas = quota_kind_of(quotas);
  return out;
}

class Gradients {
 public:
  Gradients(std::shared_ptr<Session> session, const std::vector<ParameterTuple>& parameters,
            const py::dict& values)
      : session_(std::move(session)) {
    std::vector<ParameterInfo> infos;
    for (const auto& [name, count, use, rows] : parameters)
      infos.push_back({.name = name, .count = count, .use = use, .rows = rows});
    DataParallelOptions options = options_of(values);
    wide_ = options.dtype == DType::float64;
    // No plan has more buckets than parameters.
    options.first_slot = session_->take_slots(1 + static_cast<std::uint32_t>(infos.size()));
    World& world = session_->world();
    core_ = std::make_shared<DataParallel>(world.engine(), world.comm(), std::move(infos), options);
  }
  ~Gradients() {
    const std::span<const Ticket> tickets = core_->tickets();
    if (std::ranges::all_of(tickets, &Ticket::done)) return;
    session_->keep_until_done(
        {.tickets = {tickets.begin(), tickets.end()}, .object = core_, .objects = std::move(kept_)});
  }
  Gradients(const Gradients&) = delete;
  Gradients& operator=(const Gradients&) = delete;

  void gradient_ready(int parameter, Address address, std::int64_t count, py::object keep) {
    DataParallel& dp = core();
    kept_.push_back(std::move(keep));
    const py::gil_scoped_release released;
    if (wide_)
      dp.gradient_ready(parameter, std::span<const double>(span_at<double>(address, count)));
    else
      dp.gradient_ready(parameter, std::span<const float>(span_at<float>(address, count)));
  }
  void step_end() { core().step_end(); }

  void wait() {
    for (const Ticket& ticket : core().tickets()) python::wait(session_->world().engine(), ticket);
  }
  StepResult finish() {
    StepResult result = core().finish();
    kept_.clear();
    return result;
  }

  void copy_to(const std::vector<Place>& places) {
    DataParallel& dp = core();
    const py::gil_scoped_release released;
    std::vector<std::span<float>> outputs(static_cast<std::size_t>(dp.plan().num_parameters()));
    for (const auto& [parameter, address] : places) {
      if (parameter < 0 || parameter >= dp.plan().num_parameters())
        throw UsageError("there is no parameter " + std::to_string(parameter));
      const std::int64_t count = dp.plan().parameter(parameter).count;
      if (wide_)
        dp.result_of(parameter, span_at<double>(address, count));
      else
        outputs[static_cast<std::size_t>(parameter)] = span_at<float>(address, count);
    }
    if (!wide_) dp.copy_to(outputs);
  }

  bool used(int parameter) { return core().used(parameter); }
  void set_density(double density) { core().set_density(density); }
  std::int64_t step() const { return core_->state().step(); }
  int num_buckets() const { return core_->plan().num_buckets(); }
  std::uint64_t sent_bytes() const {
    std::uint64_t sum = 0;
    for (int b = 0; b < num_buckets(); ++b) sum += core_->result(b).entry_bytes_sent();
    return sum;
  }

  py::dict save() const { return to_python(core_->save()); }
  void load(const std::vector<py::dict>& states) {
    std::vector<StateSnapshot> snapshots;
    for (const py::dict& state : states) snapshots.push_back(snapshot_of(state));
    core().load(snapshots);
  }

 private:
  DataParallel& core() {
    session_->world();  // says so where it is shut down
    return *core_;
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<DataParallel> core_;
  std::vector<py::object> kept_;  // gradients that the step's operations read
  bool wide_ = false;
};

}  // namespace

void bind_gradients(py::module_& module) {
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("committed", &StepResult::committed)
      .def_readonly("step", &StepResult::step)
      .def_readonly("text", &StepResult::text);
  py::class_<Gradients>(module, "Gradients")
      .def(py::init<std::shared_ptr<Session>, const std::vector<ParameterTuple>&, const py::dict&>())
      .def("gradient_ready", &Gradients::gradient_ready)
      .def("step_end", &Gradients::step_end)
      .def("wait", &Gradients::wait)
      .def("finish", &Gradients::finish)
      .def("copy_to", &Gradients::copy_to)
      .def("used", &Gradients::used)
      .def("set_density", &Gradients::set_density)
      .def_property_readonly("step", &Gradients::step)
      .def_property_readonly("num_buckets", &Gradients::num_buckets)
      .def_property_readonly("sent_bytes", &Gradients::sent_bytes)
      .def("save", &Gradients::save)
      .def("load", &Gradients::load);
}

}  // namespace weft::python
