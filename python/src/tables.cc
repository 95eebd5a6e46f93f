#include "tables.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "region.h"
#include "session.h"
#include "tables_step.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

// name, rows, columns, row of padding or -1, type, rule, group of the optimizer
using TableTuple =
    std::tuple<std::string, std::int64_t, std::int64_t, std::int64_t, std::string, OptimizerOptions, int>;
using GradientTuple = std::tuple<Memory, OptimizerOptions>;                       // and the rule of the step
using StateTuple = std::tuple<std::string, std::string, std::string, py::bytes>;  // kind, table, type, values

std::span<const std::int64_t> ids_of(const Memory& memory) {
  const Dense ids = dense_of(memory);
  if (ids.dtype != DType::int64) throw UsageError("ids of a table are int64");
  return {reinterpret_cast<const std::int64_t*>(ids.data), static_cast<std::size_t>(ids.count)};
}

std::vector<TableSpec> specs_of(const std::vector<TableTuple>& tables) {
  std::vector<TableSpec> out;
  for (const auto& [name, rows, columns, padding, dtype, optimizer, group] : tables) {
    if (dtype != "float32" && dtype != "float64")
      throw UsageError("a sharded table is float32 or float64, not " + dtype);
    out.push_back({.info = {.name = name, .rows = rows, .columns = columns, .use = 0, .padding = padding},
                   .dtype = dtype == "float64" ? DType::float64 : DType::float32,
                   .optimizer = optimizer,
                   .group = group});
  }
  if (out.empty()) throw UsageError("there is no table");
  return out;
}

class Tables {
 public:
  Tables(std::shared_ptr<Session> session, const std::vector<TableTuple>& tables, double divisor, bool waits,
         bool skips)
      : session_(std::move(session)) {
    const TablesStepOptions options{.divisor = divisor, .waits = waits, .skips = skips};
    World& world = session_->world();
    const std::uint32_t first_slot = session_->take_slots(0);
    step_ = std::make_shared<TablesStep>(world, specs_of(tables), options, first_slot);
    session_->take_slots(step_->strategies().next_slot(world.comm()) - first_slot);
  }
  ~Tables() {
    std::vector<Ticket> tickets = step_->strategies().tickets();
    if (std::ranges::all_of(tickets, &Ticket::done)) return;
    session_->keep_until_done({.tickets = std::move(tickets), .object = step_, .objects = std::move(kept_)});
  }
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  Region values(int t) { return {step_, step_->table(t).values()}; }
  Region rows(int t) { return {step_, live().table(t).rows()}; }
  std::pair<std::int64_t, std::int64_t> columns(int t, int rank) {
    const BlockRange range = step_->table(t).columns(rank);
    return {range.first, range.count};
  }
  bool in_step() const { return step_->in_step(); }
  bool under_way() const { return step_->under_way(); }

  void announce(const std::vector<Memory>& ids, bool reads) {
    std::vector<std::span<const std::int64_t>> lists;
    lists.reserve(ids.size());
    for (const Memory& memory : ids) lists.push_back(ids_of(memory));
    live().announce(lists, reads);
  }
  void begin() { live().begin(); }
  void read(int t) { live().read(t); }
  void end_forward() { live().end_forward(); }
  // `keep` holds the memory; what the step before kept has been read by then.
  void end_backward(const std::vector<GradientTuple>& gradients, py::object keep) {
    std::vector<TablesStep::Gradient> out;
    out.reserve(gradients.size());
    for (const auto& [memory, rule] : gradients) out.push_back({.values = dense_of(memory), .rule = rule});
    const std::vector<py::object> before = std::exchange(kept_, {std::move(keep)});
    live().end_backward(out);
  }
  void settle() { live().settle(); }
  StepResult judge(double clip_norm, double squares, std::string veto) {
    return live().judge(clip_norm, squares, std::move(veto));
  }
  double gradient_norm() { return step_->strategies().gradient_norm(); }
  double update_scale() { return step_->strategies().update_scale(); }
  void update() { live().update(); }
  void rest() { live().rest(); }
  // `keep` holds the memory, also of a call that a signal ends.
  void look_up(int t, const Memory& ids, const Memory& out, py::object keep) {
    const Ticket ticket = live().look_up(t, ids_of(ids), dense_of(out));
    try {
      step_->await(ticket);
    } catch (const py::error_already_set&) {
      session_->keep_until_done({.tickets = {ticket}, .object = step_, .objects = {std::move(keep)}});
      throw;
    }
  }

