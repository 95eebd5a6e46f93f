// The strategies that share a rank's training step: their slots, their tables, one verdict and one norm.
//
//   Strategies all(engine, world, shape, {.clip_norm = 1});
//   auto& dp = all.add(std::make_unique<DataParallel>(engine, world, parameters, options, &all.state()));
//   all.install();
//   Walker walker(driver, all);
//   for each step: walker.walk(all.next_table(micro_batches));
//   walker.walk(all.tables(micro_batches).settle);
//
// Slots: an exchange's identity has its group and its slot, so the slots of one group are dealt one after
// the other; every member of a group adds the strategies of that group in the same order. At installation the
// members of each group compare what they have planned for it: rows and exchanges.
//
// One step happens on all ranks of the world or on none. Where every strategy of every rank has the world as
// its group, each rank knows the verdict from the results themselves; else the ranks exchange what their groups found, in one
// short operation that also carries the squared lengths: a tensor that several ranks hold is answered for by
// the first of its group, so that the norm counts every element once.
//
// Where a step may be skipped or clipped (or a strategy says so) every update waits for the verdict;
// elsewhere updates go ahead, and a bad verdict is an Error on all ranks.
//
// Tokens: the loss is the sum over the counted tokens of all ranks, divided by their number, which the ranks
// agree on in one short exchange that also carries the last loss. With `lookahead` it is started one step
// ahead, when forward is over: batch_known() of the next batch comes before, and nobody waits for a rank that
// is behind by less than a backward. A loss that is not finite is an Error on all ranks that names step and
// rank, unless such steps are skipped.
//
// Thread: one at a time, that of the driver.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "state/registry.h"
#include "step/figures.h"
#include "step/stage.h"
#include "step/step_times.h"
#include "step/strategy.h"
#include "step/verify.h"

namespace weft {

struct StepOptions {
  // affects results; equal on all ranks
  double clip_norm = 0;          // of the averaged gradient of all parameters; 0: none
  bool skip_not_finite = false;  // leave such a step out on all ranks; else it is an Error
  bool tokens = true;            // agree on tokens and losses
  std::uint64_t compared = 0;    // of whatever else the caller's results depend on
  StageOptions stage;            // that the shape is of
  // affects speed only
  bool lookahead = false;        // batch_known() comes one step ahead
  std::string updates_wait;      // for all results, for this reason; empty: only where results need it
  std::uint32_t first_slot = 0;  // in every group
};

class Strategies {
 public:
  static constexpr std::string_view kOwnExchanges = "step";  // tokens, verdicts, comparisons of plans

  // Throws UsageError.
  Strategies(Engine& engine, const Comm& world, ModelShape shape, StepOptions options);
  ~Strategies();
  Strategies(const Strategies&) = delete;
  Strategies& operator=(const Strategies&) = delete;

  // The first slot of the next strategy on this group.
  std::uint32_t next_slot(const Comm& group) const;
  template <class S>
  S& add(std::unique_ptr<S> strategy) {
    S& out = *strategy;
    take(std::move(strategy));
    return out;
  }
  // Between two steps, for another layout of some tensors: these strategies go away, and those that are
  // added next stand in their places. `shape` has the same parts and parameters, some of other sizes.
  // install() comes behind it: all ranks, at the same step. Throws UsageError while a step is under way.
  void make_place(ModelShape shape, std::span<const Strategy* const> leaving);
  // After the last add(): who takes which gradient, tables, and a comparison of the ranks' plans. Throws
  // UsageError where a parameter has no strategy or several, or a table does not hold (verify.h).
  void install();

  const ModelShape& shape() const { return shape_; }
  const StepOptions& options() const { return options_; }
  Engine& engine() { return engine_; }
  // What lives between steps, of all strategies and of whoever else trains with them: one commit.
  StateRegistry& state() { return state_; }
  const Comm& world() const { return world_; }
  std::vector<PlanRow> rows() const;
  const std::string& why_updates_wait() const { return why_updates_wait_; }  // empty: they do not

  // Made and verified when they are asked for first. Throws UsageError where they do not hold.
  const Tables& tables(int micro_batches);
  VerifiedRank verified(int micro_batches) { return verified(tables(micro_batches), micro_batches); }
  // One micro-batch without its backward: nothing is learned. REQUIRES: nothing is under way.
  const Table& forward_table();
  // The first one where nothing is under way, else the steady one.
  const Table& next_table(int micro_batches);
  // That is walked, or was walked last, as it was numbered.
  std::uint32_t step() const { return static_cast<std::uint32_t>(step_); }
  bool under_way() const { return under_way_; }  // a step has ended and is not settled
  const Exchange& exchange(int number) const { return exchanges_[static_cast<std::size_t>(number)]; }
  const std::string& name_of(int number) const { return exchange(number).name; }
  // Strategy::name() of whose it is; of those of the list itself, kOwnExchanges.
  std::string_view strategy_of(int exchange) const;

  // ---- what the driver says ----
  // The number of the step that is walked next, for sentences; from 0 where nobody says it.
  void number_step(std::int64_t number);
  // Of the batch that is trained on next: before its step where there is no lookahead or nothing is under
  // way, else before the forward of the step before has ended.
  void batch_known(const BatchInfo& batch);
  // For the verdicts to come; all ranks, the same one (else a UsageError on all). REQUIRES: updates wait.
  void set_clip_norm(double norm) { options_.clip_norm = norm; }
  void loss_known(double sum) { loss_sum_ = sum; }  // of this rank, when forward has ended
  void gradient_ready(int parameter, std::span<const float> gradient);
  void gradient_ready(int parameter, std::span<const double> gradient);

