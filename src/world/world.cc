#include "weft/world.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "base/worker_pool.h"
#include "step/figures.h"
#include "transports/endpoint.h"
#include "transports/shaped.h"
#include "transports/threads.h"
#include "weft/error.h"
#include "world/running_world.h"

namespace weft {

namespace {

// The ranks' transports, behind a slow network where one is asked for.
class EmulatedNetwork {
 public:
  EmulatedNetwork(const std::optional<EmulatedLink>& link, ThreadsWorld& transports, int ranks)
      : plain_(transports), hosts_(static_cast<std::size_t>(ranks), 0) {
    if (!link) return;
    if (!(link->bytes_per_second >= 0) || !(link->scale_up_bytes_per_second >= 0))
      throw UsageError("an emulated link has a rate of bytes per second, or 0 for none");
    LinkOptions options;
    options.ranks = ranks;
    options.latency_seconds = link->latency_seconds;
    options.nodes = link->nodes;
    if (link->scale_up_bytes_per_second > 0)
      options.scale_up_bytes_per_second = link->scale_up_bytes_per_second;
    check(options);
    for (int r = 0; link->nodes > 0 && r < ranks; ++r)
      hosts_[static_cast<std::size_t>(r)] = static_cast<std::uint64_t>(node_of(options, r));
    if (link->bytes_per_second > 0) {
      options.bytes_per_second = link->bytes_per_second;
      constexpr double kWakingUp = 30e-6;
      LinkCost cost;
      cost.hop_seconds = link->latency_seconds + kWakingUp;
      cost.seconds_per_byte = 1.0 / link->bytes_per_second;
      set_nodes(cost, ranks, link->nodes, kWakingUp, options.scale_up_bytes_per_second);
      known_ = cost;
    }
    network_ = std::make_unique<ShapedNetwork>(options);
    for (int r = 0; r < ranks; ++r) {
      shaped_.push_back(std::make_unique<ShapedTransport>(transports.transport(r), *network_));
    }
  }
  Transport& transport(int rank) const {
    if (network_ == nullptr) return plain_.transport(rank);
    return *shaped_[static_cast<std::size_t>(rank)];
  }
  const LinkCost* known_cost() const { return known_ ? &*known_ : nullptr; }
  std::uint64_t host(int rank) const { return hosts_[static_cast<std::size_t>(rank)]; }

 private:
  ThreadsWorld& plain_;
  std::unique_ptr<ShapedNetwork> network_;
  std::vector<std::unique_ptr<ShapedTransport>> shaped_;
  std::vector<std::uint64_t> hosts_;  // node of each rank; all the same where there are none
  std::optional<LinkCost> known_;
};

// The first failure in time wins: later ones are its consequences.
class FirstFailure {
 public:
  void set(std::exception_ptr error) {
    const Lock lock(mutex_);
    if (!error_) error_ = std::move(error);
  }
  void rethrow() {
    const Lock lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  Mutex mutex_;
  std::exception_ptr error_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace

void World::all_reduce(Dense data, const AllReduceOptions& options) {
  run({.name = "all_reduce"}, [data, options](Comm comm) { return weft::all_reduce(comm, data, options); });
}

TrafficCounters World::traffic() {
  TrafficCounters counters;
  const SubmitOptions options = {.name = "traffic", .local = true};
  const auto read = [](Comm comm, TrafficCounters& out) -> Task<void> {
    out = comm.endpoint().transport().counters();
    co_return;
  };
  run(options, [&](Comm comm) { return read(comm, counters); });
  return counters;
}

LinkCost World::figures() {
  LinkCost out;
  const auto read = [](Comm comm, LinkCost& into) -> Task<void> {
    into = comm.cost();  // the engine's thread owns it
    co_return;
  };
  run({.name = "link figures", .local = true}, [&](Comm comm) { return read(comm, out); });
  return out;
}

void World::plan_by(const LinkCost& figures) { weft::plan_by(engine(), figures).wait(); }

void World::barrier() {
  run({.name = "barrier", .traffic = TrafficClass::blocking}, [](Comm comm) { return weft::barrier(comm); });
}

Comm World::subgroup(const std::vector<int>& ranks, std::uint32_t label) {
  return comm().subgroup(ranks, label);
}

void run_ranks(int ranks, const std::function<void(World&)>& body) {
  RunOptions options;
  options.config = Config::from_environment();
  run_ranks(ranks, options, body);
}

void run_ranks(int ranks, const RunOptions& options, const std::function<void(World&)>& body) {
  const Config& config = options.config;
  ThreadsOptions threads_options;
  threads_options.ranks = ranks;
  threads_options.eager_limit = config.eager_limit;
  threads_options.checksum_always = config.checksum == "always";
  ThreadsWorld transports(std::move(threads_options));
  const EmulatedNetwork network(options.link, transports, ranks);
  if (options.traces != nullptr) options.traces->resize(static_cast<std::size_t>(ranks));
  // All ranks share the pool; more workers than ranks or cores would have nothing to do.
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  WorkerPool pool(config.workers > 0 ? config.workers : std::min(ranks, cores));
  FirstFailure failure;

  const auto run_rank = [&](int r) {
    Transport& transport = network.transport(r);
    RunningWorld::Parts parts;
    parts.config = &config;
    parts.pool = &pool;
    parts.trace = options.traces != nullptr ? &(*options.traces)[static_cast<std::size_t>(r)] : nullptr;
    parts.priority = options.priority;
    parts.known_cost = network.known_cost();
    parts.host = network.host(r);
    std::unique_ptr<Transport> decorated;
    try {
      if (options.decorate) decorated = options.decorate(transport);
      RunningWorld world(decorated != nullptr ? *decorated : transport, parts);
      try {
        world.start();
        body(world);
      } catch (...) {
        failure.set(std::current_exception());
        world.engine().abandon(std::current_exception());
      }
    } catch (...) {
      failure.set(std::current_exception());
      transport.close("rank " + std::to_string(r) + " could not start");
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<std::size_t>(ranks));
  for (int r = 0; r < ranks; ++r) threads.emplace_back(run_rank, r);
  for (std::thread& thread : threads) thread.join();
  failure.rethrow();
}

}  // namespace weft
