// Time. Every wait, deadline and measurement reads the clock of its transport: the wall clock on real
// transports, virtual time in `sim`. A Time is nanoseconds since that clock's own epoch, so points of two
// clocks must not be mixed.
#pragma once

#include <chrono>

namespace weft {

using Time = std::chrono::nanoseconds;  // a point (since the clock's epoch) or a length of time
using std::chrono_literals::operator""ns;
using std::chrono_literals::operator""us;
using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;

inline constexpr Time kNever = Time::max();

constexpr double seconds(Time t) { return std::chrono::duration<double>(t).count(); }
constexpr Time from_seconds(double s) {
  return s >= 9.2e9 ? kNever : std::chrono::duration_cast<Time>(std::chrono::duration<double>(s));
}

// A point that lies `length` behind another; never, where there is no such point.
constexpr Time later(Time point, Time length) { return point > kNever - length ? kNever : point + length; }

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Time now() const = 0;
  // Virtual time: what is computed takes none unless it is said to.
  virtual bool simulated() const { return false; }
};

// The monotonic clock of the machine.
class SteadyClock final : public Clock {
 public:
  Time now() const override { return std::chrono::steady_clock::now().time_since_epoch(); }
};

}  // namespace weft