  // ---- what the walker says ----
  void begin(const Table& table);
  void computing() { clock_.computing(engine_.now()); }
  void computed(const Piece& piece);
  void announce(const Move& move);
  void start(const Move& move, TensorSource& tensors);
  Ticket ticket(const Move& wait) const;
  void waited(const Move& wait, Time since);
  void end(const Table& table);

  // ---- what the driver asks ----
  // Counted tokens of all ranks in the step that is walked. REQUIRES: the exchange was awaited.
  double tokens() const { return tokens_; }
  void result_of(int parameter, std::span<float> out) const;
  void result_of(int parameter, std::span<double> out) const;
  bool used(int parameter) const;
  double update_scale() const { return scale_; }  // by which gradients are multiplied before an update
  // Of the step that was committed or rolled back in the table that is walked, or was walked last; none where
  // nothing was.
  const std::optional<StepResult>& result() const { return result_; }
  double gradient_norm() const { return norm_; }  // of that step, where it is clipped
  // The mean over its tokens of the step before the one that is walked, once it is known.
  std::optional<double> last_loss() const { return last_loss_; }
  // Of the step that was walked last, on this rank.
  const StepTimes& times() const { return clock_.times(); }
  // What was announced and has not started does not come: no walk goes on. Before the engine ends.
  void withdraw();
  // Everything that may be in flight: before memory goes away after an error.
  std::vector<Ticket> tickets() const;

 private:
  struct Place {  // of a parameter, or of an exchange
    int strategy = -1;
    int local = 0;
  };
  enum Own : int { kPlan, kVerdict, kBatch, kNumOwn };  // exchanges of the list itself, and their slots

  void take(std::unique_ptr<Strategy> strategy);
  template <class T>
  void hand_over(int parameter, std::span<const T> gradient);
  int num_own() const { return options_.tokens ? kNumOwn : kBatch; }  // that are in the list
  bool is_batch(int exchange) const { return options_.tokens && exchange == kBatch; }
  void list_exchanges();
  void compare();
  VerifiedRank verified(const Tables& tables, int micro_batches) const;
  Tables make_tables(int micro_batches) const;
  std::vector<Piece> order_of(Phase phase, int micro_batches) const;
  void weave_strategies(Weaver& weaver) const;
  void weave_own(Weaver& weaver) const;
  void gate(Table& table) const;
  void start_batch(int offset);
  void batch_agreed();
  void start_verdict();
  void take_verdict();
  std::string clips_apart() const;  // empty: all ranks clip to the same norm
  Strategy& at(int strategy) const { return *strategies_[static_cast<std::size_t>(strategy)]; }

  Engine& engine_;
  Comm world_;
  ModelShape shape_;
  StepOptions options_;
  StepClock clock_;
  StateRegistry state_;
  LinkFigures figures_;
  std::vector<std::unique_ptr<Strategy>> strategies_;
  std::map<std::uint64_t, std::uint32_t> taken_slots_;  // by group id: how many
  std::string why_updates_wait_;
  bool world_verdict_ = false;  // some rank has results that others have not
  std::vector<Exchange> exchanges_;
  std::vector<Place> owner_;      // of each exchange behind the own ones
  std::vector<Place> takes_;      // of each parameter
  std::map<int, Tables> tables_;  // by micro-batches
  std::optional<Table> forward_;
  std::vector<std::vector<int>> parameter_of_;  // of each strategy's own numbers
  std::uint32_t installed_ = 0;                 // how often: step of the comparisons
  Ticket comparison_;
  Wishes verdict_wishes_;                    // of all ranks: 1 where one needs the verdicts of others
  std::map<int, Ticket> group_comparisons_;  // by exchange: of groups other than the world

  std::int64_t step_ = -1, step_before_ = -1;  // that is walked, or was walked last; and the one before it
  std::optional<std::int64_t> next_number_;
  bool under_way_ = false, settles_ = false;
  std::vector<bool> announced_;  // of each exchange: it holds gradients back
  int backwards_left_ = 0;       // pieces of the table that is walked

  std::optional<BatchInfo> next_batch_;
  std::uint32_t batches_ = 0, verdicts_ = 0;           // exchanges so far: steps of their identities
  std::vector<double> batch_values_, verdict_values_;  // of each rank: tokens, loss; bad, squares, clip_norm
  Ticket batch_ticket_, verdict_ticket_;
  double tokens_ = 0, tokens_before_ = 0;  // of the step that is walked, and of the one whose loss is awaited
  double loss_sum_ = 0;
  bool loss_pending_ = false;
  std::int64_t loss_step_ = 0;  // whose loss is awaited
  std::optional<double> last_loss_;
  std::optional<StepResult> result_;
  double norm_ = 0, scale_ = 1;
};

// The tables of all ranks of a world, in order, together. Gives how many distinct ones there are. Throws
// UsageError where they do not hold.
int verify_together(std::span<Strategies* const> ranks, int micro_batches);

}  // namespace weft
