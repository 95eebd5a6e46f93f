// Tables that a hybrid embedding holds (embedding/hybrid.h), as a model reads them: the rows that a step looks
// up are a leaf of autograd, whose gradient goes to whoever holds the table.
//
// A leaf lives from the first forward that reads its table to the end of that step. Rows and gradients are in
// host memory; a model on a GPU gets copies.
//
// Thread: one, that of the rank.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "step/strategy.h"
#include "weft_torch/models/model.h"
#include "workload/job_strategies.h"

namespace weft {

// Makes a parameter of a model that was made without its tables the model's own, with its first values.
void bring_back(const Parameter& parameter, const ParameterShape& shape);

class HeldTables final : public TableHolder {
 public:
  // Each rank's part takes the values that the model has, or would begin with where it was made without them;
  // the model's own are then given free. Both outlive it.
  HeldTables(Model& model, JobStrategies& job);

  bool holds(std::string_view name) const;
  // Of a step on these batches, for every table; none of an empty batch. Valid until the next call.
  std::vector<BatchInfo::Lookup> lookups(std::span<const Batch> batches, const StepContext& context);
  torch::Tensor rows(int parameter, const torch::Tensor& ids) const override;

  // For what is no step: rows come as they are asked for, of all ranks that ask for rows of the same tables in
  // the same order. REQUIRES: nothing is under way.
  const TableHolder& outside() const { return outside_; }

  void before_forward(const Piece& piece);  // its rows are awaited: they are taken
  void after_backward(const Piece& piece);  // of the last micro-batch: gradients that are complete go out

  // All rows, on all ranks that call it. REQUIRES: nothing is under way.
  torch::Tensor whole(std::string_view name);

 private:
  struct Held {
    int in_model = 0;  // place among the model's parameters
    int place = 0;     // among those that are trained
    HybridTable* table = nullptr;
    Piece ready;             // behind which its gradient is complete
    torch::Tensor like;      // type and device of the model's parameter
    torch::Tensor ids;       // sorted, of the rows
    torch::Tensor rows;      // the leaf
    torch::Tensor gradient;  // of the rows, until the next step's
  };
  class Outside final : public TableHolder {
   public:
    explicit Outside(const HeldTables& tables) : tables_(tables) {}
    torch::Tensor rows(int parameter, const torch::Tensor& ids) const override;
    torch::Tensor block(int parameter, std::int64_t first, std::int64_t count) const override;

   private:
    const HeldTables& tables_;
  };
  const Held* find(std::string_view name) const;
  const Held* find(int in_model) const;
  static void look_up(const Held& held, const torch::Tensor& ids, const torch::Tensor& out);
  void take_over(const Parameter& parameter, Held& held) const;

  Model& model_;
  JobStrategies& job_;
  std::vector<Held> held_;
  std::vector<torch::Tensor> asked_;  // ids of the last lookups
  const Outside outside_{*this};
};

}  // namespace weft