  // What the rules keep of this rank's columns.
  std::vector<StateTuple> state() {
    std::vector<StateTuple> out;
    each_row([&](const LiveRow& row) {
      std::vector<std::byte> scratch;
      const std::span<const std::byte> values = row.read(scratch);
      out.emplace_back(row.row.key.kind, row.row.key.name, std::string(name_of(row.row.dtype)),
                       py::bytes(reinterpret_cast<const char*>(values.data()), values.size()));
    });
    return out;
  }
  void load(const std::string& kind, const std::string& name, const py::bytes& values) {
    const std::string_view view = values;
    const std::span<const std::byte> bytes = std::as_bytes(std::span(view));
    bool found = false;
    each_row([&](const LiveRow& row) {
      if (row.row.key.kind != kind || row.row.key.name != name) return;
      std::vector<std::byte> scratch;
      if (row.read(scratch).size() != bytes.size())
        throw UsageError("'" + kind + "' of table '" + name + "' has another length");
      if (row.takes) row.takes(row.row.shard, bytes);
      row.write(bytes);
      found = true;
    });
    if (!found) throw UsageError("the rule of table '" + name + "' keeps no '" + kind + "'");
  }

  // Payload that this rank has sent for a table, by kind of exchange.
  std::map<std::string, std::uint64_t> sent_bytes(int t) {
    std::map<std::string, std::uint64_t> out;
    for (int e = 0; e < kTableExchanges; ++e) {
      const auto exchange = static_cast<TableExchange>(e);
      out[std::string(name_of(exchange))] = step_->table(t).sent_bytes(exchange);
    }
    return out;
  }
  double prior_share(int t) { return step_->table(t).prior_share(); }

 private:
  TablesStep& live() {
    session_->world();  // says so where it is shut down
    return *step_;
  }
  template <class F>
  void each_row(F visit) {
    const Comm& world = step_->strategies().world();
    for (HybridEmbedding* embedding : step_->embeddings()) {
      for (const LiveRow& row : embedding->optimizer_rows({world.rank(), world.size()})) {
        if (row.row.key.kind != "lr") visit(row);  // torch's param_groups have it
      }
    }
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<TablesStep> step_;
  std::vector<py::object> kept_;  // gradients of the step that is under way
};

}  // namespace

void bind_tables(py::module_& module) {
  py::class_<OptimizerOptions>(module, "RowRule")
      .def(py::init(&default_options))
      .def_readonly("name", &OptimizerOptions::name)
      .def_readwrite("lr", &OptimizerOptions::lr)
      .def_readwrite("weight_decay", &OptimizerOptions::weight_decay)
      .def_readwrite("momentum", &OptimizerOptions::momentum)
      .def_readwrite("beta1", &OptimizerOptions::beta1)
      .def_readwrite("beta2", &OptimizerOptions::beta2)
      .def_readwrite("eps", &OptimizerOptions::eps)
      .def_readwrite("lr_decay", &OptimizerOptions::lr_decay)
      .def_readwrite("initial_accumulator", &OptimizerOptions::initial_accumulator)
      .def("validate", &validate_rows);
  py::class_<Tables>(module, "Tables")
      .def(py::init<std::shared_ptr<Session>, const std::vector<TableTuple>&, double, bool, bool>(),
           py::arg("session"), py::arg("tables"), py::arg("divisor") = 0, py::arg("waits") = false,
           py::arg("skips") = false)
      .def("values", &Tables::values)
      .def("rows", &Tables::rows)
      .def("columns", &Tables::columns)
      .def_property_readonly("in_step", &Tables::in_step)
      .def_property_readonly("under_way", &Tables::under_way)
      .def("announce", &Tables::announce, py::arg("ids"), py::arg("reads") = true)
      .def("begin", &Tables::begin)
      .def("read", &Tables::read)
      .def("end_forward", &Tables::end_forward)
      .def("end_backward", &Tables::end_backward)
      .def("settle", &Tables::settle)
      .def("judge", &Tables::judge)
      .def_property_readonly("gradient_norm", &Tables::gradient_norm)
      .def_property_readonly("update_scale", &Tables::update_scale)
      .def("update", &Tables::update)
      .def("rest", &Tables::rest)
      .def("look_up", &Tables::look_up)
      .def("state", &Tables::state)
      .def("load", &Tables::load)
      .def("sent_bytes", &Tables::sent_bytes)
      .def("prior_share", &Tables::prior_share);
}

}  // namespace weft::python
