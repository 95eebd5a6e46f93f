#include <sched.h>

#include "weft/engine.h"

namespace weft {

namespace {
// Long enough to catch an answer that is on its way, short enough to leave the core to the others when ranks
// outnumber cores.
constexpr Time kSpin = 20us;
}  // namespace

CommunicationThread::CommunicationThread(Engine& engine) : engine_(engine), thread_([this] { run(); }) {}

CommunicationThread::~CommunicationThread() {
  stop_.store(true, std::memory_order_release);
  engine_.transport().wake();
  thread_.join();
  engine_.shut_down(nullptr);
}

void CommunicationThread::run() {
  const Clock& clock = engine_.transport().clock();
  Time last = clock.now();  // when something last happened; a wait that ends for nothing (as on mpi) is no
                            // reason to spin again
  while (!stop_.load(std::memory_order_acquire)) {
    if (engine_.poll()) {
      last = clock.now();
    } else if (clock.now() - last < kSpin) {
      sched_yield();
    } else if (const Time next = engine_.next_deadline(); next > clock.now()) {
      engine_.transport().wait(next);
    }
  }
}

}  // namespace weft
