#include "workload/serve.h"

#include <algorithm>
#include <exception>
#include <numeric>

#include "experts/serving.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "workload/drawn_router.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

class ServedRank final : public ServingDriver {
 public:
  ServedRank(Engine& engine, const ServeOptions& options, const DrawnRouter& router)
      : options_(options), router_(router), results_(options.placements.size()) {
    ServingOptions serving{.width = options.width,
                           .placer = options.placer,
                           .profile = options.profile,
                           .weight_bytes = options.weight_bytes,
                           .plan_seconds = options.plan_seconds};
    for (const std::string& name : options.placements) {
      serving.placer.placement = name;
      turns_.push_back(std::make_unique<ExpertServing>(engine, engine.world(), serving, *this));
    }
    // As many rows as could come to one rank, and stay where they are.
    const auto most = static_cast<std::size_t>(options.tokens * options.width);
    sent_.assign(most, 1);
    arrived_.assign(most * static_cast<std::size_t>(engine.world().size()), 1);
  }

  // REQUIRES: lives until the task is done.
  static Task<void> run(Comm comm, ServedRank* me);
  void abandon(const std::exception_ptr& cause) noexcept {
    for (const std::unique_ptr<ExpertServing>& turn : turns_) turn->abandon(cause);
  }
  std::vector<Served> take() { return std::move(results_); }

  Dense rows_to_send(int, std::span<const std::int64_t> copies) override {
    return room_for_return(0, static_cast<std::int64_t>(copies.size()));
  }
  Dense room_for_return(int, std::int64_t rows) override {
    return Dense(std::span(sent_).first(static_cast<std::size_t>(rows * options_.width)));
  }
  Dense room(int, std::int64_t rows) override {
    return Dense(std::span(arrived_).first(static_cast<std::size_t>(rows * options_.width)));
  }
  Task<void> compute(Comm comm, int layer, std::span<const std::int64_t> counts) override;

 private:
  Task<void> request(std::size_t turn, bool measured);
  Task<void> pass(double seconds);
  void draw(std::int64_t number, bool balanced);
  Comm next() { return comm_.hops_from(hop_ += ExpertServing::kHops); }
  void waited() { computed_until_ = std::max(computed_until_, comm_.now()); }

  const ServeOptions& options_;
  const DrawnRouter& router_;
  std::vector<std::unique_ptr<ExpertServing>> turns_;  // of each placement
  std::vector<Served> results_;
  Comm comm_;  // of the operation that all requests are
  std::uint32_t hop_ = 0;
  Time computed_until_{};            // where an accelerator would be: a late timer makes the next one shorter
  std::vector<std::int32_t> paths_;  // of the request's tokens: [token * layers + layer]
  std::vector<std::int32_t> chosen_;
  std::vector<float> sent_, arrived_;
};

void ServedRank::draw(std::int64_t number, bool balanced) {
  paths_ = router_.draw(options_.seed, number, comm_.rank(), options_.tokens);
  if (!balanced) return;
  const std::size_t layers = options_.times.layers.size();
  const auto first = static_cast<std::size_t>(comm_.rank() * options_.tokens);
  for (std::size_t i = 0; i < paths_.size(); ++i)
    paths_[i] = static_cast<std::int32_t>((first + i / layers + i % layers) %
                                          static_cast<std::size_t>(options_.router.experts));
}

Task<void> ServedRank::pass(double seconds) {
  if (seconds <= 0) co_return;
  computed_until_ += from_seconds(seconds);
  co_await comm_.sleep_until(computed_until_);
}

// One expert after the other.
Task<void> ServedRank::compute(Comm, int layer, std::span<const std::int64_t> counts) {
  waited();
  std::vector<std::int64_t> rows(static_cast<std::size_t>(options_.router.experts));
  for (std::size_t i = 0; i < counts.size(); ++i) rows[i % rows.size()] += counts[i];
  double seconds = 0;
  for (const std::int64_t of_expert : rows) {
    if (of_expert == 0) continue;
    seconds +=
        options_.expert_seconds +
        static_cast<double>(of_expert) * options_.times.layers[static_cast<std::size_t>(layer)].row_seconds;
  }
  co_await pass(seconds);
}

Task<void> ServedRank::request(std::size_t turn, bool measured) {
  ExpertServing& serving = *turns_[turn];
  hop_ = 0;  // (behind the barrier nobody waits for anything of the last request)
  co_await barrier(next());
  const Time began = computed_until_ = comm_.now();
  const std::uint64_t rows_before = serving.row_bytes(), moved_before = serving.moved_bytes();
  const std::int64_t formula_before = serving.formula_bytes();
  const std::int64_t checks_before = serving.placer().checks(), replans_before = serving.placer().replans();
  double load = 0, in_experts = 0;
  serving.begin(options_.tokens);
  const std::size_t layers = options_.times.layers.size();
  for (std::size_t l = 0; l < layers; ++l) {
    co_await pass(options_.times.layers[l].dense_seconds);
    const Time entered = comm_.now();
    chosen_.clear();
    for (std::size_t at = l; at < paths_.size(); at += layers) chosen_.push_back(paths_[at]);
    co_await serving.pass(next(), static_cast<int>(l), chosen_);
    waited();
    in_experts += seconds(comm_.now() - entered);
    load += serving.load();
    co_await pass(options_.times.layers[l].merge_seconds);
  }
  co_await pass(options_.times.last_seconds);
  // Weights that move between two requests keep the next one waiting: they count for this one.
  co_await serving.end(next());
  if (!measured) co_return;
  Served& into = results_[turn];
  into.seconds.push_back(seconds(comm_.now() - began));
  into.expert_seconds.push_back(in_experts);
  into.load.push_back(load / static_cast<double>(layers));
  into.payload_bytes += serving.row_bytes() - rows_before;
  into.formula_bytes += serving.formula_bytes() - formula_before;
  into.moved_bytes += serving.moved_bytes() - moved_before;
  into.checks += serving.placer().checks() - checks_before;
  into.replans += serving.placer().replans() - replans_before;
}

