// Data parallel: gradients are summed over the ranks in buckets, while backward still runs.
//
//   DataParallel dp(engine, engine.world(), parameters, options);
//   for each step:
//     dp.gradient_ready(parameter, span);  // as backward produces them, in an order of each rank's own
//     dp.step_end();                       // parameters that got no gradient count as zeros
//     for (const Ticket& t : dp.tickets()) t.wait();  // or co_await t, or do something else
//     const StepResult result = dp.finish();
//     if (result.committed) dp.copy_to(outputs);  // else result.text says which gradients are to blame
//
// The next forward need not wait for all of them: when a bucket's ticket is done, result_of(parameter, out)
// has what its parameters are to be updated with. It throws where that result is not finite.
// finish() comes all the same, when all tickets are done and before the next step's first gradient.
//
// A bucket is submitted when its last gradient is there: slot = first_slot + 1 + its index, priority = its
// place in the next forward. Ranks may complete buckets in any order: their identities are the same
// everywhere.
//
// A step happens on all ranks or on none: every bucket's result carries the verdict "finite" to all of them
// in its own messages. If one is not finite no state changes anywhere; only then the ranks of that bucket's
// operation also exchange which of its parameters are to blame, so that each of them can name parameter and
// rank. After an error (of a peer or a link) finish() changes nothing on this rank and rethrows; whoever
// rebuilds compares state().step() between ranks.
//
// Recipe: density warm-up, momentum correction and clipping are the same for all sparse rows: docs/recipe.md.
// With momentum correction what goes in is the velocity, momentum times the last one + gradient; where the
// ranks' selection sent an entry the velocity is 0 on all of them, and where nothing is selected (dense
// buckets, or a quota of all elements) it stays: the results are then those of SGD with momentum.
//
// Mass: what went in and old residuals = results (before the division) + new residuals, summed over ranks,
// for the residual rules that conserve it. Values are divided once, here, by the divisor. So what counts of
// residuals and velocities is their sum over the divisor: it stays where a job goes on with another one, as on
// other numbers of ranks (state.h), and what was left behind moves the weights as far as it would have.
//
// Thread: one at a time; never waits, computes no more than the copy of a gradient into its bucket. Memory:
// it must outlive its operations (tickets done, or the engine shut down).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data_parallel/bucket_run.h"
#include "data_parallel/buckets.h"
#include "data_parallel/quotas.h"
#include "data_parallel/schemes.h"
#include "data_parallel/state.h"
#include "state/registry.h"
#include "step/strategy.h"
#include "weft/engine.h"
#include "weft/sparse.h"
#include "weft/train/scheme_options.h"

namespace weft {

class DataParallel final : public Strategy {
 public:
  // Submits a comparison of the ranks' plans, which is among the first step's tickets. Throws UsageError.
  // `registry` (null: one of its own) holds what is kept between steps, outlives it, and is committed or
  // rolled back by finish().
  DataParallel(Engine& engine, const Comm& comm, std::vector<ParameterInfo> parameters,
               DataParallelOptions options, StateRegistry* registry = nullptr);
  ~DataParallel() override;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  // Of a sum in two steps, its first and its second group; else none.
  std::vector<Comm> steps() const { return row_.valid() ? std::vector{row_, column_} : std::vector<Comm>{}; }
  // As many as there could be buckets, whatever the plan; the comparison of plans before them, the question
  // who used what behind them.
  std::uint32_t num_slots() const override { return 2 + static_cast<std::uint32_t>(plan_.num_parameters()); }
  std::vector<PlanRow> rows() const override;
  // The comparison of plans, the buckets, and which parameters were used.
  std::vector<Exchange> exchanges() const override;
  void weave(Weaver& weaver) const override;
  std::vector<std::string> gradients() const override;
  std::string why_updates_wait() const override;
  Ticket ticket(int exchange, const When& when) const override;

  // From now on, until replan(), the gradients of a bucket are gathered in this memory, of the bucket's
  // length and the gradients' type: parameter p at plan().first_of(p). A gradient that lies there already is
  // not copied, and averages land there: of a bucket that is sent whole as its ticket ends, of others by
  // fill_memory(). Between steps, on all ranks alike; it must stay as this object must. Throws UsageError.
  void give_memory(int bucket, std::span<float> memory);
  void give_memory(int bucket, std::span<double> memory);

  // `gradient` is read until the step's tickets are done (where no memory was given, a parameter that is
  // alone in its bucket is not copied). Throws UsageError for a wrong length, or a second gradient in one
  // step.
  void gradient_ready(int parameter, std::span<const float> gradient) override;
  void gradient_ready(int parameter, std::span<const double> gradient) override;
  void step_end() override;
  std::span<const Ticket> tickets() const { return tickets_; }  // submitted since the last finish()
  StepResult verdict() override;
  double squares() const override;
  void stage() override;
  void close(bool committed, double scale) override;
  // For use alone: verdict(), then the registry's commit or roll-back.
  StepResult finish();

