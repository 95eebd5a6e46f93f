// The runners of `weft bench`: on ranks that run (threads, or whatever launched this process) and in virtual
// time.
#pragma once

#include <functional>
#include <vector>

#include "measure/bench/case.h"
#include "measure/bench/report.h"
#include "transports/recording.h"
#include "weft/world.h"
#include "world/sim_ranks.h"

namespace weft {

// One rank of a benchmark; `report` is null on ranks that print nothing.
struct BenchRank {
  World& world;
  RecordingTransport& recorder;
  BenchReport* report = nullptr;
};
using BenchBody = std::function<void(const BenchRank&)>;

struct BenchWorld {
  bool launched = false;  // ranks are processes that a launcher started, this is one of them
  bool priority = true;
};

// Runs `body` on every rank that this process has: all of them as threads, or its own.
void on_ranks(const BenchOptions& options, const BenchWorld& how, BenchReport* report, const BenchBody& body);

// Measures all cases, one after the other.
void bench_cases(const BenchOptions& options, const std::vector<BenchCase>& cases, const BenchRank& rank);
// Each value becomes the largest of all ranks.
void largest_of_ranks(World& world, std::vector<double>& values);
// Whether all ranks have the same numbers. They must be as many.
bool same_on_ranks(World& world, const std::vector<double>& values);

// The simulated network that the options name.
SimRanksOptions sim_options(const BenchOptions& options);
void bench_sim(const BenchOptions& options, const std::vector<BenchCase>& cases, BenchReport& report);
void bench_priority(const BenchOptions& options, bool launched, BenchReport* report);
// Throws UsageError for what cannot run.
void check_sparse(const BenchOptions& options);
void bench_sparse(const BenchOptions& options, bool launched, BenchReport* report);
// Throws UsageError for what cannot run.
void check_embedding(const BenchOptions& options);
void bench_embedding(const BenchOptions& options, bool launched, BenchReport* report);
// Throws UsageError for what cannot run.
void check_moe(const BenchOptions& options);
void bench_moe(const BenchOptions& options, bool launched, BenchReport* report);
void bench_overhead(const BenchOptions& options, BenchReport& report);

}  // namespace weft
