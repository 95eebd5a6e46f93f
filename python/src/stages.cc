#include "stages.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "exchange_options.h"
#include "region.h"
#include "session.h"
#include "snapshot.h"
#include "stages_step.h"
#include "weft/error.h"

namespace weft::python {

namespace py = pybind11;

namespace {

using ParameterTuple = std::tuple<std::string, std::vector<std::int64_t>>;  // name, sizes
// stages, schedule, chunks of each, whether the warm-up is doubled, modules of each chunk, stages under the
// scheme
using StageTuple = std::tuple<int, std::string, int, bool, std::vector<int>, int>;
// columns, bits, messages, lazy error, seed
using BackwardTuple = std::tuple<int, int, std::string, bool, std::uint64_t>;
// parameters of all modules, those of each, stages, what goes back between them, micro-batches
using SpecTuple =
    std::tuple<std::vector<ParameterTuple>, std::vector<std::vector<int>>, StageTuple, BackwardTuple, int>;
// "forward", "backward", "weights" or "end", module, micro-batch, parameters whose gradients are complete behind it
using StopTuple = std::tuple<std::string, int, int, std::vector<int>>;
// first module, how many, whether something arrives, leaves
using ChunkTuple = std::tuple<int, int, bool, bool>;

// What ranks have alike, and its value.
using Lines = std::vector<std::tuple<std::string, std::string>>;

StagesSpec spec_of(const SpecTuple& spec, const py::dict& options) {
  const auto& [parameters, modules, stage, backward, micro_batches] = spec;
  StagesSpec out;
  for (const auto& [name, dims] : parameters) out.parameters.push_back({.name = name, .dims = dims});
  out.modules = modules;
  std::tie(out.stage.stages, out.stage.schedule, out.stage.chunks, out.stage.double_warmup, out.stage.layers,
           out.stage.compressed) = stage;
  std::tie(out.backward.columns, out.backward.bits, out.backward.messages, out.backward.lazy_error,
           out.backward.seed) = backward;
  out.micro_batches = micro_batches;
  out.parallel = exchange_options_of(options).exchange;
  return out;
}

StopTuple stop_of(const StagesStep::Stop& stop) {
  constexpr std::array<const char*, 4> names{"forward", "backward", "weights", "end"};
  return {names[static_cast<std::size_t>(stop.at)], stop.module, stop.micro_batch, stop.ready};
}

class Stages {
 public:
  Stages(std::shared_ptr<Session> session, const SpecTuple& spec, const py::dict& options)
      : session_(std::move(session)) {
    const std::uint32_t slot = session_->take_slots(2);
    step_ = std::make_shared<StagesStep>(session_->world(), spec_of(spec, options), slot);
  }
  ~Stages() {
    std::vector<Ticket> tickets = step_->tickets();
    if (std::ranges::all_of(tickets, &Ticket::done)) return;
    std::vector<py::object> objects = std::move(gradients_);
    for (auto& [place, kept] : kept_) objects.push_back(std::move(kept));
    session_->keep_until_done(
        {.tickets = std::move(tickets), .object = step_, .objects = std::move(objects)});
  }
  Stages(const Stages&) = delete;
  Stages& operator=(const Stages&) = delete;

  int stage() const { return step_->place().pp; }
  int data_rank() const { return step_->place().dp; }
  int data_size() const { return step_->mesh().dp; }
  // The first rank that has it.
  int owner_of(int module) const { return step_->mesh().rank_of({.dp = 0, .pp = step_->stage_of(module)}); }
  std::vector<ChunkTuple> chunks() const {
    std::vector<ChunkTuple> out;
    for (const ChunkShape& c : step_->shape().chunks)
      out.emplace_back(c.origin, c.count, !c.arrives.empty(), !c.leaves.empty());
    if (out.empty()) out.emplace_back(0, step_->shape().num_blocks(), false, false);
    return out;
  }
  // Of this stage: place among all, and how many ranks have it.
  std::vector<std::tuple<int, int>> parameters() const {
    std::vector<std::tuple<int, int>> out;
    for (int p = 0; p < static_cast<int>(step_->shape().parameters.size()); ++p)
      out.emplace_back(step_->origin_of_parameter(p), step_->holders_of(p));
    return out;
  }

  // Lines of all ranks, and those of a pipeline.
  void agree(const Lines& of_all, const Lines& of_pipeline) {
    std::vector<AgreedLine> lines;
    for (const Lines* each : {&of_all, &of_pipeline}) {
      for (const auto& [what, value] : *each) lines.push_back({what, value, each == &of_pipeline});
    }
    live().agree(lines);
  }
  // What this rank had to do for the others it has not done: they hear why, and no call goes on.
  void abandon(const std::string& text) {
    step_->interrupt();
    session_->abandon(text);
  }
  StagesStep::Passed tell(const StagesStep::Passed& mine) { return live().tell(mine); }
  bool is_installed() const { return step_->is_installed(); }
  void install(std::int64_t width) {
    StagesStep& step = live();
    step.install(width, session_->take_slots(step.num_slots()));
    // A walk that was left has announced what never comes.
    session_->before_close([mine = std::weak_ptr(step_)] {
      if (const std::shared_ptr<StagesStep> open = mine.lock()) open->job().all().withdraw();
    });
  }

