#include "weft_torch/serve/server.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "state/checkpoint.h"
#include "state/registry.h"
#include "weft/error.h"
#include "weft/random.h"
#include "weft_torch/serve/decoder.h"
#include "weft_torch/serve/served_experts.h"
#include "weft_torch/train/snapshot.h"

namespace weft {

namespace {

constexpr std::uint32_t kSampling = 0x7361'6d70u;  // "samp"

class LoadedModel final : public ServedModel {
 public:
  LoadedModel(std::shared_ptr<const Model> model, std::int64_t step)
      : decoder_(std::move(model)), step_(step) {}

  const Decoder& decoder() const { return decoder_; }
  std::int64_t step() const override { return step_; }
  std::int64_t parameters() const override { return decoder_.model().shape().num_elements(); }
  bool has_experts() const override { return !decoder_.experts().empty(); }
  void check(const GenerateRequest& request) const override;

 private:
  Decoder decoder_;
  std::int64_t step_;
};

void LoadedModel::check(const GenerateRequest& r) const {
  const auto refuse = [](const std::string& what) { throw UsageError(what); };
  const std::int64_t vocabulary = decoder_.model().options().vocabulary;
  if (r.tokens.empty()) refuse("the prompt is empty");
  if (static_cast<std::int64_t>(r.tokens.size()) >= decoder_.context())
    refuse("the prompt has " + std::to_string(r.tokens.size()) + " tokens, and a model of a context of " +
           std::to_string(decoder_.context()) + " takes at most " + std::to_string(decoder_.context() - 1));
  for (const std::int64_t token : r.tokens) {
    if (token < 0 || token >= vocabulary)
      refuse("token " + std::to_string(token) + " is not in a vocabulary of " + std::to_string(vocabulary));
  }
  if (r.max_tokens < 1) refuse("max_tokens must be at least 1");
  if (!(r.temperature >= 0 && std::isfinite(r.temperature))) refuse("temperature must not be negative");
  if (r.top_k < 0) refuse("top_k must not be negative");
}

// Of one row of logits.
std::int64_t sampled(const torch::Tensor& logits, const GenerateRequest& r, std::int64_t place) {
  // What is no number is never chosen.
  const torch::Tensor values =
      logits.to(torch::kFloat64).nan_to_num(-std::numeric_limits<double>::infinity()).contiguous();
  const std::span<const double> all(values.data_ptr<double>(), static_cast<std::size_t>(values.numel()));
  if (r.temperature == 0) return std::ranges::max_element(all) - all.begin();
  std::vector<std::size_t> order(all.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const std::size_t kept =
      r.top_k == 0 ? all.size() : std::min<std::size_t>(all.size(), static_cast<std::size_t>(r.top_k));
  std::ranges::sort(order,
                    [&](std::size_t a, std::size_t b) { return all[a] != all[b] ? all[a] > all[b] : a < b; });
  order.resize(kept);
  std::vector<double> weights;
  for (const std::size_t token : order)
    weights.push_back(std::exp((all[token] - all[order.front()]) / r.temperature));
  Random random(r.seed, kSampling, static_cast<std::uint32_t>(place));
  double at = random.uniform() * std::accumulate(weights.begin(), weights.end(), 0.0);
  std::size_t i = 0;
  while (i + 1 < weights.size() && at >= weights[i]) at -= weights[i++];
  return static_cast<std::int64_t>(order[i]);
}

}  // namespace

std::shared_ptr<const ServedModel> load_served_model(const std::string& checkpoints, const std::string& name,
                                                     const ModelOptions& sizes) {
  std::vector<std::string> passed_over;
  const std::optional<std::int64_t> step = latest_checkpoint(checkpoints, &passed_over);
  if (!step)
    throw UsageError("there is no sound checkpoint in '" + checkpoints + "'" +
                     (passed_over.empty() ? "" : ": " + passed_over.front()));
  ModelOptions whole = sizes;
  whole.experts.ranks = 1;
  whole.experts.rank = 0;
  std::shared_ptr<Model> model = make_model(name, whole);
  const Checkpoint checkpoint(checkpoints, *step);
  check_model(*model, checkpoint);
  StateRegistry registry;
  OwnedState state;
  state.rows = [&] { return model_rows(*model, [](const ParameterShape&) { return Peers{}; }); };
  registry.add(std::string(kModelOwner), std::move(state));
  registry.load(checkpoint, {.owners = {std::string(kModelOwner)}, .elsewhere = {}});
  return std::make_shared<const LoadedModel>(std::move(model), *step);
}

class Server::Core {
 public:
  Core(World& world, std::shared_ptr<const ServedModel> model, const ServerOptions& options)
      : world_(world), model_(std::static_pointer_cast<const LoadedModel>(model)), local_(model_->decoder()) {
    if (model_->has_experts())
      served_ = std::make_unique<ServedExperts>(
          world, model_->decoder(),
          ServedExperts::Options{.placer = options.placer, .profile = options.profile});
  }

