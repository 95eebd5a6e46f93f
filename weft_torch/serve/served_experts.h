// The experts of a decoder over several ranks (src/experts/serving.h): rows go to the ranks where their experts are
// placed, are computed there by torch on the process's worker pool, and come back.
//
// All ranks have all weights: a placement changes who computes, nothing has to move.
//
// With the placement lina, what this rank's tokens choose is recorded while it serves: estimates go by the
// profile that was given, if one was, and by what came since. Every rank has a profile of its own; plans are
// made from the sum of the ranks' estimates, so they agree all the same.
//
// Thread: one, that of the rank.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "experts/serving.h"
#include "weft/world.h"
#include "weft_torch/serve/decoder.h"

namespace weft {

class ServedExperts final : public ExpertRunner, private ServingDriver {
 public:
  struct Options {
    PlacerOptions placer;                 // layers, choices, ranks and experts are the decoder's
    std::shared_ptr<Popularity> profile;  // of this rank; null: an empty one
  };
  // Both outlive it. Throws UsageError: experts that do not fit, a profile of another model.
  ServedExperts(World& world, const Decoder& decoder, Options options);

  void begin(std::int64_t tokens) override;
  void end() override;
  torch::Tensor pass(int layer, const torch::Tensor& rows, const torch::Tensor& chosen) override;
  void abandon(const std::exception_ptr& cause) noexcept { serving_->abandon(cause); }

  const ExpertServing& serving() const { return *serving_; }
  const Popularity& profile() const { return *profile_; }

 private:
  Dense rows_to_send(int layer, std::span<const std::int64_t> copies) override;
  Dense room(int layer, std::int64_t rows) override;
  Dense room_for_return(int layer, std::int64_t rows) override;
  Task<void> compute(Comm comm, int layer, std::span<const std::int64_t> counts) override;
  void compute_here(int layer, std::span<const std::int64_t> counts);

  World& world_;
  const Decoder& decoder_;
  std::shared_ptr<Popularity> profile_;
  std::unique_ptr<ExpertServing> serving_;
  torch::Tensor rows_, sent_, here_, returned_;
  torch::Tensor order_;               // copies in the order in which they left
  std::vector<std::int32_t> chosen_;  // of a layer
  std::vector<std::int32_t> paths_;   // of the step: [token][layer][choice]
};

}  // namespace weft