  StopTuple begin(const std::vector<std::int64_t>& tokens, std::int64_t counted) {
    return stop_of(live().begin(tokens, counted));
  }
  StopTuple begin_forward(std::int64_t tokens) { return stop_of(live().begin_forward(tokens)); }
  StopTuple go_on() {
    const StopTuple out = stop_of(live().go_on());
    // Gradients that go to another stage were copied when they started, behind the piece that made them.
    std::erase_if(kept_, [](const auto& kept) { return std::get<1>(kept.first); });
    return out;
  }
  double scale() { return live().scale(); }
  StepResult finish(double loss) {
    StepResult out = live().finish(loss);
    let_go();
    return out;
  }
  std::optional<double> loss() const { return step_->loss(); }
  // The walk has ended: nobody reads what was given.
  void let_go() {
    const std::vector<py::object> gradients = std::exchange(gradients_, {});
    const std::map<Place, py::object> kept = std::exchange(kept_, {});
  }

  // `keep` holds the memory as long as somebody reads it.
  void give(int chunk, bool back, int micro_batch, const Memory& values, py::object keep) {
    live().give(chunk, back, micro_batch, dense_of(values));
    kept_[{chunk, back, micro_batch}] = std::move(keep);
  }
  // Where the gradient of an activation has come, its receiver has it, and the table has awaited that.
  Region arrived(int chunk, bool back, int micro_batch, std::int64_t count) {
    const std::shared_ptr<std::byte[]> memory = live().arrived(chunk, back, micro_batch);
    if (back) kept_.erase({chunk, false, micro_batch});
    return {memory, Dense(memory.get(), count, step_->spec().parallel.dtype)};
  }
  void gradient_ready(int parameter, const Memory& gradient, py::object keep) {
    check(parameter);
    live().gradient_ready(parameter, dense_of(gradient));
    gradients_.push_back(std::move(keep));
  }
  void result_of(int parameter, const Memory& out) {
    check(parameter);
    live().result_of(parameter, dense_of(out));
  }

  void set_density(double density) { live().job().parallel().set_density(density); }
  std::int64_t step() const { return step_->job().all().state().step(); }
  // Payload of this rank in the last step: between stages, and of gradients.
  std::tuple<std::uint64_t, std::uint64_t> sent_bytes() const {
    const Pipeline* const pipeline = step_->job().pipeline();
    const std::uint64_t between = pipeline == nullptr ? 0 : pipeline->step_bytes();
    return {between, step_->job().sent_bytes() - between};
  }
  py::dict save() { return to_python(live().save()); }
  void load(const std::vector<py::dict>& states) {
    std::vector<StateSnapshot> snapshots;
    for (const py::dict& state : states) snapshots.push_back(snapshot_of(state));
    live().load(snapshots);
  }

 private:
  StagesStep& live() {
    session_->world();  // says so where it is shut down
    return *step_;
  }
  void check(int parameter) const {
    if (parameter < 0 || static_cast<std::size_t>(parameter) >= step_->shape().parameters.size())
      throw UsageError("there is no parameter " + std::to_string(parameter) + " of this stage");
  }

  std::shared_ptr<Session> session_;
  std::shared_ptr<StagesStep> step_;
  using Place = std::tuple<int, bool, int>;  // chunk, whether it goes back, micro-batch
  std::map<Place, py::object> kept_;         // what travels between stages
  std::vector<py::object> gradients_;        // of this step
};

}  // namespace

void bind_stages(py::module_& module) {
  py::class_<Stages>(module, "Stages")
      .def(py::init<std::shared_ptr<Session>, const SpecTuple&, const py::dict&>())
      .def_property_readonly("stage", &Stages::stage)
      .def_property_readonly("data_rank", &Stages::data_rank)
      .def_property_readonly("data_size", &Stages::data_size)
      .def("owner_of", &Stages::owner_of)
      .def_property_readonly("chunks", &Stages::chunks)
      .def_property_readonly("parameters", &Stages::parameters)
      .def("agree", &Stages::agree)
      .def("abandon", &Stages::abandon)
      .def("tell", &Stages::tell)
      .def_property_readonly("is_installed", &Stages::is_installed)
      .def("install", &Stages::install)
      .def("begin", &Stages::begin)
      .def("begin_forward", &Stages::begin_forward)
      .def("go_on", &Stages::go_on)
      .def_property_readonly("scale", &Stages::scale)
      .def("finish", &Stages::finish)
      .def_property_readonly("loss", &Stages::loss)
      .def("let_go", &Stages::let_go)
      .def("give", &Stages::give)
      .def("arrived", &Stages::arrived)
      .def("gradient_ready", &Stages::gradient_ready)
      .def("result_of", &Stages::result_of)
      .def("set_density", &Stages::set_density)
      .def_property_readonly("step", &Stages::step)
      .def_property_readonly("sent_bytes", &Stages::sent_bytes)
      .def("save", &Stages::save)
      .def("load", &Stages::load);
}

}  // namespace weft::python
