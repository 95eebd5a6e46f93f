// Experts over several ranks (Lina; Li et al., ATC 2023): the copies of tokens travel to the ranks that hold
// their experts and back, in slices, so that experts compute on one while others are on their way.
//
// A layer of experts is parts of a block (ExpertShape, weft/train/shape.h), and between them the moves of this
// strategy. In each micro-batch, for every slice s:
//
//   gate         says who goes where (route.h) and gives the rows of all slices
//   dispatch s   to each rank the rows of its experts: all slices start behind the gate, one after the other
//   experts s    as soon as slice s is here
//   combine s    the same rows back, as soon as they are computed
//   merge        of all slices
//
// and backward the same way, last slice first: behind the merge's backward the gradients of what combine
// brought go to the experts (combine back), behind that of an expert's slice the gradients of its rows come
// home (dispatch back). That is four all-to-alls a layer and micro-batch, each in slices. Gradients of
// parameters are held back from the moment at which an all-to-all is about to come: from the gate's beginning
// in forward and the merge's in backward (announced; weft/engine.h). How long that lasts is predicted: as long
// as the last time, and before there was one, of backward twice what the layer's forward took.
//
// Who receives how many rows: with a capacity it follows from every rank's number of tokens, which all ranks
// tell each other once in a micro-batch; without one the ranks tell each other how many rows go to each expert
// (counts), and dispatch waits for that on the engine.
//
// Bytes of a rank of g, rows of d values of s bytes, with a capacity: each all-to-all d s E/g times the sum of
// its own C over the other ranks on the way out, and of the others' C on the way home. An algorithm that passes
// rows on inside a node adds those (collectives/registry.h).
//
// Thread: one at a time, that of the driver. Memory: it outlives its operations.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "experts/route.h"
#include "step/strategy.h"
#include "weft/collective.h"
#include "weft/train/shape.h"

namespace weft {

struct ExpertsOptions {
  // affects results; equal on all ranks
  std::string name = "experts";
  RouteOptions route;
  DType dtype = DType::float32;  // of the rows
  // affects speed only
  bool holds = true;    // all-to-alls hold gradients back, also when they are about to come
  bool defers = false;  // and from a merge's backward to the end of its layer's last all-to-all
  bool whole = false;   // no message is cut
  std::string all_to_all = "auto";
  std::string packing;           // for people: what is said of it in rows
  std::uint32_t first_slot = 0;  // takes num_slots()
  std::uint32_t first_step = 0;  // number of the first micro-batch, in identities
};

// Of a slice.
enum class RowExchange : std::uint8_t { dispatch, combine, combine_back, dispatch_back };
inline constexpr int kRowExchanges = 4;

class Experts final : public Strategy {
 public:
  // Throws UsageError: experts that cannot be dealt to the ranks of the group.
  Experts(Engine& engine, const Comm& group, std::vector<ExpertShape> layers, ExpertsOptions options);

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  std::uint32_t num_slots() const override;
  std::vector<PlanRow> rows() const override;
  std::vector<Exchange> exchanges() const override;
  void weave(Weaver& weaver) const override;
  double announced(int exchange, const When& when) override;
  void computed(const Piece& piece) override;
  void start(int exchange, const When& when, TensorSource& tensors) override;
  Ticket ticket(int exchange, const When& when) const override;
  std::vector<Ticket> work() const override;
  void step_end() override;
  StepResult verdict() override { return {.committed = true, .step = 0, .bad = {}, .text = {}}; }
  void close(bool, double) override { step_bytes_ = ended_bytes_, formula_bytes_ = ended_formula_; }

  // Tokens of each micro-batch of the step, or of the evaluation, that is walked next; on all ranks, as many
  // micro-batches on each. Throws UsageError while something is under way.
  void set_tokens(std::span<const std::int64_t> of_micro_batch);

  int num_layers() const { return static_cast<int>(layers_.size()); }
  const ExpertShape& layer(int layer) const { return layers_[static_cast<std::size_t>(layer)]; }
  const ExpertsOptions& options() const { return options_; }
  int local_experts() const { return options_.route.experts / comm_.size(); }

  struct Rows {
    std::shared_ptr<std::byte[]> memory;
    std::int64_t count = 0;
    std::vector<std::int64_t> counts;  // of dispatch: of [source * local experts + expert]
  };
  // Whoever takes the memory shares it; the strategy lets go of it behind the piece that takes it, and has counts
  // from then on. REQUIRES: it was awaited.
  Rows arrived(int layer, RowExchange kind, int slice, int micro_batch) const;

