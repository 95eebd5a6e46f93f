// On which thread a model that serves estimates, plans and gathers rows: never the communication thread, which
// others wait for. The linker sends every call of the estimate and of the plan through this file
// (tests/CMakeLists.txt).
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/worker_pool.h"
#include "engine/communication_thread.h"
#include "experts/serving.h"
#include "transports/threads.h"
#include "weft/engine.h"

namespace weft {
namespace {

thread_local bool communicates = false;  // set by what runs on a communication thread
struct Calls {
  std::atomic<int> here{0};  // on a communication thread
  std::atomic<int> elsewhere{0};
  void count() { ++(communicates ? here : elsewhere); }
};
Calls estimates, plans, gathers;

}  // namespace

// Names as the linker knows them.
#define WEFT_PLAN "_ZN4weft14plan_placementESt4spanIKdLm18446744073709551615EERKNS_16PlacementOptionsE"
#define WEFT_ESTIMATE \
  "_ZNK4weft10Popularity8estimateEiSt4spanIKiLm18446744073709551615EES1_IdLm18446744073709551615EE"
ExpertPlacement real_plan(std::span<const double> rows,
                          const PlacementOptions& options) __asm__("__real_" WEFT_PLAN);
ExpertPlacement counted_plan(std::span<const double> rows,
                             const PlacementOptions& options) __asm__("__wrap_" WEFT_PLAN);
ExpertPlacement counted_plan(std::span<const double> rows, const PlacementOptions& options) {
  plans.count();
  return real_plan(rows, options);
}
void real_estimate(const Popularity* me, int layer, std::span<const std::int32_t> path,
                   std::span<double> rows) __asm__("__real_" WEFT_ESTIMATE);
void counted_estimate(const Popularity* me, int layer, std::span<const std::int32_t> path,
                      std::span<double> rows) __asm__("__wrap_" WEFT_ESTIMATE);
void counted_estimate(const Popularity* me, int layer, std::span<const std::int32_t> path,
                      std::span<double> rows) {
  estimates.count();
  real_estimate(me, layer, path, rows);
}

namespace {

constexpr int kRanks = 3, kExperts = 6, kLayers = 3, kTokens = 40, kBatches = 4;

class Toy final : public ServingDriver {
 public:
  Dense rows_to_send(int, std::span<const std::int64_t> copies) override {
    gathers.count();
    sent_.resize(copies.size());
    return Dense(std::span(sent_));
  }
  Dense room(int, std::int64_t rows) override {
    here_.resize(static_cast<std::size_t>(rows));
    return Dense(std::span(here_));
  }
  Dense room_for_return(int, std::int64_t rows) override {
    back_.resize(static_cast<std::size_t>(rows));
    return Dense(std::span(back_));
  }
  Task<void> compute(Comm, int, std::span<const std::int64_t>) override { co_return; }

 private:
  std::vector<float> sent_, here_, back_;
};

// The expert of a token: hot ones change from batch to batch, so that plans are made again.
std::int32_t chosen_by(int batch, int layer, int token) {
  return (token % 4 == 0 ? token : batch + layer) % kExperts;
}

Task<void> walk(Comm comm, ExpertServing* serving) {
  communicates = true;
  for (int batch = 0; batch < kBatches; ++batch) {
    const auto base = static_cast<std::uint32_t>(batch) * 8 * ExpertServing::kHops;
    serving->begin(kTokens);
    for (int l = 0; l < kLayers; ++l) {
      std::vector<std::int32_t> chosen;
      for (int t = 0; t < kTokens; ++t) chosen.push_back(chosen_by(batch, l, t));
      co_await serving->pass(comm.hops_from(base + static_cast<std::uint32_t>(l) * ExpertServing::kHops), l,
                             chosen);
    }
    co_await serving->end(comm.hops_from(base + 6 * ExpertServing::kHops));
  }
}

// All batches on all ranks.
void serve(const std::string& placement, WorkerPool* pool) {
  for (Calls* calls : {&estimates, &plans, &gathers}) {
    calls->here = 0;
    calls->elsewhere = 0;
  }
  Popularity profile({.layers = kLayers, .experts = kExperts, .path = 2});
  for (int t = 0; t < kTokens; ++t) {
    std::vector<std::int32_t> chosen;
    for (int l = 0; l < kLayers; ++l) chosen.push_back(chosen_by(0, l, t));
    profile.record(chosen);
  }
  ServingOptions options;
  options.placer = {.placement = placement,
                    .place = {.ranks = kRanks, .experts = kExperts},
                    .layers = kLayers,
                    .window = 2,
                    .every = 2};
  options.profile = std::make_shared<const Popularity>(profile);
  ThreadsWorld world(ThreadsOptions{.ranks = kRanks, .eager_limit = 8192, .tamper = {}});
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < kRanks; ++r)
    engines.push_back(std::make_unique<Engine>(world.transport(r), EngineOptions{}, pool));
  std::vector<std::unique_ptr<CommunicationThread>> threads;
  for (auto& engine : engines) threads.push_back(std::make_unique<CommunicationThread>(*engine));
  std::vector<Toy> toys(kRanks);
  std::vector<std::unique_ptr<ExpertServing>> all;
  for (std::size_t r = 0; r < kRanks; ++r)
    all.push_back(std::make_unique<ExpertServing>(*engines[r], engines[r]->world(), options, toys[r]));
  std::vector<Ticket> tickets;
  const SubmitOptions how{.name = "batches", .traffic = TrafficClass::blocking};
  for (std::size_t r = 0; r < kRanks; ++r)
    tickets.push_back(engines[r]->submit(engines[r]->world(), how,
                                         [&all, r](Comm comm) { return walk(comm, all[r].get()); }));
  for (const Ticket& ticket : tickets) ticket.wait();
}

TEST(ServingThreads, PlansAreTheWorkersBusiness) {
  WorkerPool pool(2);
  for (const std::string placement : {"lina", "history"}) {
    serve(placement, &pool);
    EXPECT_EQ(estimates.here + plans.here + gathers.here, 0) << placement;
    const int estimated = estimates.elsewhere, planned = plans.elsewhere, gathered = gathers.elsewhere;
    EXPECT_EQ(estimated, placement == "lina" ? kRanks * kBatches * kLayers * kTokens : 0);
    EXPECT_EQ(gathered, kRanks * kBatches * kLayers);
    // Of lina one in each layer, and some of them again; of history all layers every second batch.
    if (placement == "lina")
      EXPECT_GT(planned, kRanks * kBatches * kLayers);
    else
      EXPECT_EQ(planned, kRanks * kBatches / 2 * kLayers);
    // Control: where there is no pool all of it is done on communication threads, and is seen there.
    serve(placement, nullptr);
    EXPECT_EQ(estimates.here, estimated);
    EXPECT_EQ(plans.here, planned);
    EXPECT_EQ(gathers.here, gathered);
    EXPECT_EQ(estimates.elsewhere + plans.elsewhere + gathers.elsewhere, 0);
  }
}

}  // namespace
}  // namespace weft