  // The sum over the divisor, of one parameter. REQUIRES: its ticket is done, without an error; the next step
  // has not begun. Throws UsageError, with the sentence of finish(), where the sum is not finite.
  void result_of(int parameter, std::span<float> out) const override;
  void result_of(int parameter, std::span<double> out) const override;
  // Some rank had a gradient for it, or (unless such parameters stay out) what earlier steps left behind
  // brought it something: then it must be updated, or that mass is lost. The same on all ranks. REQUIRES:
  // find_unused; all tickets are done.
  bool used(int parameter) const override;

  // The committed sum over the divisor, until the next step's first gradient. outputs[p], of the parameter's
  // length, is overwritten; an empty one is skipped. It may be the gradient's own memory.
  void copy_to(std::span<const std::span<float>> outputs) const;
  // The same, into the memory that was given (give_memory), where it is not there yet.
  void fill_memory();
  // Only what is not zero; of one parameter in no particular order.
  void for_each(const std::function<void(int parameter, std::int64_t index, float value)>& f) const;

  // For use alone. Between steps, on all ranks alike. Parameters keep their numbers; residuals go with them.
  // `use`: a new place in the forward for each parameter, or empty. Throws UsageError where a registry was
  // given: tables of moves that others walk are of the plan.
  void replan(const BucketOptions& buckets, std::span<const int> use = {});
  void set_density(double density);  // for a warm-up
  // Of all that is in the registry, for use alone. load(): snapshots of all ranks of a job of any size, or
  // this rank's own; StateRegistry::load().
  StateSnapshot save();
  void load(std::span<const StateSnapshot> snapshots);

  // Of the last step that has ended, where clip_local is set: the norm of this rank's share of the averaged
  // gradient, before it was clipped.
  double local_norm() const { return local_norm_; }

  const BucketPlan& plan() const { return plan_; }
  const ParameterState& state() const { return *state_; }
  // Of each bucket in this step; a dense one has all its elements.
  const std::vector<std::int64_t>& quotas() const { return quotas_; }
  const SparseResult& result(int bucket) const;  // no entries where the average is in the bucket's memory
  // Payload that this rank sent in the step that was committed or rolled back last.
  std::uint64_t sent_bytes() const { return sent_bytes_; }
  // Processor time of a bucket's computations (selecting, coding, adding up) on this rank, in that step.
  double computed_seconds(int bucket) const {
    return runs_[static_cast<std::size_t>(bucket)]->computed_seconds;
  }
  // The operation of a bucket in the last step: its call, and the step of its identity (until finish()).
  const SparseOptions& call(int bucket) const;
  std::uint32_t operation_step() const { return attempt_; }
  // Of powersgd: what a bucket sums, else none; and the bytes that each rank sends in a step where both sums
  // have those of a ring. What a rank did send: result(bucket).entry_bytes_sent().
  const LowRank* low_rank(int bucket) const;
  const SchemeOptions& scheme_options() const { return options_.scheme; }
  double low_rank_bytes() const;

 private:
  void lay_out();
  void submit_comparison();
  std::uint64_t hash() const;
  std::unique_ptr<LowRank> low_rank_of_bucket(const Bucket& bucket);
  void assign_quotas();
  void begin_step();
  template <class T>
  void give(int bucket, std::span<T> memory);
  int accept(int parameter, std::size_t count, DType dtype);
  void arrived(int bucket);
  void submit(int bucket);
  bool is_submitted(int bucket) const;
  void submit_unused();
  double local_scale();
  const BucketRun& finished_run(int parameter, std::size_t count) const;
  void require_between_steps(const char* what) const;
  std::string name_of_bucket(int bucket) const;
  std::uint32_t unused_slot() const { return options_.first_slot + num_slots() - 1; }
  std::string codec_of(int bucket) const;
  std::string why_of(int bucket) const;
  std::string why_so(int bucket) const;  // why this scheme
  StepResult verdicts() const;

  Engine& engine_;
  Comm comm_;
  Comm row_, column_;  // of a sum in two steps; else not valid
  DataParallelOptions options_;
  const Scheme& scheme_;
  BucketPlan plan_;
  std::unique_ptr<StateRegistry> own_registry_;  // where none was given
  StateRegistry* registry_ = nullptr;
  std::unique_ptr<ParameterState> state_;
  std::vector<std::unique_ptr<BucketRun>> runs_;
  std::vector<std::int64_t> quotas_;
  std::vector<bool> ready_;         // of each parameter
  std::vector<std::int32_t> used_;  // on some rank, where the ranks are asked
  std::vector<double> squares_;     // of each parameter's gradient, where clip_local is set
  double local_norm_ = 0;
  std::uint64_t sent_bytes_ = 0;
  std::vector<Ticket> tickets_;
  Ticket comparison_, unused_;  // among them
  Ticket last_;                 // of the bucket that was submitted last
  int next_ = -1;               // where they go one at a time: that is submitted next
  std::uint32_t attempt_;       // step of the operations: also counts what was not committed
  enum class At : std::uint8_t { between, open, ended } at_ = At::between;
  bool has_result_ = false;
};

}  // namespace weft
