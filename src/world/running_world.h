// An engine with its thread on a transport that somebody else owns, with link figures that all ranks agree
// on.
#pragma once

#include <string>

#include "base/log.h"
#include "engine/communication_thread.h"
#include "weft/world.h"
#include "world/calibrate.h"

namespace weft {

class RunningWorld : public World {
 public:
  struct Parts {
    const Config* config = nullptr;  // and everything else outlives the world
    WorkerPool* pool = nullptr;
    Trace* trace = nullptr;
    bool priority = true;
    const LinkCost* known_cost = nullptr;  // null: measured
    std::uint64_t host = 0;                // the same for ranks that share a node
  };

  RunningWorld(Transport& transport, const Parts& parts);
  ~RunningWorld() override;

  // Before anything else. Ends when all ranks have agreed on the link's figures. Whoever catches its error
  // tells the engine to abandon().
  void start();

  Engine& engine() override { return engine_; }
  std::string_view transport() const override { return name_; }

 private:
  Parts parts_;
  std::string name_;
  Log log_;
  Engine engine_;
  CommunicationThread thread_;
  const int unwinding_;  // exceptions under way when the world began
};

}  // namespace weft
