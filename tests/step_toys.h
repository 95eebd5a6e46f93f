// What tests of the step are made of: a driver that waits where it is, a strategy with blocking traffic.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "step/run_step.h"
#include "step/strategies.h"
#include "weft/collective.h"

namespace weft {

struct WaitingDriver : Driver {
  Task<void> wait(Ticket ticket) override {
    ticket.wait();
    co_return;
  }
};

// An exchange that blocks, at its place in the table and announced before it: between the backwards of the two
// blocks of a model.
class Courier final : public Strategy {
 public:
  enum class Awaits : std::uint8_t { before_backward, at_the_end, never };
  Courier(Engine& engine, const Comm& group, std::uint32_t slot, Awaits awaits = Awaits::before_backward,
          double predicted_seconds = 0)
      : engine_(engine), group_(group), slot_(slot), awaits_(awaits), predicted_seconds_(predicted_seconds) {}
  std::string_view name() const override { return "courier"; }
  const Comm& group() const override { return group_; }
  std::uint32_t num_slots() const override { return 1; }
  std::vector<PlanRow> rows() const override { return {}; }
  std::vector<Exchange> exchanges() const override {
    Exchange out{.name = "letters",
                 .traffic = TrafficClass::blocking,
                 .group = group_.group_id(),
                 .slot = slot_,
                 .predicted_seconds = predicted_seconds_};
    out.reads = {{TensorName::Of::other, "letters"}};
    out.writes = out.reads;
    return {out};
  }
  void weave(Weaver& weaver) const override {
    const Piece backward{Work::backward, 1, 0, 0};
    weaver.before(backward, announce_of(0));
    weaver.after(backward, start_of(0));
    if (awaits_ == Awaits::before_backward) weaver.before({Work::backward, 0, 0, 0}, wait_of(0, 0));
    if (awaits_ == Awaits::at_the_end && weaver.phase() != Phase::settle) weaver.at_end(wait_of(0, 0));
  }
  void start(int, const When&, TensorSource& tensors) override {
    const Dense data = tensors.tensor({TensorName::Of::other, "letters"});
    const SubmitOptions submit{
        .name = "letters", .traffic = TrafficClass::blocking, .slot = slot_, .step = step_++};
    ticket_ = engine_.submit(group_, submit, [data](Comm comm) { return all_reduce(comm, data); });
  }
  Ticket ticket(int, const When&) const override { return ticket_; }
  StepResult verdict() override { return {.committed = true}; }
  void close(bool committed, double) override { ++(committed ? commits : roll_backs); }
  int commits = 0, roll_backs = 0;

 private:
  Engine& engine_;
  Comm group_;
  std::uint32_t slot_, step_ = 0;
  Awaits awaits_;
  double predicted_seconds_;
  Ticket ticket_;
};

}  // namespace weft
