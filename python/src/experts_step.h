// A layer of experts as Python pushes it: the block's own moves (experts/experts.h), walked alone for every call of
// the layer. Any number of calls are under way; each has a number, the same on all ranks, and is walked twice:
//
//   begin             up to the gate
//   go_on             its rows go out; up to the experts of the first slice, of the next one, ..., the merge, the end
//   begin_backward    up to the merge
//   go_on             the same way back
//
// Between two of them whoever computes takes what has arrived (arrived) and gives what goes out (give).
//
// Thread: one at a time, with the interpreter's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "experts/experts.h"
#include "experts/router.h"
#include "step/run_step.h"
#include "weft/world.h"

namespace weft::python {

struct ExpertsSpec {
  std::string name;
  RouteOptions route;
  std::int64_t width = 0;
  bool shared = false;  // a part of its own computes experts of every token while rows are on their way
  double balance_loss = 0, z_loss = 0;
  int ranks = 1;  // that the experts are dealt to; neighbours
  DType dtype = DType::float32;
};

// One strategy in every call of a layer: a move's micro-batch is the number of the call.
template <class S>
class OfCalls final : public Strategy {
 public:
  // Made for the call of that number; the plan is that of number 0, which is never walked.
  using Make = std::function<std::unique_ptr<S>(std::uint32_t call)>;
  explicit OfCalls(Make make) : make_(std::move(make)), plan_(make_(0)) {}

  S& add(int call) { return *(calls_[call] = make_(static_cast<std::uint32_t>(call))); }
  S& at(int call) const { return *calls_.at(call); }
  void remove(int call) { calls_.erase(call); }

  std::string_view name() const override { return plan_->name(); }
  const Comm& group() const override { return plan_->group(); }
  std::uint32_t num_slots() const override { return plan_->num_slots(); }
  std::vector<PlanRow> rows() const override { return plan_->rows(); }
  std::vector<Exchange> exchanges() const override { return plan_->exchanges(); }
  void weave(Weaver& weaver) const override { plan_->weave(weaver); }
  void start(int exchange, const When& when, TensorSource& tensors) override {
    at(when.micro_batch).start(exchange, {when.offset, 0}, tensors);
  }
  Ticket ticket(int exchange, const When& when) const override {
    const auto found = calls_.find(when.micro_batch);
    return found == calls_.end() ? Ticket{} : found->second->ticket(exchange, {when.offset, 0});
  }
  double announced(int exchange, const When& when) override {
    return at(when.micro_batch).announced(exchange, {when.offset, 0});
  }
  std::vector<Ticket> work() const override {
    std::vector<Ticket> out;
    for (const auto& [number, strategy] : calls_) {
      for (const Ticket& ticket : strategy->work()) {
        if (ticket.valid()) out.push_back(ticket);
      }
    }
    return out;
  }
  StepResult verdict() override { return {.committed = true, .step = 0, .bad = {}, .text = {}}; }
  void close(bool, double) override {}

 private:
  Make make_;
  std::unique_ptr<S> plan_;
  std::map<int, std::unique_ptr<S>> calls_;
};

class ExpertsStep;

// One call: the driver of its two walks.
class ExpertCall final : public Driver {
 public:
  ExpertCall(ExpertsStep& step, int number);

  // Where a walk has stopped.
  struct Stop {
    enum class At : std::uint8_t { gate, shared, slice, merge, end } at = At::end;
    int slice = 0;
  };
  Stop begin_forward(std::int64_t tokens);
  Stop begin_backward();
  Stop go_on();
  bool walking() const { return walker_.walking(); }
  bool was_backward() const { return backward_; }

  // `choices`: of each token. Throws UsageError.
  const Route& route(std::span<const std::int64_t> choices);
  // What goes out at the next start of that kind; read until it is awaited. Of dispatch: rows of all slices.
  void give(RowExchange kind, int slice, Dense rows);
  void give_router(std::span<const double> values);
  // Rows of a slice that came, and of dispatch how many of each source and own expert.
  Experts::Rows arrived(RowExchange kind, int slice) const;

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;
  Dense tensor(const TensorName& name) override;

 private:
  Stop walk(const std::function<void()>& go);
  std::span<const std::int64_t> counts(int slice) const;

  ExpertsStep& step_;
  int number_;
  Table forward_table_, backward_table_;
  Walker walker_;
  Stop stop_;
  bool backward_ = false;
  Route route_;
  std::vector<std::int64_t> first_;  // row of each slice, and their number
  std::vector<double> router_;
  Dense rows_;
  std::vector<std::array<Dense, kRowExchanges>> given_;  // of each slice
};

class ExpertsStep {
 public:
  // Throws UsageError. Where ranks disagree, what the tickets say.
  ExpertsStep(World& world, ExpertsSpec spec, std::uint32_t first_slot);

  const ExpertsSpec& spec() const { return spec_; }
  std::uint32_t num_slots() const;  // in any group
  Strategies& strategies() { return strategies_; }
  const ExpertShape& layer() const { return strategies_.shape().experts.front(); }
  int replicas() const { return replicas_.size(); }
  Table forward_table(int call) const { return numbered(forward_, call); }
  Table backward_table(int call) const { return numbered(backward_, call); }

  // Gives its number.
  int begin(std::int64_t tokens);
  ExpertCall& call(int number);
  Experts& experts(int number) { return experts_->at(number); }
  RouterSums& sums(int number);  // waits for them
  // Sums values over the ranks that hold the same experts; a call sums once.
  Ticket reduce(int number, Dense values);
  // Nobody will ask for it again. Whether all of it has ended: else it stays until then.
  bool forget(int number);
  bool has(int number) const { return calls_.contains(number); }
  std::vector<Ticket> tickets() const;
  // Rethrows its error. Throws pybind11::error_already_set after a signal: the operation then goes on.
  void await(const Ticket& ticket);

  template <class F>
  auto uninterrupted(F work) {
    if (interrupted_)
      throw UsageError("a call of layer '" + spec_.name +
                       "' was interrupted: this job cannot go on (start it again from a checkpoint)");
    interrupted_ = true;
    auto out = work();
    interrupted_ = false;
    return out;
  }

 private:
  static Table numbered(Table table, int call);

  ExpertsSpec spec_;
  Strategies strategies_;
  Comm replicas_;
  std::uint32_t first_slot_;
  OfCalls<Experts>* experts_ = nullptr;
  OfCalls<RouterSums>* sums_ = nullptr;
  Table forward_, backward_;
  std::map<int, std::unique_ptr<ExpertCall>> calls_;
  std::vector<int> forgotten_;  // whose operations have not ended
  std::map<int, Ticket> reduced_;
  int next_ = 0;
  bool interrupted_ = false;
};

}  // namespace weft::python
