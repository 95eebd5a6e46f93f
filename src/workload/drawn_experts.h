// Layers of experts without a model: who goes where is drawn, rows are so many numbers that mean nothing; what
// travels, and how much of it, is real (experts/experts.h). For the emulated and the simulated driver.
//
// With a capacity every expert gets as many rows, and nothing is drawn. Without one every token draws as many
// different experts as it has choices, each as likely as any other: of (seed, rank, step, micro-batch, layer).
//
// Thread: one at a time, that of the driver.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "step/strategy.h"
#include "workload/emulate.h"
#include "workload/job_strategies.h"
#include "workload/outline.h"

namespace weft {

// Of a rank's place.
ExpertLayout expert_layout(const EmulationOptions& options, int rank);
// Of the outline's experts, in this layout. Throws UsageError where the outline does not tell them apart, or
// they cannot be dealt.
ExpertOptions expert_options(const Outline& outline, const EmulationOptions& options, int rank);

class DrawnExperts final : public TensorSource {
 public:
  // All outlive it.
  DrawnExperts(const Outline& outline, const EmulationOptions& options, JobStrategies& job);

  void begin(std::int64_t step);
  Dense tensor(const TensorName& name) override;
  // That a slice's experts compute. REQUIRES: the piece is of a slice whose rows were awaited.
  std::int64_t rows(const Piece& piece) const;

 private:
  struct Named {
    int layer = 0, slice = 0;
    enum class What : std::uint8_t { dispatch, counts, combine, router } what = What::dispatch;
  };
  std::vector<std::int64_t> draw(std::int64_t step, int micro_batch, int layer, std::int64_t tokens) const;
  const std::vector<std::int64_t>& counts(int layer, int slice, int micro_batch) const;
  std::int64_t values_of(const Named& named, bool gradient, int micro_batch) const;

  JobStrategies& job_;
  std::uint64_t seed_;
  std::vector<std::int64_t> tokens_;  // of each micro-batch
  int rank_;
  std::map<std::string, Named> names_;
  // Of each micro-batch, layer and slice: rows of each expert.
  std::vector<std::vector<std::vector<std::vector<std::int64_t>>>> counts_;
  std::vector<float> values_;
};

}  // namespace weft