Task<void> ServedRank::run(Comm comm, ServedRank* me) {
  me->comm_ = comm;
  for (std::int64_t i = 0; i < me->options_.warmup + me->options_.requests; ++i) {
    for (std::size_t turn = 0; turn < me->turns_.size(); ++turn) {
      me->draw(i, me->turns_[turn]->placer().kind().balanced);
      co_await me->request(turn, i >= me->options_.warmup);
    }
  }
}

constexpr const char* kName = "requests";

}  // namespace

ServeTimes serve_times(const Outline& outline, std::int64_t sequence_tokens) {
  if (outline.experts.empty())
    throw UsageError("the outline of " + outline.model +
                     " does not tell experts apart from their blocks: make one of gpt-moe from FLOPs");
  if (sequence_tokens < 1) throw UsageError("a sequence has at least one token");
  ServeTimes out;
  std::size_t block = 0;
  for (const OutlineExperts& experts : outline.experts) {
    ServeTimes::Layer& layer = out.layers.emplace_back();
    for (; block <= static_cast<std::size_t>(experts.block); ++block)
      layer.dense_seconds += outline.blocks[block].forward_seconds;
    layer.dense_seconds += experts.gate_forward_seconds + experts.shared_forward_seconds;
    layer.row_seconds = experts.row_forward_seconds;
    layer.merge_seconds = experts.merge_forward_seconds;
  }
  for (; block < outline.blocks.size(); ++block) {
    const bool head = block + 1 == outline.blocks.size();
    const double seconds = outline.blocks[block].forward_seconds;
    out.last_seconds += head ? seconds / static_cast<double>(sequence_tokens) : seconds;
  }
  return out;
}

void check(const ServeOptions& o) {
  const auto refuse = [](const std::string& what) { throw UsageError("serving: " + what); };
  check(o.router);
  check(o.placer);
  if (o.times.layers.empty()) refuse("there is no layer of experts");
  if (o.router.layers != static_cast<int>(o.times.layers.size()) || o.placer.layers != o.router.layers ||
      o.placer.place.experts != o.router.experts)
    refuse("router, placements and times are of different layers or experts");
  if (o.tokens < 1 || o.tokens > (1 << 24)) refuse("a rank has at least one token in a request");
  if (o.width < 1 || o.width > (1 << 20)) refuse("rows have at least one value");
  if (o.requests < 1 || o.warmup < 0) refuse("at least one request is measured");
  if (o.placements.empty()) refuse("no placement was named");
  for (const std::string& name : o.placements) find_placement(name);
  if (!(o.expert_seconds >= 0)) refuse("an expert takes no negative time");
}

std::shared_ptr<const Popularity> fitted_profile(const DrawnRouter& router, std::uint64_t seed, int batches,
                                                 const PopularityOptions& options) {
  constexpr std::int64_t kTokens = 2048;
  auto out = std::make_shared<Popularity>(options);
  const auto layers = static_cast<std::size_t>(options.layers);
  for (int b = 0; b < batches; ++b) {
    const std::vector<std::int32_t> paths = router.draw(seed, b, 0, kTokens);
    for (std::size_t at = 0; at < paths.size(); at += layers)
      out->record(std::span(paths).subspan(at, layers));
  }
  return out;
}

std::vector<std::vector<Served>> serve_emulated(int ranks, const std::optional<EmulatedLink>& link,
                                                const ServeOptions& options) {
  check(options);
  const DrawnRouter router(options.router);
  std::vector<std::vector<Served>> out(static_cast<std::size_t>(ranks));
  RunOptions run;
  run.config = Config::from_environment();
  run.link = link;
  run_ranks(ranks, run, [&](World& world) {
    ServedRank rank(world.engine(), options, router);
    try {
      world.run({.name = kName, .traffic = TrafficClass::blocking},
                [&rank](Comm comm) { return ServedRank::run(comm, &rank); });
    } catch (...) {
      rank.abandon(std::current_exception());
      throw;
    }
    out[static_cast<std::size_t>(world.rank())] = rank.take();
  });
  return out;
}

std::vector<std::vector<Served>> serve_simulated(int ranks, const EmulatedLink& link,
                                                 const ServeOptions& options) {
  check(options);
  const DrawnRouter router(options.router);
  SimRanksOptions sim;
  sim.sim.link.ranks = ranks;
  sim.sim.link.latency_seconds = link.latency_seconds;
  sim.sim.link.nodes = link.nodes;
  if (link.bytes_per_second > 0) sim.sim.link.bytes_per_second = link.bytes_per_second;
  if (link.scale_up_bytes_per_second > 0)
    sim.sim.link.scale_up_bytes_per_second = link.scale_up_bytes_per_second;
  SimRanks engines(sim);
  std::vector<std::unique_ptr<ServedRank>> all;
  all.reserve(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r)
    all.push_back(std::make_unique<ServedRank>(engines.engine(r), options, router));
  std::vector<std::vector<Served>> out;
  try {
    engines.run({.name = kName, .traffic = TrafficClass::blocking}, [&all](Comm comm, int r) {
      return ServedRank::run(comm, all[static_cast<std::size_t>(r)].get());
    });
    for (const std::unique_ptr<ServedRank>& rank : all) out.push_back(rank->take());
  } catch (...) {
    // Operations end before the memory that they use does.
    for (int r = 0; r < ranks; ++r) engines.engine(r).shut_down(std::current_exception());
    throw;
  }
  return out;
}

}  // namespace weft