  std::vector<std::vector<std::int64_t>> answer(std::span<const GenerateRequest> requests);
  ServedExperts* served() { return served_.get(); }

 private:
  // Tokens that a request gets.
  std::int64_t limit(const GenerateRequest& r) const {
    return std::min(r.max_tokens, model_->decoder().context() - static_cast<std::int64_t>(r.tokens.size()));
  }
  ExpertRunner& runner() { return served_ != nullptr ? static_cast<ExpertRunner&>(*served_) : local_; }

  World& world_;
  std::shared_ptr<const LoadedModel> model_;
  LocalExperts local_;
  std::unique_ptr<ServedExperts> served_;
};

std::vector<std::vector<std::int64_t>> Server::Core::answer(std::span<const GenerateRequest> requests) {
  const Decoder& decoder = model_->decoder();
  const auto me = static_cast<std::size_t>(world_.rank()), size = static_cast<std::size_t>(world_.size());
  std::vector<std::vector<std::int64_t>> out(requests.size());
  std::vector<DecodedSequence> sequences(requests.size());
  std::int64_t steps = 0;
  for (const GenerateRequest& r : requests) steps = std::max(steps, limit(r));
  for (std::int64_t step = 0; step < steps; ++step) {
    std::vector<Decoder::Feed> feeds;
    std::vector<std::size_t> whose;
    for (std::size_t i = me; i < requests.size(); i += size) {
      if (step >= limit(requests[i])) continue;
      feeds.push_back({&sequences[i], step == 0 ? requests[i].tokens : std::vector{out[i].back()}});
      whose.push_back(i);
    }
    const torch::Tensor rows = decoder.feed(feeds, runner());
    std::int64_t last = -1;
    for (std::size_t f = 0; f < feeds.size(); ++f) {
      last += static_cast<std::int64_t>(feeds[f].tokens.size());
      const torch::Tensor logits = decoder.logits(rows.slice(0, last, last + 1));
      out[whose[f]].push_back(sampled(logits, requests[whose[f]], sequences[whose[f]].length));
    }
  }
  // Everybody gets everything.
  std::vector<std::int64_t> all;
  for (std::size_t i = 0; i < requests.size(); ++i) {
    out[i].resize(static_cast<std::size_t>(limit(requests[i])));
    all.insert(all.end(), out[i].begin(), out[i].end());
  }
  if (all.empty()) return out;
  world_.all_reduce(Dense(std::span(all)));
  auto next = all.begin();
  for (std::vector<std::int64_t>& tokens : out) {
    std::copy_n(next, tokens.size(), tokens.begin());
    next += static_cast<std::ptrdiff_t>(tokens.size());
  }
  return out;
}

Server::Server(World& world, std::shared_ptr<const ServedModel> model, const ServerOptions& options)
    : core_(std::make_unique<Core>(world, std::move(model), options)) {}
Server::~Server() = default;

std::vector<std::vector<std::int64_t>> Server::answer(std::span<const GenerateRequest> requests) {
  return core_->answer(requests);
}
void Server::abandon(const std::exception_ptr& cause) noexcept {
  if (core_->served() != nullptr) core_->served()->abandon(cause);
}
std::int64_t Server::checks() const {
  return core_->served() == nullptr ? 0 : core_->served()->serving().placer().checks();
}
std::int64_t Server::replans() const {
  return core_->served() == nullptr ? 0 : core_->served()->serving().placer().replans();
}
const Popularity* Server::profile() const {
  return core_->served() == nullptr ? nullptr : &core_->served()->profile();
}

}  // namespace weft
