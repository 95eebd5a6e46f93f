#include "data_parallel.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "data_parallel/data_parallel.h"
#include "exchange_options.h"
#include "session.h"
#include "snapshot.h"
#include "step/run_step.h"
#include "wait.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

using ParameterTuple = std::tuple<std::string, std::int64_t, std::int64_t>;  // name, count, rows
using Place = std::tuple<int, std::int64_t>;                                 // bucket, first element in it

template <class T>
std::span<T> part_at(Address address, std::int64_t first, std::int64_t count) {
  return {reinterpret_cast<T*>(address) + first, static_cast<std::size_t>(count)};
}

// The step: a table over one block, "module", whose pieces are computed by the user's code.
class Step final : public Driver {
 public:
  Step(World& world, const std::vector<ParameterTuple>& parameters, const ExchangeOptions& all,
       std::uint32_t first_slot)
      : strategies_(world.engine(), world.comm(), shape_of(parameters),
                    // What a step that is not finite means, Python decides; its loss is the user's.
                    StepOptions{.skip_not_finite = true,
                                .tokens = false,
                                .compared = all.compared,
                                .updates_wait = {},
                                .first_slot = first_slot}),
        walker_(*this, strategies_) {
    std::vector<ParameterInfo> infos;
    for (const auto& [name, count, rows] : parameters)
      infos.push_back({.name = name, .count = count, .use = static_cast<int>(infos.size()), .rows = rows});
    DataParallelOptions options = all.exchange;
    options.first_slot = strategies_.next_slot(world.comm());
    options.awaited_together = true;  // backward() returns when the last average is there
    dp_ = &strategies_.add(std::make_unique<weft::DataParallel>(
        world.engine(), world.comm(), std::move(infos), options, &strategies_.state()));
    strategies_.install();
  }

  weft::DataParallel& dp() { return *dp_; }
  Strategies& strategies() { return strategies_; }
  // Some gradient was ready, and backward has not ended.
  bool in_backward() const { return walker_.walking(); }

  void begin() {
    if (in_backward()) return;
    if (strategies_.under_way())
      throw UsageError(
          "the last step was interrupted: this job cannot go on (start it again from a checkpoint)");
    walker_.begin(strategies_.tables(1).first);
  }
  const StepResult& end_of_backward() {
    begin();
    walker_.go_on();
    walker_.walk(strategies_.tables(1).settle);
    return *strategies_.result();
  }

  Task<void> compute(Piece piece) override {
    if (piece.work == weft::Work::update) update();
    Walker::Gate& backward_end = walker_.gate();
    if (piece.work == weft::Work::backward) co_await backward_end;
  }
  // An error of a bucket's exchange is left to the verdict, which rolls the state back before it says so.
  Task<void> wait(Ticket ticket) override {
    python::wait(strategies_.engine(), ticket);
    if (!strategies_.under_way() && ticket.error()) std::rethrow_exception(ticket.error());
    co_return;
  }

 private:
  static ModelShape shape_of(const std::vector<ParameterTuple>& parameters) {
    ChainBlock module{.name = "module", .parameters = {}};
    for (const auto& [name, count, rows] : parameters) {
      std::vector<std::int64_t> dims{count};
      if (rows > 0) dims = {rows, count / rows};
      module.parameters.push_back({.name = name, .dims = std::move(dims)});
    }
    return chain_shape("of Python", {module});
  }
  void update() {
    if (!strategies_.result()->committed) return;
    const py::gil_scoped_release released;
    dp_->fill_memory();
  }

  Strategies strategies_;
  Walker walker_;
  weft::DataParallel* dp_ = nullptr;
};

