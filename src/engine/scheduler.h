// Decides when a message may leave: a Transport in front of the engine's transport. The rules are in
// weft/engine.h.
//
// A send walks fresh -> queued -> moving -> done; `stalled` is moving without counting against the window.
// Queued sends stand in one list per (class, priority), oldest first. Receives pass straight through.
#pragma once

#include <atomic>
#include <map>
#include <utility>

#include "transports/decorator.h"
#include "weft/engine.h"
#include "weft/transport.h"

namespace weft {

class Scheduler final : public Decorator, public SendObserver {
 public:
  Scheduler(Transport& inner, const EngineOptions& options)
      : Decorator(inner), options_(options), last_urgent_(inner.clock().now()) {}

  void set_endpoint(const Endpoint& endpoint) { endpoint_ = &endpoint; }  // says how long a micro-op is
  // A blocking operation of this rank is known / has ended.
  void blocking_begins() { ++blocking_; }
  void blocking_ends() { --blocking_; }
  void hold() { holds_.fetch_add(1); }       // any thread
  void release() { holds_.fetch_sub(1); }    // any thread
  void look_again() { look_again_ = true; }  // somebody waits for a ticket now
  // Tells the transport if traffic is held from now on, or no longer.
  void look_at_hold() {
    if (held() != was_held_) hold_changes();
  }
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
  bool held() const { return blocking_ > 0 || holds_.load(std::memory_order_relaxed) > 0; }
  void hold_changes();
  std::size_t window(Time now) const;
  Time stalled_at(const SendRecord& send) const;
  bool start_held(Time now);
  bool start_free(Time now);
  void give_back_stalled(Time now);
  void start(SendRecord& send, Time now, bool aged);

  const EngineOptions& options_;
  const Endpoint* endpoint_ = nullptr;
  std::map<std::pair<TrafficClass, int>, List>
      queues_;  // a list stays when it is empty: no allocation per message
  std::size_t queued_ = 0;
  List moving_;  // counts against the window, in order of start
  std::size_t moving_bytes_ = 0;
  Time last_urgent_;  // when a long blocking message left; before the first, since when there has been none
  int blocking_ = 0;
  std::atomic<int> holds_{0};
  bool look_again_ = false;
  Time next_aging_ = kNever;
  bool was_held_ = false;  // age counts from where holding began: waiting in a busy window is not being held
  Time held_since_{};
  Time held_until_{};
};

}  // namespace weft
