// The step of sharded tables, as Python pushes it: one block for each table, in the order of their use.
//
//   announce, begin      up to the rows of the first table
//   read(t)              up to those of table t
//   end_forward          the ids of the next batch, which was announced before, go out
//   end_backward         gradients go out, the last table's first; the step is under way
//   settle               nothing is under way any more
// Where updates wait it settles in two calls: judge(), up to the verdict, and update().
//
// Ranks compare their tables when they are made, and the rules of their rows in every step: in the first one
// before a row changes, later beside the exchange of the gradients. What was found then is said when the next
// gradients come, or where the step settles.
//
// Thread: one at a time, with the interpreter's lock.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "agreed.h"
#include "embedding/hybrid.h"
#include "step/run_step.h"
#include "weft/world.h"

namespace weft::python {

struct TableSpec {
  TableInfo info;
  DType dtype = DType::float32;
  OptimizerOptions optimizer;
  int group = 0;  // tables of one group have the same rule in every step
};

struct TablesStepOptions {
  // affects results; equal on all ranks
  double divisor = 0;  // of the sum over the ranks; 0: their number
  bool waits = false;  // updates wait for judge(); nothing is known or looked up ahead then
  bool skips = false;  // a step that is not finite is left out; else it is an Error
};

// What the user's own code says of the step: gradients that are exchanged elsewhere count in the norm, and
// may keep the step from being committed.
class Outside final : public Strategy {
 public:
  explicit Outside(const Comm& world) : world_(world) {}
  void say(double squares, std::string veto) {
    squares_ = squares;
    veto_ = std::move(veto);
  }

  std::string_view name() const override { return "outside"; }
  const Comm& group() const override { return world_; }
  std::uint32_t num_slots() const override { return 0; }
  std::vector<PlanRow> rows() const override { return {}; }
  std::vector<Exchange> exchanges() const override { return {}; }
  void weave(Weaver&) const override {}
  Ticket ticket(int, const When&) const override { return {}; }
  StepResult verdict() override { return {.committed = veto_.empty(), .step = 0, .bad = {}, .text = veto_}; }
  double squares() const override { return squares_; }
  void close(bool, double) override { say(0, {}); }

 private:
  Comm world_;
  double squares_ = 0;
  std::string veto_;
};

class TablesStep final : public Driver {
 public:
  // Throws UsageError, also where ranks disagree: on all of them.
  TablesStep(World& world, const std::vector<TableSpec>& tables, const TablesStepOptions& options,
             std::uint32_t first_slot);

  Strategies& strategies() { return strategies_; }
  int num_tables() const { return static_cast<int>(places_.size()); }
  HybridTable& table(int t);  // Throws UsageError where there is none.
  std::vector<HybridEmbedding*> embeddings() const { return embeddings_; }
  bool in_step() const { return walker_.walking(); }
  bool under_way() const { return strategies_.under_way(); }

  // Of each table, of the step that begins next; `reads`: their rows are to come. Throws UsageError for an id
  // that has no row.
  void announce(const std::vector<std::span<const std::int64_t>>& ids, bool reads);
  void begin();
  void read(int t);
  void end_forward();
  struct Gradient {
    Dense values;  // of the rows of the list, all columns; read until the step has settled
    OptimizerOptions rule;
  };
  void end_backward(const std::vector<Gradient>& gradients);
  void settle();
  // `clip_norm` 0: gradients stay as they are. Gives the verdict; strategies() knows norm and scale.
  StepResult judge(double clip_norm, double squares, std::string veto);
  void update();

  // Until nothing that was started changes a table any more; also inside of a step.
  void rest();
  // Until nothing is under way, then starts it: `out` is written until the ticket is done.
  Ticket look_up(int t, std::span<const std::int64_t> ids, Dense out);
  // Rethrows its error. Throws pybind11::error_already_set after a signal: the operation then goes on.
  void await(const Ticket& ticket);

  Task<void> compute(Piece piece) override;
  Task<void> wait(Ticket ticket) override;

 private:
  struct Place {
    HybridEmbedding* embedding = nullptr;
    int local = 0;
  };
  template <class F>
  void walk(F go);
  void set_rule(HybridEmbedding& embedding, const OptimizerOptions& rule);
  void compare_tables(const std::vector<TableSpec>& tables);
  void compare_rules();
  void check_rules();

  TablesStepOptions options_;
  const std::uint32_t slot_;  // of comparisons
  std::uint32_t comparisons_ = 0;
  Agreement rules_;  // as they were when they were compared last
  Strategies strategies_;
  Walker walker_;
  Outside* outside_ = nullptr;
  std::vector<HybridEmbedding*> embeddings_;
  std::vector<Place> places_;  // of each table
  Piece at_;                   // that is computed, where it is in a step
  bool interrupted_ = false;
};

}  // namespace weft::python