class DataParallel {
 public:
  DataParallel(std::shared_ptr<Session> session, const std::vector<ParameterTuple>& parameters,
               const py::dict& values)
      : session_(std::move(session)) {
    const ExchangeOptions options = exchange_options_of(values);
    wide_ = options.exchange.dtype == DType::float64;
    World& world = session_->world();
    const std::uint32_t first_slot = session_->take_slots(0);
    step_ = std::make_shared<Step>(world, parameters, options, first_slot);
    session_->take_slots(step_->strategies().next_slot(world.comm()) - first_slot);
    memory_.resize(static_cast<std::size_t>(num_buckets()));
  }
  ~DataParallel() {
    std::vector<Ticket> tickets = step_->strategies().tickets();
    if (std::ranges::all_of(tickets, &Ticket::done)) return;
    session_->keep_until_done({.tickets = std::move(tickets), .object = step_, .objects = std::move(kept_)});
  }
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  // Where gradients are gathered and averages land; `keep` holds that memory.
  void give_memory(int bucket, Address address, std::int64_t count, py::object keep) {
    weft::DataParallel& dp = live().dp();
    if (wide_)
      dp.give_memory(bucket, part_at<double>(address, 0, count));
    else
      dp.give_memory(bucket, part_at<float>(address, 0, count));
    memory_[static_cast<std::size_t>(bucket)] = address;
    kept_.push_back(std::move(keep));
  }
  std::vector<std::int64_t> bucket_elements() {
    std::vector<std::int64_t> out;
    for (const Bucket& bucket : step_->dp().plan().buckets()) out.push_back(bucket.count);
    return out;
  }
  std::vector<Place> places() {
    std::vector<Place> out;
    const BucketPlan& plan = step_->dp().plan();
    for (int p = 0; p < plan.num_parameters(); ++p) out.emplace_back(plan.bucket_of(p), plan.first_of(p));
    return out;
  }

  // It lies in its place of the memory that was given.
  void gradient_ready(int parameter) {
    Step& step = live();
    const BucketPlan& plan = step.dp().plan();
    if (parameter < 0 || parameter >= plan.num_parameters())
      throw UsageError("there is no parameter " + std::to_string(parameter));
    const Address bucket = memory_[static_cast<std::size_t>(plan.bucket_of(parameter))];
    const std::int64_t first = plan.first_of(parameter), count = plan.parameter(parameter).count;
    if (bucket == 0 && count > 0) throw UsageError("no memory was given to the bucket of a gradient");
    step.begin();
    if (wide_)
      step.strategies().gradient_ready(parameter, part_at<const double>(bucket, first, count));
    else
      step.strategies().gradient_ready(parameter, part_at<const float>(bucket, first, count));
  }
  StepResult backward_ended() { return live().end_of_backward(); }
  bool in_backward() const { return step_->in_backward(); }

  bool used(int parameter) { return step_->strategies().used(parameter); }
  void set_density(double density) { live().dp().set_density(density); }
  std::int64_t step() const { return step_->dp().state().step(); }
  int num_buckets() const { return step_->dp().plan().num_buckets(); }
  std::uint64_t sent_bytes() const { return step_->dp().sent_bytes(); }

  py::dict save() const { return to_python(step_->dp().save()); }
  void load(const std::vector<py::dict>& states) {
    std::vector<StateSnapshot> snapshots;
    for (const py::dict& state : states) snapshots.push_back(snapshot_of(state));
    live().dp().load(snapshots);
  }

 private:
  Step& live() {
    session_->world();  // says so where it is shut down
    return *step_;
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<Step> step_;
  std::vector<Address> memory_;   // of each bucket
  std::vector<py::object> kept_;  // its owners
  bool wide_ = false;
};

}  // namespace

void bind_data_parallel(py::module_& module) {
  py::class_<StepResult>(module, "StepResult")
      .def_readonly("committed", &StepResult::committed)
      .def_readonly("step", &StepResult::step)
      .def_readonly("text", &StepResult::text);
  py::class_<DataParallel>(module, "DataParallel")
      .def(py::init<std::shared_ptr<Session>, const std::vector<ParameterTuple>&, const py::dict&>())
      .def_property_readonly("bucket_elements", &DataParallel::bucket_elements)
      .def_property_readonly("places", &DataParallel::places)
      .def("give_memory", &DataParallel::give_memory)
      .def("gradient_ready", &DataParallel::gradient_ready)
      .def("backward_ended", &DataParallel::backward_ended)
      .def_property_readonly("in_backward", &DataParallel::in_backward)
      .def("used", &DataParallel::used)
      .def("set_density", &DataParallel::set_density)
      .def_property_readonly("step", &DataParallel::step)
      .def_property_readonly("num_buckets", &DataParallel::num_buckets)
      .def_property_readonly("sent_bytes", &DataParallel::sent_bytes)
      .def("save", &DataParallel::save)
      .def("load", &DataParallel::load);
}

}  // namespace weft::python
