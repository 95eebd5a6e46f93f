// A trained model that generates text on several ranks: requests are dealt to them, and tokens of all ranks go to
// their experts together (served_experts.h). No torch in this header.
//
// Random numbers of a request are of its seed and the place of the token alone: what it gets does not depend on who
// is served beside it, on which rank, or on where the experts are (up to rounding, where experts compute other
// numbers of rows at once).
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "experts/placer.h"
#include "experts/popularity.h"
#include "weft/train/model_options.h"
#include "weft/world.h"

namespace weft {

struct GenerateRequest {
  std::vector<std::int64_t> tokens;  // of the prompt, at least one
  std::int64_t max_tokens = 32;      // to generate; fewer where the context ends
  double temperature = 0;            // 0: always the likeliest token
  int top_k = 0;                     // only so many of the likeliest; 0: all
  std::uint64_t seed = 0;
};

// Weights, for all ranks that are threads of this process.
class ServedModel {
 public:
  virtual ~ServedModel() = default;
  virtual std::int64_t step() const = 0;  // of training
  virtual std::int64_t parameters() const = 0;
  virtual bool has_experts() const = 0;
  // Throws UsageError of one sentence for a request that this model cannot answer.
  virtual void check(const GenerateRequest& request) const = 0;
};
// The newest sound checkpoint in the folder. Throws UsageError: there is none, or it is of another model.
std::shared_ptr<const ServedModel> load_served_model(const std::string& checkpoints, const std::string& model,
                                                     const ModelOptions& sizes);

struct ServerOptions {
  // affects speed only; equal on all ranks
  PlacerOptions placer;                 // placement, most, check, tolerance, window, every
  std::shared_ptr<Popularity> profile;  // of this rank, which records into it; null: an empty one
};

// One of each rank. Thread: that of the rank.
class Server {
 public:
  // The world outlives it.
  Server(World& world, std::shared_ptr<const ServedModel> model, const ServerOptions& options);
  ~Server();

  // Tokens that follow each request's. All ranks call it with the same requests and get the same. REQUIRES:
  // ServedModel::check() lets them pass.
  std::vector<std::vector<std::int64_t>> answer(std::span<const GenerateRequest> requests);
  // This rank cannot go on: nothing is under way afterwards.
  void abandon(const std::exception_ptr& cause) noexcept;

  std::int64_t checks() const;        // of plans of experts, and
  std::int64_t replans() const;       // how many were made again
  const Popularity* profile() const;  // null: no experts

 private:
  class Core;
  std::unique_ptr<Core> core_;
};

}  // namespace weft
