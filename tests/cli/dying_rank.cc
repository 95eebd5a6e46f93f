// What makes weft-torch die where a test says (tests/cli/packing_kill_test.py): linked into it, every call of
// join_world() comes through here (tests/CMakeLists.txt). All else is the command as users run it.
//
//   SLOW_MS=20                rows to experts and home wait up to so long on their way, so that packing pays
//   DIES="2,1,experts that change hands"   rank 2 is killed (SIGKILL) at the first message of such an operation:
//                             it is not sent
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "transports/faulty.h"
#include "weft/world.h"

namespace weft {
namespace {

class Dying final : public Decorator {
 public:
  Dying(std::unique_ptr<Transport> inner, std::string operation, int at)
      : Decorator(*inner), owned_(std::move(inner)), operation_(std::move(operation)), left_(at) {}

  void post(SendRecord& send) noexcept override {
    if (left_ > 0 && send.operation.name == operation_ && --left_ == 0) std::raise(SIGKILL);
    Decorator::post(send);
  }

 private:
  std::unique_ptr<Transport> owned_;
  std::string operation_;
  int left_;  // messages until it dies; 0: never
};

std::unique_ptr<Transport> made_to_die(Transport& inner) {
  FaultOptions faults;
  faults.delay_only = TrafficClass::blocking;
  if (const char* const slow = std::getenv("SLOW_MS")) {
    faults.delay = 1;
    faults.max_delay = std::chrono::milliseconds(std::atoi(slow));
  }
  const char* const dies = std::getenv("DIES");
  const std::string text = dies == nullptr ? "-1,0," : dies;
  const std::size_t first = text.find(','), second = text.find(',', first + 1);
  const bool here = std::stoi(text) == inner.rank();
  return std::make_unique<Dying>(std::make_unique<FaultyTransport>(inner, faults), text.substr(second + 1),
                                 here ? std::stoi(text.substr(first + 1)) : 0);
}

}  // namespace

#define WEFT_JOIN "_ZN4weft10join_worldERKNS_11JoinOptionsE"  // as the linker knows it
std::unique_ptr<World> real_join(const JoinOptions& options) __asm__("__real_" WEFT_JOIN);
std::unique_ptr<World> join(const JoinOptions& options) __asm__("__wrap_" WEFT_JOIN);
std::unique_ptr<World> join(const JoinOptions& options) {
  JoinOptions with = options;
  with.decorate = made_to_die;
  return real_join(with);
}

}  // namespace weft
