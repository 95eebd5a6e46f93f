#include "engine/scheduler.h"

#include <algorithm>
#include <cmath>

namespace weft {

namespace {

bool is_blocking(const SendRecord& send) { return send.operation.traffic == TrafficClass::blocking; }
// A question of the engine (engine/inquiry.h) may wait for long: its receiver has to have doubts too.
bool holds_others(const SendRecord& send) { return is_blocking(send) && send.id.hop != kAskingHop; }

// What is held is held for this many times what was predicted, and never for less than hold_limit.
constexpr int kPatience = 4;

// The window in micro-ops. What the transport has, urgent traffic cannot overtake any more: two keep the link
// busy where a peer takes what it is sent at once. One whose processors are busy takes it when its
// communication thread gets its turn, milliseconds later; where there is no urgent traffic, a wide window
// bridges that.
constexpr std::size_t kNarrow = 2;
constexpr std::size_t kWide = 16;
constexpr Time kQuiet = 1s;                // without urgent traffic, before the window widens
constexpr std::size_t kShort = 16 * 1024;  // a message up to this is gone too soon to count as traffic

}  // namespace

void Scheduler::List::push(SendRecord& send) {
  send.schedule.next = nullptr;
  send.schedule.previous = last;
  (last != nullptr ? last->schedule.next : first) = &send;
  last = &send;
}

void Scheduler::List::erase(SendRecord& send) {
  SendRecord::Schedule& s = send.schedule;
  (s.previous != nullptr ? s.previous->schedule.next : first) = s.next;
  (s.next != nullptr ? s.next->schedule.previous : last) = s.previous;
  s.next = s.previous = nullptr;
}

std::size_t Scheduler::window(Time now) const {
  if (options_.window_bytes != 0) return options_.window_bytes;
  return (now - last_urgent_ < kQuiet ? kNarrow : kWide) * endpoint_->micro_op_bytes();
}

// Of a message, as the window counts them: a byte of an operation that is whole stands for fewer than one of
// the others does.
std::size_t Scheduler::weight(const SendRecord& send) const {
  if (!send.operation.is_whole || endpoint_->byte_scale() == 1) return send.payload.size();
  return static_cast<std::size_t>(
      std::ceil(static_cast<double>(send.payload.size()) / endpoint_->byte_scale()));
}

void Scheduler::post(SendRecord& send) noexcept {
  send.observer = this;
  send.schedule.queued = clock().now();
  if (is_blocking(send) && send.payload.size() > kShort) last_urgent_ = send.schedule.queued;
  if (is_blocking(send) || !options_.priority) {
    send.schedule.stage = SendRecord::Stage::stalled;  // never counts
    send.schedule.begun = send.schedule.queued;
    if (holds_others(send)) {
      const LinkCost& cost = endpoint_->cost();
      ++urgent_sends_;
      urgent_predicted_ +=
          from_seconds(cost.hop_seconds + static_cast<double>(weight(send)) * cost.seconds_per_byte);
    }
    if (send.id.hop != kAskingHop) last_start_ = send.schedule.queued;
    inner_.post(send);
    look_at_hold();  // a short message is gone by now and has held nothing
    return;
  }
  send.schedule.stage = SendRecord::Stage::queued;
  queues_[{send.operation.traffic, send.operation.priority}].push(send);
  ++queued_;
  if (send.operation.waited_for) look_again_ = true;
  look_at_hold();
  if (held_)
    next_aging_ = std::min(next_aging_, later(send.schedule.queued, hold_limit_));
  else if (moving_bytes_ == 0 || moving_bytes_ + weight(send) <= window(send.schedule.queued))
    pump();
}

void Scheduler::start(SendRecord& send, Time now, Unheld unheld) {
  queues_[{send.operation.traffic, send.operation.priority}].erase(send);
  --queued_;
  send.schedule.stage = SendRecord::Stage::moving;
  send.schedule.begun = now;
  send.schedule.unheld = unheld;
  moving_.push(send);
  moving_bytes_ += weight(send);
  last_start_ = now;
  inner_.post(send);
}

void Scheduler::sent(SendRecord& send) noexcept {
  if (send.schedule.stage == SendRecord::Stage::moving) {
    moving_.erase(send);
    moving_bytes_ -= weight(send);
  }
  if (send.schedule.stage != SendRecord::Stage::fresh && holds_others(send)) --urgent_sends_;
  send.schedule.stage = SendRecord::Stage::fresh;
  if (options_.trace == nullptr) return;
  const Operation& operation = send.operation;
  options_.trace->add({.kind = TraceEvent::Kind::micro_op,
                       .name = std::string(operation.name),
                       .traffic = operation.traffic,
                       .priority = operation.priority,
                       .slot = send.id.slot,
                       .step = send.id.step,
                       .hop = send.id.hop,
                       .peer = send.peer,
                       .bytes = send.payload.size(),
                       .ready = send.schedule.queued,
                       .started = send.schedule.begun,
                       .finished = clock().now(),
                       .unheld = send.schedule.unheld,
                       .failed = static_cast<bool>(operation.failure)});
}

void Scheduler::cancel(TransferRecord& record) noexcept {
  auto* send = dynamic_cast<SendRecord*>(&record);
  if (send != nullptr && send->schedule.stage == SendRecord::Stage::queued) {
    queues_[{send->operation.traffic, send->operation.priority}].erase(*send);
    --queued_;
    send->schedule.stage = SendRecord::Stage::fresh;
    return;
  }
  inner_.cancel(record);
  if (send != nullptr && send->schedule.stage != SendRecord::Stage::fresh) sent(*send);
}

// On a slow link a long message takes its time without being stalled: four times what the whole window needs.
Time Scheduler::stalled_at(const SendRecord& send) const {
  if (options_.stall_limit == kNever) return kNever;
  const double busy = 4 * static_cast<double>(std::max(window(send.schedule.begun), weight(send))) *
                      endpoint_->cost().seconds_per_byte;
  return send.schedule.begun + options_.stall_limit + from_seconds(busy);
}

void Scheduler::give_back_stalled(Time now) {
  while (moving_.first != nullptr && now >= stalled_at(*moving_.first)) {
    SendRecord& send = *moving_.first;
    moving_.erase(send);
    moving_bytes_ -= weight(send);
    send.schedule.stage = SendRecord::Stage::stalled;
  }
}

// Held: only what has waited for too long, or what somebody waits for.
bool Scheduler::start_held(Time now) {
  if (now < next_aging_ && !look_again_) return false;
  look_again_ = false;
  next_aging_ = kNever;
  bool any = false;
  for (auto& [key, list] : queues_) {
    for (SendRecord* send = list.first; send != nullptr;) {
      SendRecord* next = send->schedule.next;
      const Time due = later(std::max(send->schedule.queued, held_since_), hold_limit_);
      const bool wanted = send->operation.waited_for && options_.hold_limit != kNever;
      if (wanted || now >= due) {
        start(*send, now, now >= due ? Unheld::aged : Unheld::wanted);
        any = true;
      } else {
        next_aging_ = std::min(next_aging_, due);
      }
      send = next;
    }
  }
  return any;
}

bool Scheduler::start_free(Time now) {
  bool any = false;
  for (auto& [key, list] : queues_) {
    while (list.first != nullptr) {
      SendRecord& send = *list.first;
      if (moving_bytes_ > 0 && moving_bytes_ + weight(send) > window(now)) return any;
      start(send, now, Unheld::no);
      any = true;
    }
  }
  return any;
}

void Scheduler::look_at_hold() {
  const Announcements::Now announced = announcements_.look(urgent_sends_ > 0);
  const bool held = announced.any || urgent_sends_ > 0;
  if (!held) urgent_predicted_ = Time{0};
  if (!held && !held_) return;
  const Time now = clock().now();
  if (announced_ && !announced.any) end_hold_span();
  if (!announced_ && announced.any) announced_since_ = now;
  announced_ = announced.any;
  const Time predicted = announced.predicted + urgent_predicted_;
  const Time limit =
      options_.hold_limit == kNever ? kNever : std::max(options_.hold_limit, kPatience * predicted);
  if (held == held_ && limit == hold_limit_) return;
  if (held != held_) held_since_ = now;
  held_ = held;
  hold_limit_ = limit;
  next_aging_ = later(held_since_, limit);
  held_until_ = held ? next_aging_ : Time{0};
  if (options_.priority) inner_.give_way(held_until_);  // what the transport has already
}

void Scheduler::end_hold_span() {
  if (!std::exchange(announced_, false) || options_.trace == nullptr) return;
  options_.trace->add({.kind = TraceEvent::Kind::hold,
                       .name = "hold",
                       .traffic = TrafficClass::blocking,
                       .ready = announced_since_,
                       .started = announced_since_,
                       .finished = clock().now()});
}

bool Scheduler::pump() noexcept {
  look_at_hold();
  if (look_again_ && held_ && options_.priority && options_.hold_limit != kNever)
    inner_.give_way(held_until_);
  if (queued_ == 0) {
    look_again_ = false;
    next_aging_ = kNever;
    return false;
  }
  const Time now = clock().now();
  give_back_stalled(now);
  return held_ ? start_held(now) : start_free(now);
}

Time Scheduler::next_deadline() const {
  if (queued_ == 0) return kNever;
  if (held_ != (urgent_sends_ > 0 || announcements_.any())) return Time{0};
  if (held_) return next_aging_;
  return moving_.first != nullptr ? stalled_at(*moving_.first) : Time{0};
}

}  // namespace weft
