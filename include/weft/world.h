// World: this process's place in a job, with an engine that runs. What a program starts with.
//
//   weft::run_ranks(4, [](weft::World& world) { ... });           // ranks as threads of this process
//   std::unique_ptr<weft::World> world = weft::join_world();      // under mpirun, srun, torchrun, weft launch
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/collective.h"
#include "weft/config.h"
#include "weft/engine.h"

namespace weft {

class World {
 public:
  // Waits for what is in flight, a plan that the ranks are still comparing for example, then says goodbye.
  // Where an exception ends it or its engine was told to abandon(), what is in flight fails.
  virtual ~World() = default;

  virtual Engine& engine() = 0;
  virtual std::string_view transport() const = 0;  // its name

  Comm comm() { return engine().world(); }
  int rank() { return comm().rank(); }
  int size() { return comm().size(); }

  // Runs one operation to its end on the calling thread's behalf. Rethrows its error.
  void run(const SubmitOptions& options, Engine::Make make) {
    engine().submit(comm(), options, std::move(make)).wait();
  }

  TrafficCounters traffic();  // of this rank, since it joined

  // What algorithms are chosen by. The order of additions follows from the choice, so bits do: what is
  // measured when a job starts differs from job to job, what is given (WEFT_FIGURES, plan_by) does not.
  LinkCost figures();
  void plan_by(const LinkCost& figures);  // from now on; all ranks, the same ones

  // The simplest forms; all ranks call them in the same order.
  void all_reduce(Dense data, const AllReduceOptions& options = {});
  void barrier();
  // These ranks as a group of their own; called by all of them, in any order. Nothing is sent.
  Comm subgroup(const std::vector<int>& ranks, std::uint32_t label = 0);
};

// "hop_seconds=5e-05,seconds_per_byte=8e-09,fold_seconds_per_byte=0", and back to the same bits. Throws
// UsageError for another text.
std::string text_of(const LinkCost& figures);
LinkCost parse_figures(std::string_view text);

// Puts something around a rank's transport, for example a counter of messages (src/transports/recording.h).
// The inner one outlives what is returned.
using Decorate = std::function<std::unique_ptr<Transport>(Transport& inner)>;

struct JoinOptions {
  Config config;
  Decorate decorate;
  bool priority = true;    // false: the engine serves first come, first served; equal on all ranks
  Trace* trace = nullptr;  // filled while the world lives
  // Of a caller that knows its place (and gives address and port in `config`); size 0: the launcher says it.
  int rank = 0;
  int size = 0;
};

// Takes this process's place from its launcher (Open MPI, PMI, RANK and WORLD_SIZE, Slurm) and connects.
// Alone, with no launcher, it is a world of one rank. Throws UsageError, TransportError or TimeoutError.
std::unique_ptr<World> join_world(const JoinOptions& options);
std::unique_ptr<World> join_world(const Config& config, const Decorate& decorate = {});
std::unique_ptr<World> join_world();

// A slow network between the ranks of run_ranks, in wall time.
struct EmulatedLink {
  double bytes_per_second = 0;  // of a rank's port; 0: no limit
  double latency_seconds = 0;
  int nodes = 0;  // 0: every rank is a node; else ranks share their node's port to the others
  double scale_up_bytes_per_second = 0;
};

struct RunOptions {
  Config config;
  std::optional<EmulatedLink> link;
  std::vector<Trace>* traces = nullptr;  // one per rank, filled while they run
  bool priority = true;                  // false: engines serve first come, first served
  Decorate decorate;                     // called once for each rank, outermost
};

// Runs `body` on `ranks` threads, each a rank with its own World, and returns when all have ended. If ranks
// fail, the others are stopped and the first failure is rethrown.
void run_ranks(int ranks, const std::function<void(World&)>& body);  // configured by WEFT_* variables
void run_ranks(int ranks, const RunOptions& options, const std::function<void(World&)>& body);

}  // namespace weft