  // Payload of rows that this rank sent in the step that was committed or rolled back last, and by formula: with a
  // capacity from the ranks' tokens alone, without one from the counts (in which rows that are passed on are not).
  std::uint64_t step_bytes() const { return step_bytes_; }
  std::int64_t formula_bytes() const { return formula_bytes_; }
  // Memory of rows that came and that no piece has taken yet, at most, since set_tokens().
  std::int64_t peak_row_bytes() const { return peak_row_bytes_; }
  // Of the step that has ended last: seconds of a slice's all-to-all in forward, out or home, on the mean, from when it may
  // begin on this rank; 0 where nothing travels.
  double forward_seconds() const { return forward_seconds_; }

 private:
  struct Slice {
    std::vector<std::int64_t> sent, got;  // elements to and from each rank, on the way out
    std::vector<std::int64_t> counts;     // rows that come: of [source * local experts + expert]
    std::array<Ticket, kRowExchanges> tickets;
    std::array<std::shared_ptr<std::byte[]>, kRowExchanges> memory;
    std::array<double, kRowExchanges> seconds{};
  };
  struct Flow {                                        // of a layer in a micro-batch
    std::vector<std::int32_t> counts, arrived_counts;  // rows of each expert that leave; that come, by source
    Ticket known;
    Time began{};                // its dispatch, in forward
    double forward_seconds = 0;  // from there to the merge's end
    std::vector<Slice> slices;
  };
  struct MicroBatch {
    std::int64_t own_tokens = 0;
    std::vector<std::int64_t> tokens;  // of each rank
    Ticket known;
    std::vector<Flow> layers;
  };
  // What an exchange of the list is.
  struct Kind {
    enum class Of : std::uint8_t { tokens, counts, rows };
    Of of = Of::tokens;
    int layer = 0;
    RowExchange rows = RowExchange::dispatch;
    int slice = 0;
  };
  bool capped() const { return options_.route.capacity_factor > 0; }
  bool alone() const { return comm_.size() == 1; }
  AllToAllOptions exchange_options(const MicroBatch& batch, std::int64_t width) const;
  int place_of(int layer, RowExchange kind, int slice) const;
  int place_of_counts(int layer) const;
  TensorName tensor_of(const Kind& kind) const;
  SubmitOptions submit_options(int exchange, const When& when, std::string_view title) const;
  void start_tokens(int exchange, const When& when);
  void start_counts(int exchange, const Kind& kind, const When& when, TensorSource& tensors);
  void start_rows(int exchange, const Kind& kind, const When& when, TensorSource& tensors);
  void take_counts(const Kind& kind, const When& when, TensorSource& tensors);
  void learn_arrivals(const MicroBatch& batch, Flow& flow, std::int64_t width) const;
  Flow& flow(int layer, int micro_batch);
  const Flow& flow(int layer, int micro_batch) const;
  void let_go(Slice& slice, RowExchange kind);
  std::int64_t memory_bytes(const Slice& slice, RowExchange kind) const;
  static Ticket before_it(const Flow& flow, const Kind& kind);
  static Task<void> travel(Comm comm, Experts* me, MicroBatch* batch, Flow* flow, Kind kind, Dense rows);

  Engine& engine_;
  Comm comm_;
  std::vector<ExpertShape> layers_;
  ExpertsOptions options_;
  std::vector<Kind> kinds_;  // of each exchange
  std::vector<std::unique_ptr<MicroBatch>> batches_;
  struct Held {
    Time since{};
    double seconds = 0;  // the last time; 0: not yet
  };
  std::vector<Held> held_;    // of each exchange that is announced, from there to its start
  std::uint32_t walked_ = 0;  // micro-batches before those of this step
  LinkCost link_;
  std::atomic<std::uint64_t> sent_bytes_ = 0;  // since set_tokens()
  std::atomic<std::int64_t> row_bytes_ = 0, peak_row_bytes_ = 0;
  std::uint64_t ended_bytes_ = 0, step_bytes_ = 0;
  std::int64_t ended_formula_ = 0, formula_bytes_ = 0;
  double forward_seconds_ = 0;
};

}  // namespace weft
