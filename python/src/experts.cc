#include "experts.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "experts_step.h"
#include "region.h"
#include "session.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

// name, width, experts, choices, capacity factor, slices, ranks of a group, has shared ones
using LayerTuple = std::tuple<std::string, std::int64_t, int, int, double, int, int, bool>;
// Weights: balance, z.
using LossTuple = std::tuple<double, double>;
// Of each copy its row, of each row its token, rows of each slice and expert; how many were dropped.
using RouteTuple = std::tuple<py::bytes, py::bytes, py::bytes, std::int64_t>;
// "slice", and its number.
using StopTuple = std::tuple<std::string, int>;

py::bytes bytes_of(std::span<const std::int64_t> values) {
  return {reinterpret_cast<const char*>(values.data()), values.size_bytes()};
}

std::span<const std::int64_t> integers_of(const Memory& memory) {
  const Dense values = dense_of(memory);
  if (values.dtype != DType::int64) throw UsageError("numbers of experts are int64");
  return {reinterpret_cast<const std::int64_t*>(values.data), static_cast<std::size_t>(values.count)};
}

RowExchange exchange_named(const std::string& name) {
  constexpr std::array<const char*, kRowExchanges> names{"dispatch", "combine", "combine_back",
                                                         "dispatch_back"};
  const auto found = std::ranges::find(names, name);
  if (found == names.end()) throw UsageError("rows do not travel as '" + name + "'");
  return static_cast<RowExchange>(found - names.begin());
}

StopTuple stop_of(const ExpertCall::Stop& stop) {
  constexpr std::array<const char*, 5> names{"gate", "shared", "slice", "merge", "end"};
  return {names[static_cast<std::size_t>(stop.at)], stop.slice};
}

ExpertsSpec spec_of(const LayerTuple& layer, const LossTuple& losses, const std::string& dtype) {
  ExpertsSpec out;
  std::tie(out.name, out.width, out.route.experts, out.route.choices, out.route.capacity_factor,
           out.route.slices, out.ranks, out.shared) = layer;
  std::tie(out.balance_loss, out.z_loss) = losses;
  if (dtype != "float32" && dtype != "float64")
    throw UsageError("rows of experts travel as float32 or float64, not " + dtype);
  out.dtype = dtype == "float64" ? DType::float64 : DType::float32;
  check(out.route);
  return out;
}

class ExpertLayer {
 public:
  ExpertLayer(std::shared_ptr<Session> session, const LayerTuple& layer, const LossTuple& losses,
              const std::string& dtype)
      : session_(std::move(session)) {
    World& world = session_->world();
    const std::uint32_t first_slot = session_->take_slots(0);
    step_ = std::make_shared<ExpertsStep>(world, spec_of(layer, losses, dtype), first_slot);
    session_->take_slots(step_->num_slots());
    // A walk that was left has announced what never comes.
    session_->before_close([step = std::weak_ptr(step_)] {
      if (const std::shared_ptr<ExpertsStep> mine = step.lock()) mine->strategies().withdraw();
    });
  }
  ~ExpertLayer() {
    std::vector<Ticket> tickets = step_->tickets();
    if (std::ranges::all_of(tickets, &Ticket::done)) return;
    std::vector<py::object> objects;
    for (auto& [call, kept] : kept_) std::ranges::move(kept, std::back_inserter(objects));
    session_->keep_until_done(
        {.tickets = std::move(tickets), .object = step_, .objects = std::move(objects)});
  }
  ExpertLayer(const ExpertLayer&) = delete;
  ExpertLayer& operator=(const ExpertLayer&) = delete;

  int replicas() const { return step_->replicas(); }

  int begin(std::int64_t tokens) {
    const int call = live().begin(tokens);
    std::erase_if(kept_, [this](const auto& kept) { return !step_->has(kept.first); });
    return call;
  }
  RouteTuple route(int call, const Memory& choices) {
    const Route& way = live().call(call).route(integers_of(choices));
    return {bytes_of(way.row_of_copy), bytes_of(way.token_of_row), bytes_of(way.counts), way.num_dropped};
  }
  void give_router(int call, const std::vector<double>& values) { live().call(call).give_router(values); }
  // `keep` holds the memory until the call is forgotten.
  void give(int call, const std::string& what, int slice, const Memory& rows, py::object keep) {
    live().call(call).give(exchange_named(what), slice, dense_of(rows));
    kept_[call].push_back(std::move(keep));
  }
  StopTuple begin_backward(int call) { return stop_of(live().call(call).begin_backward()); }
  StopTuple go_on(int call) { return stop_of(live().call(call).go_on()); }
  bool was_backward(int call) { return live().call(call).was_backward(); }
  std::tuple<Region, py::bytes> arrived(int call, const std::string& what, int slice) {
    const Experts::Rows rows = live().call(call).arrived(exchange_named(what), slice);
    const Dense values(rows.memory.get(), rows.count * step_->spec().width, step_->spec().dtype);
    return {Region{rows.memory, values}, bytes_of(rows.counts)};
  }
  // The losses of all ranks' tokens, and their gradient in what this rank's gate gave.
  std::tuple<double, std::vector<double>> losses(int call) {
    RouterSums& sums = live().sums(call);
    return {sums.loss(), sums.gradient(0, 0)};
  }
  std::vector<double> chosen(int call) { return live().sums(call).chosen(0); }
  std::shared_ptr<Work> reduce(int call, const Memory& values, py::object keep) {
    return std::make_shared<Work>(session_, live().reduce(call, dense_of(values)), std::move(keep));
  }
  void forget(int call) {
    if (step_->forget(call)) kept_.erase(call);
  }

 private:
  ExpertsStep& live() {
    session_->world();  // says so where it is shut down
    return *step_;
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<ExpertsStep> step_;
  std::map<int, std::vector<py::object>> kept_;  // rows of each call
};

}  // namespace

void bind_experts(py::module_& module) {
  py::class_<ExpertLayer>(module, "ExpertLayer")
      .def(py::init<std::shared_ptr<Session>, const LayerTuple&, const LossTuple&, const std::string&>())
      .def_property_readonly("replicas", &ExpertLayer::replicas)
      .def("begin", &ExpertLayer::begin)
      .def("route", &ExpertLayer::route)
      .def("give_router", &ExpertLayer::give_router)
      .def("give", &ExpertLayer::give)
      .def("begin_backward", &ExpertLayer::begin_backward)
      .def("go_on", &ExpertLayer::go_on)
      .def("was_backward", &ExpertLayer::was_backward)
      .def("arrived", &ExpertLayer::arrived)
      .def("losses", &ExpertLayer::losses)
      .def("chosen", &ExpertLayer::chosen)
      .def("reduce", &ExpertLayer::reduce)
      .def("forget", &ExpertLayer::forget);
}

}  // namespace weft::python
