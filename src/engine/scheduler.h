// Decides when a message may leave: a Transport in front of the engine's transport. The rules are in
// weft/engine.h.
//
// A send walks fresh -> queued -> moving -> done; `stalled` is moving without counting against the window.
// Queued sends stand in one list per (class, priority), oldest first. Receives pass straight through.
//
// What holds: announcements and operations that say so (hold .. release), and blocking sends from post to
// their end. Holding counts from when this thread has noticed it (look_at_hold): no start is judged by a
// state that the trace does not show.
#pragma once

#include <map>
#include <utility>

#include "base/mutex.h"
#include "transports/decorator.h"
#include "transports/endpoint.h"
#include "weft/engine.h"

namespace weft {

// What holds beside blocking sends: announcements, and operations that say so. Any thread.
class Announcements {
 public:
  void begin(Time predicted) {
    const Lock lock(mutex_);
    ++count_;
    predicted_ += predicted;
  }
  void end() {
    const Lock lock(mutex_);
    --count_;
  }
  struct Now {
    bool any = false;
    Time predicted{};  // of all that have come since nothing held
  };
  // `urgent`: something else holds, so the sum goes on.
  Now look(bool urgent) {
    const Lock lock(mutex_);
    if (count_ == 0 && !urgent) predicted_ = Time{0};
    return {count_ > 0, predicted_};
  }
  bool any() const {
    const Lock lock(mutex_);
    return count_ > 0;
  }

 private:
  mutable Mutex mutex_;
  int count_ WEFT_GUARDED_BY(mutex_) = 0;
  Time predicted_ WEFT_GUARDED_BY(mutex_){};
};

class Scheduler final : public Decorator, public SendObserver {
 public:
  Scheduler(Transport& inner, const EngineOptions& options)
      : Decorator(inner), options_(options), last_urgent_(inner.clock().now()) {}

  void set_endpoint(const Endpoint& endpoint) { endpoint_ = &endpoint; }  // says how long a micro-op is
  Announcements& announcements() { return announcements_; }               // any thread
  void look_again() { look_again_ = true; }                               // somebody waits for a ticket now
  // Takes note of what holds now, and tells the transport if that has changed.
  void look_at_hold();
  void end_hold_span();                            // in the trace
  Time last_start() const { return last_start_; }  // of a send: the queue has moved
  // Starts what may start. True if anything did.
  bool pump() noexcept;
  Time next_deadline() const;

  using Decorator::post;  // receives go straight through
  void post(SendRecord& send) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void sent(SendRecord& send) noexcept override;

 private:
  struct List {
    SendRecord* first = nullptr;
    SendRecord* last = nullptr;
    void push(SendRecord& send);
    void erase(SendRecord& send);
  };
  std::size_t window(Time now) const;
  std::size_t weight(const SendRecord& send) const;
  Time stalled_at(const SendRecord& send) const;
  bool start_held(Time now);
  bool start_free(Time now);
  void give_back_stalled(Time now);
  void start(SendRecord& send, Time now, Unheld unheld);

  const EngineOptions& options_;
  const Endpoint* endpoint_ = nullptr;
  // A list stays when it is empty: no allocation per message.
  std::map<std::pair<TrafficClass, int>, List> queues_;
  std::size_t queued_ = 0;
  List moving_;  // counts against the window, in order of start
  std::size_t moving_bytes_ = 0;
  Time last_urgent_;  // when a long blocking message left; before the first, since when there has been none
  Time last_start_{};
  bool look_again_ = false;
  Time next_aging_ = kNever;

  Announcements announcements_;
  int urgent_sends_ = 0;     // blocking sends that are not done
  Time urgent_predicted_{};  // of all that were posted since nothing held
  // As last noticed.
  bool announced_ = false;
  Time announced_since_{};
  bool held_ = false;
  Time held_since_{};  // age counts from here: waiting in a busy window is not being held
  Time hold_limit_{};
  Time held_until_{};
};

}  // namespace weft
