// Engines on a simulated network, one per rank, all on the calling thread. What `weft bench --transport sim`
// runs on: the same collectives, scheduler and micro-ops as on real transports, in virtual time.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "transports/sim.h"
#include "weft/comm.h"
#include "weft/engine.h"
#include "weft/trace.h"
#include "weft/world.h"

namespace weft {

struct SimRanksOptions {
  SimOptions sim;
  Config config;  // of the engines: hold, stall and micro-op times
  bool priority = true;
  std::vector<Trace>* traces = nullptr;  // one per rank
  Decorate decorate;                     // called once for each rank
  KernelCosts kernels;                   // what computation costs, in virtual bytes; sim.workers says where
};

class SimRanks {
 public:
  // Link figures and micro-ops follow from the link: nothing is measured. An operation has no deadline unless
  // it names one: one that cannot end is seen by run(), because nothing is left to happen.
  explicit SimRanks(const SimRanksOptions& options);
  ~SimRanks();
  SimRanks(const SimRanks&) = delete;
  SimRanks& operator=(const SimRanks&) = delete;

  int size() const { return static_cast<int>(engines_.size()); }
  Engine& engine(int rank) { return *engines_[static_cast<std::size_t>(rank)]; }
  SimWorld& world() { return world_; }
  const SimWorkers& workers(int rank) { return world_.workers(rank); }  // transports/sim_workers.h

  // Submits one operation per rank at the same instant and lets time pass until all have ended. Gives the
  // virtual time from there to the end of the last one. Rethrows the first error by rank; TransportError if
  // the ranks wait for each other.
  Time run(const SubmitOptions& options, const std::function<Task<void>(Comm, int rank)>& make);

 private:
  SimWorld world_;
  std::vector<std::unique_ptr<Transport>> decorated_;
  std::vector<std::unique_ptr<Engine>> engines_;
};

}  // namespace weft
