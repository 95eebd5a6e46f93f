// The seam between algorithms and whatever moves bytes. A Transport is one rank's end of it.
//
// Contract: messages are first in, first out per (source, destination, identity), and nothing else is
// ordered. Every receive names its source and identity; there are no wildcards. A send may complete only when
// its receiver has posted (eager limit zero), so nobody awaits a send before posting the receive that its
// peer may be waiting for.
//
// Memory: a posted record and the memory it names stay valid until the record is completed or cancelled.
// cancel() returns only when the transport has let go of both; it may wait for a copy that is under way,
// never for a peer's program.
//
// Thread: one thread (the engine's) calls everything, except wake().
#pragma once

#include <exception>
#include <string>
#include <string_view>

#include "weft/clock.h"
#include "weft/traffic.h"

namespace weft {

class RecvRecord;  // src/transports/records.h, as all three
class SendRecord;
class TransferRecord;

class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::string_view name() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const Clock& clock() const = 0;

  // Takes the record over. Both may complete it at once or at any later poll(). Neither waits and neither
  // throws: a problem lands in the record.
  virtual void post(SendRecord& send) noexcept = 0;
  virtual void post(RecvRecord& recv) noexcept = 0;
  virtual void cancel(TransferRecord& record) noexcept = 0;
  // Urgent traffic of this rank is under way. Until then (a time that is past ends it) a transport that can
  // tell holds back less urgent messages that were posted and have not begun, except where somebody waits;
  // called again with the same time, it looks who waits now.
  virtual void give_way(Time until) noexcept = 0;

  // Moves what can be moved without waiting and completes records. True if anything happened.
  virtual bool poll() noexcept = 0;
  // When poll() next has something to do by the clock alone.
  virtual Time next_event() const = 0;
  // Sleeps until something arrives, wake() is called, or `until`.
  virtual void wait(Time until) noexcept = 0;
  virtual void wake() noexcept = 0;  // any thread

  // Why this transport can carry nothing more (a lost peer, a corrupt stream), or null. Sticky.
  virtual std::exception_ptr failure() const = 0;
  // Tells the peers goodbye. With a reason it is a failure: they stop with a TransportError that quotes it.
  // REQUIRES: every send of this rank is done or cancelled (the engine sees to it).
  virtual void close(const std::string& reason) noexcept = 0;

  virtual TrafficCounters counters() const = 0;
};

}  // namespace weft
