// Hybrid embeddings (EmbRace, Li et al., ICPP 2022): tables are cut by columns over the ranks, and the rows
// that a batch reads travel instead of the tables. Whatever else the model has is somebody else's
// (data_parallel/).
//
// A step of a table. A rank's list: the ids of its batch, sorted, each once
//   1  ids       all ranks tell each other their lists: of the next batch, where it is known
//   2  rows      to each rank the rows of its list, own columns; so each has its rows with all columns
//   3  prior     the gradients of those rows come back the same way: to each rank its columns. No ids travel:
//                both ends know the lists. The owner of the columns adds in the order of the ranks, divides
//                once and updates
//
// Scheduling
//   horizontal   3 of a step, its update and 2 of the next step are a chain on the engine: the next rows are
//                under way as soon as they are right, and a table has the place of its first use
//   vertical     gradients of rows that some rank's next batch reads are prior; the others are delayed: they
//                travel with most slack and are applied before the next step's prior rows are. Row for row the
//                updates, and their order, are the same
//   two-sided    of the next batch, rows that no rank reads now are looked up before backward ends
// Where a step may be left out or clipped the update is behind the verdict, so nothing is delayed.
//
// Bytes of a rank with w of d columns and U of the sum S of all ids in the lists, values of s bytes:
//   ids 4 U (size - 1); rows w (S - U) s; prior and delayed together (d - w) U s
//
// Optimizers: rows without a gradient stay as they are, with their moments (state/optimizer.h); the number of
// the step that a rule has in it counts committed steps.
//
// Thread: one at a time, that of the driver. Memory: it outlives its operations.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "embedding/options.h"
#include "embedding/table.h"
#include "step/strategy.h"

namespace weft {

class HybridEmbedding final : public Strategy {
 public:
  // Throws UsageError.
  HybridEmbedding(Engine& engine, const Comm& comm, const std::vector<TableInfo>& tables,
                  HybridOptions options);
  ~HybridEmbedding() override;

  std::string_view name() const override { return options_.name; }
  const Comm& group() const override { return comm_; }
  std::uint32_t num_slots() const override {
    return 1 + kTableExchanges * static_cast<std::uint32_t>(tables_.size());
  }
  std::vector<PlanRow> rows() const override;
  std::vector<Exchange> exchanges() const override;
  void weave(Weaver& weaver) const override;
  std::vector<std::string> gradients() const override;
  bool has_shards() const override { return options_.cut != TableCut::none; }

  void step_begin() override;
  // One lookup of each table. Throws UsageError.
  void batch_known(const BatchInfo& batch) override;
  // Of the rows of this rank's list, all columns: the sum over all tokens that read a row. It is read until
  // the exchange of prior rows is done.
  void gradient_ready(int parameter, std::span<const float> gradient) override;
  void gradient_ready(int parameter, std::span<const double> gradient) override;
  void step_end() override;
  void start(int exchange, const When& when, TensorSource& tensors) override;
  Ticket ticket(int exchange, const When& when) const override;
  std::vector<Ticket> work() const override;
  StepResult verdict() override;
  double squares() const override;
  void close(bool committed, double scale) override;

  int num_tables() const { return static_cast<int>(tables_.size()); }
  int find(std::string_view name) const;  // -1: there is none
  HybridTable& table(int table) { return *tables_[static_cast<std::size_t>(table)]; }
  const HybridTable& table(int table) const { return *tables_[static_cast<std::size_t>(table)]; }
  const HybridOptions& options() const { return options_; }

  // Payload that this rank has sent in exchanges that have ended, of all tables. Any thread.
  std::uint64_t sent_bytes() const;
  // Payload of this rank in the step that was committed or rolled back last, of all tables: what it sent, and
  // by formula (formula.h). `link`: by which all-reduces are chosen. REQUIRES: the step's exchanges are done,
  // and no second step was begun behind it.
  std::uint64_t step_bytes() const;
  std::int64_t formula_bytes(const LinkCost& link) const;

  // For gradients that come from now on.
  void set_lr(double lr) { optimizer_.set_lr(lr); }
  // REQUIRES: nothing is under way.
  void set_rule(const OptimizerOptions& rule) { optimizer_.set_options(rule); }
  const Optimizer& optimizer() const { return optimizer_; }
  // For the registry: values of the tables, of the kind that the model's other parameters have; and what the
  // optimizer keeps. `peers`: all ranks. The accesses live as long as this.
  std::vector<LiveRow> value_rows(std::string_view owner, std::string_view kind, const Peers& peers);
  std::vector<LiveRow> optimizer_rows(const Peers& peers);

 private:
  struct Kind {
    int table = 0;
    TableExchange exchange = TableExchange::ids;
  };
  int place_of(int table, TableExchange exchange) const;
  Peers holders(const Peers& all) const;  // of what this rank has of a table
  std::string why_of(const HybridTable& table) const;

  Comm comm_;
  HybridOptions options_;
  Optimizer optimizer_;
  std::vector<std::unique_ptr<HybridTable>> tables_;
  std::vector<Kind> kinds_;  // of each exchange behind the comparison of plans
  Ticket comparison_;
  std::int64_t committed_ = 0;
};

}  // namespace weft
