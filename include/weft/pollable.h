// Something with a life of its own that nobody waits inside of: an engine, or a bare rank in a test. A
// communication thread drives one against the wall clock; the event loop of `sim` drives thousands in virtual
// time.
#pragma once

#include "weft/clock.h"

namespace weft {

class Pollable {
 public:
  // Does everything that can be done now. True if anything happened.
  virtual bool poll() noexcept = 0;
  // When poll() next has something to do by the clock alone (transport, timers, held traffic).
  virtual Time next_deadline() const = 0;

 protected:
  ~Pollable() = default;
};

}  // namespace weft
