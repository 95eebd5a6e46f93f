// What measured costs of kernels predict (the same calls in virtual time) against the processor time that
// operations report where ranks are threads.
#include <gtest/gtest.h>

#include <barrier>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/statistics.h"
#include "data_parallel/bucket_run.h"
#include "instrumented.h"
#include "weft/sparse.h"
#include "weft/world.h"
#include "workload/distributions.h"
#include "workload/measure_kernels.h"
#include "world/sim_ranks.h"

namespace weft {
namespace {

constexpr int kRanks = 4;
constexpr std::int64_t kElements = std::int64_t{1} << 20;
constexpr std::int64_t kSteps = 8;

const std::vector<std::vector<float>>& gradients() {
  static const std::vector<std::vector<float>> all = [] {
    std::vector<std::vector<float>> out(kRanks, std::vector<float>(static_cast<std::size_t>(kElements)));
    for (std::size_t r = 0; r < out.size(); ++r)
      draw({.distribution = Distribution::heavy, .seed = 3, .rank = static_cast<std::uint32_t>(r)}, out[r]);
    return out;
  }();
  return all;
}

// One rank's operation, step after step.
class Bucket {
 public:
  Bucket(std::string_view scheme, int rank) : state_(kElements) {
    run_.state = &state_;
    run_.gradient = gradients()[static_cast<std::size_t>(rank)];
    // Teams by the cost model would be chosen by links that are measured here and free there.
    run_.options = {.k = kElements / 100, .algorithm = scheme, .teams = 1};
    if (scheme != "powersgd") return;
    run_.low_rank = std::make_unique<LowRank>(LowRankOptions{});
    for (int i = 0; i < 4; ++i) {
      const std::string name = "matrix " + std::to_string(i);
      run_.low_rank->add(name, 512, kElements / 4, &factors_[i]);
    }
  }
  Ticket submit(Engine& engine, std::uint32_t step) {
    run_.step = step;
    const SubmitOptions options{.name = "bucket", .slot = 1, .step = step};
    return engine.submit(engine.world(), options, [this](Comm comm) {
      return run_.low_rank ? BucketRun::reduce_low_rank(comm, &run_) : BucketRun::reduce(comm, &run_);
    });
  }
  void commit() {
    state_.commit();
    for (WarmFactor& factor : factors_) factor.commit();
  }

 private:
  SparseState state_;
  BucketRun run_;
  WarmFactor factors_[4];
};

// Medians over the steps after the first two, mean over the ranks.
class Computed {
 public:
  void add(std::int64_t step, int rank, double seconds) {
    if (step >= 2) of_rank_[rank].push_back(seconds);
  }
  double seconds() const {
    double sum = 0;
    for (const std::vector<double>& all : of_rank_) sum += median(all);
    return sum / kRanks;
  }

 private:
  std::vector<double> of_rank_[kRanks];
};

double measured_seconds(std::string_view scheme) {
  Computed computed;
  std::mutex mutex;
  std::barrier<> computed_beside(kRanks);
  RunOptions options;
  options.config.workers = 1;  // as the figures were measured: nothing computes beside it
  run_ranks(kRanks, options, [&](World& world) {
    Bucket bucket(scheme, world.rank());
    std::vector<float> activations(static_cast<std::size_t>(4 * kElements));
    for (std::int64_t step = 0; step < kSteps; ++step) {
      // As in training: between two steps a rank computes, and the cache forgets the bucket.
      for (float& v : activations) v += 1;
      // Another rank's would take memory bandwidth from the first one's operation.
      computed_beside.arrive_and_wait();
      const Ticket ticket = bucket.submit(world.engine(), static_cast<std::uint32_t>(step));
      ticket.wait();
      bucket.commit();
      const std::lock_guard lock(mutex);
      computed.add(step, world.rank(), ticket.computed_seconds());
    }
  });
  return computed.seconds();
}

double predicted_seconds(std::string_view scheme, const KernelCosts& kernels) {
  SimRanksOptions options;
  options.sim.link.ranks = kRanks;
  options.kernels = kernels;
  SimRanks ranks(options);
  std::vector<std::unique_ptr<Bucket>> buckets;
  for (int r = 0; r < kRanks; ++r) buckets.push_back(std::make_unique<Bucket>(scheme, r));
  Computed computed;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    std::vector<Ticket> tickets;
    for (int r = 0; r < kRanks; ++r)
      tickets.push_back(
          buckets[static_cast<std::size_t>(r)]->submit(ranks.engine(r), static_cast<std::uint32_t>(step)));
    ranks.world().run();
    for (int r = 0; r < kRanks; ++r) {
      tickets[static_cast<std::size_t>(r)].wait();
      buckets[static_cast<std::size_t>(r)]->commit();
      computed.add(step, r, tickets[static_cast<std::size_t>(r)].computed_seconds());
    }
  }
  return computed.seconds();
}

// Others may compute on this machine, more at one time than at another: figures and operations are measured
// in turn, and the median of the ratios counts.
TEST(KernelCosts, PredictTheProcessorTimeOfOperations) {
  if (kInstrumented) GTEST_SKIP() << "times mean nothing here";
  constexpr std::string_view kSchemes[] = {"dense", "dense-bf16", "topka", "oktopk", "spardl", "powersgd"};
  constexpr std::size_t kTurns = 9;
  std::map<std::string_view, std::vector<double>> measured, predicted, ratios;
  for (std::size_t turn = 0; turn < kTurns; ++turn) {
    const KernelCosts kernels = measure_kernels();
    for (const std::string_view scheme : kSchemes) {
      measured[scheme].push_back(measured_seconds(scheme));
      predicted[scheme].push_back(predicted_seconds(scheme, kernels));
      ratios[scheme].push_back(predicted[scheme].back() / measured[scheme].back());
    }
  }
  std::printf("%-12s %12s %12s %8s\n", "scheme", "measured ms", "predicted ms", "ratio");
  for (const std::string_view scheme : kSchemes) {
    const double ratio = median(ratios[scheme]);
    std::printf("%-12s %12.3f %12.3f %8.2f\n", std::string(scheme).c_str(), median(measured[scheme]) * 1e3,
                median(predicted[scheme]) * 1e3, ratio);
    EXPECT_NEAR(ratio, 1, 0.25) << scheme;
    // Control: without figures nothing is predicted.
    EXPECT_EQ(predicted_seconds(scheme, {}), 0) << scheme;
  }
}

}  // namespace
}  // namespace weft
