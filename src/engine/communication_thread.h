// Drives an engine on a thread of its own: polls while there is something to do, spins for about 20 us with
// sched_yield, then sleeps in the transport until something arrives or the next deadline.
#pragma once

#include <atomic>
#include <thread>

#include "weft/engine.h"

namespace weft {

class CommunicationThread {
 public:
  explicit CommunicationThread(Engine& engine);
  ~CommunicationThread();  // shuts the engine down
  CommunicationThread(const CommunicationThread&) = delete;
  CommunicationThread& operator=(const CommunicationThread&) = delete;

 private:
  void run();
  Engine& engine_;
  Transport& transport_;  // the engine's
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace weft
