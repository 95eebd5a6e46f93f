#include "engine/communication_thread.h"

#include <pthread.h>
#include <sched.h>

#include "transports/endpoint.h"
#include "weft/transport.h"

namespace weft {

namespace {
// Long enough to catch an answer that is on its way.
constexpr Time kSpin = 20us;
// A yield that takes as long gave the core to somebody who computes. One that sleeps gets a core as soon as
// it is woken; one that spins takes it from the others and then waits for its turn. So for a while it sleeps
// at once.
constexpr Time kCrowded = 100us, kCrowdedFor = 2s;
}  // namespace

CommunicationThread::CommunicationThread(Engine& engine)
    : engine_(engine), transport_(engine.world().endpoint().transport()), thread_([this] { run(); }) {}

CommunicationThread::~CommunicationThread() {
  stop_.store(true, std::memory_order_release);
  transport_.wake();
  thread_.join();
  engine_.shut_down(nullptr);
}

void CommunicationThread::run() {
  pthread_setname_np(pthread_self(), "weft-comm");
  const Clock& clock = transport_.clock();
  Time last = clock.now();  // when something last happened; a wait that ends for nothing (as on mpi) is no
                            // reason to spin again
  Time spins_from = last;
  while (!stop_.load(std::memory_order_acquire)) {
    if (engine_.poll()) {
      last = clock.now();
      continue;
    }
    const Time now = clock.now();
    if (now - last < kSpin && now >= spins_from) {
      sched_yield();
      const Time after = clock.now();
      if (after - now > kCrowded) spins_from = after + kCrowdedFor;
    } else if (const Time next = engine_.next_deadline(); next > now) {
      transport_.wait(next);
    }
  }
}

}  // namespace weft
