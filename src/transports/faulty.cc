#include "transports/faulty.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "base/mutex.h"
#include "weft/error.h"
#include "weft/random.h"

namespace weft {

namespace {

enum Purpose : std::uint32_t { kDelay = 0x66617501, kTamper = 0x66617502 };

std::uint64_t hash_of(int from, int to, const Identity& id) {
  return mix(hash_of(MatchKey{from, id}) ^ static_cast<std::uint64_t>(to));
}

// All that is drawn for one message.
Random draws(std::uint64_t seed, Purpose purpose, std::uint64_t message, std::uint32_t number) {
  return Random(mix(seed) ^ message, purpose, number);
}

void flip_bit(std::byte* bytes, std::size_t count, Random& random) {
  const std::size_t at = std::size_t{random()} % count;
  bytes[at] ^= std::byte{1} << random.below(8);
}

struct TamperState {
  FaultOptions options;
  Arena arena;  // of shortened payloads
  Mutex mutex;
  MessageNumbers numbers WEFT_GUARDED_BY(mutex);
};

bool tamper(TamperState& state, int from, int to, wire::FrameBytes& frame, Buffer& payload) {
  const FaultOptions& options = state.options;
  const Identity id = wire::parse_frame(frame, from).id;
  std::uint32_t number = 0;
  {
    const Lock lock(state.mutex);
    number = state.numbers.next(from, to, id);
  }
  Random random = draws(options.seed, kTamper, hash_of(from, to, id), number);
  // All four are drawn, whatever comes of them: raising one probability does not move the others' faults.
  const bool lose = random.uniform() < options.drop;
  const bool shorten = random.uniform() < options.truncate;
  const bool change = random.uniform() < options.corrupt;
  const bool change_frame = random.uniform() < options.corrupt_frame;
  if (lose) return false;
  if (shorten && payload.size() > 0) {
    Buffer shorter(state.arena, std::size_t{random()} % payload.size());
    if (shorter.size() > 0) std::memcpy(shorter.data(), payload.data(), shorter.size());
    payload = std::move(shorter);
  }
  if (change && payload.size() > 0)
    flip_bit(payload.data(), payload.size(), random);
  else if (change || change_frame)
    flip_bit(frame.data(), frame.size(), random);
  return true;
}

}  // namespace

void check(const FaultOptions& options) {
  const auto probability = [](double value, const char* name) {
    if (value >= 0 && value <= 1) return;  // false for NaN
    throw UsageError(std::string("faulty: ") + name + " is " + std::to_string(value) +
                     "; a probability is 0 .. 1");
  };
  probability(options.delay, "delay");
  probability(options.drop, "drop");
  probability(options.truncate, "truncate");
  probability(options.corrupt, "corrupt");
  probability(options.corrupt_frame, "corrupt_frame");
  if (options.max_delay < Time::zero()) throw UsageError("faulty: max_delay is negative");
}

std::uint32_t MessageNumbers::next(int from, int to, const Identity& id) {
  return numbers_[hash_of(from, to, id)]++;
}

Tamper make_tamper(const FaultOptions& options) {
  check(options);
  auto state = std::make_shared<TamperState>();
  state->options = options;
  return [state](int from, int to, wire::FrameBytes& frame, Buffer& payload) {
    return tamper(*state, from, to, frame, payload);
  };
}

FaultyTransport::FaultyTransport(Transport& inner, FaultOptions options)
    : Decorator(inner), options_(std::move(options)) {
  check(options_);
}

Time FaultyTransport::delay_of(const SendRecord& send) {
  if (options_.delay <= 0) return Time::zero();
  if (options_.delay_only && *options_.delay_only != send.operation.traffic) return Time::zero();
  const std::uint32_t number = numbers_.next(rank(), send.peer, send.id);
  Random random = draws(options_.seed, kDelay, hash_of(rank(), send.peer, send.id), number);
  if (random.uniform() >= options_.delay) return Time::zero();
  return from_seconds(random.uniform() * seconds(options_.max_delay));
}

void FaultyTransport::post(SendRecord& send) noexcept {
  if (!dead_ && ++sends_ == options_.die_at_message) die();
  if (dead_) {
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(failure_);
    return;
  }
  const Time delay = delay_of(send);
  Time due = clock().now() + delay;
  bool behind_another = false;
  for (const Held& other : held_) {
    if (other.send->peer != send.peer || other.send->id != send.id) continue;
    behind_another = true;
    due = std::max(due, other.due);
  }
  if (delay > Time::zero()) ++delayed_;
  if (delay > Time::zero() || behind_another)
    held_.push_back({&send, due});
  else
    inner_.post(send);
}

void FaultyTransport::post(RecvRecord& recv) noexcept {
  if (dead_)
    recv.complete(failure_);
  else
    inner_.post(recv);
}

void FaultyTransport::cancel(TransferRecord& record) noexcept {
  const auto held =
      std::find_if(held_.begin(), held_.end(), [&](const Held& h) { return h.send == &record; });
  if (held == held_.end()) {
    inner_.cancel(record);
    return;
  }
  SendRecord& send = *held->send;
  held_.erase(held);
  if (send.observer != nullptr) send.observer->sent(send);
}

// Nothing goes out any more, and what arrives is not looked at.
void FaultyTransport::die() noexcept {
  dead_ = true;
  failure_ = std::make_exception_ptr(TransportError(
      TransportError::Kind::closed, -1,
      "rank " + std::to_string(rank()) + " died at message " + std::to_string(sends_) + ", as it was told"));
  if (!options_.last_words.empty()) inner_.close(options_.last_words);
}

std::vector<FaultyTransport::Held>::iterator FaultyTransport::first_due() {
  return std::min_element(held_.begin(), held_.end(),
                          [](const Held& a, const Held& b) { return a.due < b.due; });
}

bool FaultyTransport::poll() noexcept {
  if (dead_) return false;
  bool any = inner_.poll();
  while (!dead_ && !held_.empty()) {
    const auto next = first_due();
    if (next->due > clock().now()) break;
    SendRecord& send = *next->send;
    held_.erase(next);
    inner_.post(send);
    any = true;
  }
  return any;
}

Time FaultyTransport::next_event() const {
  if (dead_) return kNever;
  Time next = inner_.next_event();
  for (const Held& held : held_) next = std::min(next, held.due);
  return next;
}

void FaultyTransport::wait(Time until) noexcept {
  if (!dead_) {
    inner_.wait(std::min(until, next_event()));
    return;
  }
  // What lies unread in the inner transport would end its wait at once.
  const Time now = clock().now();
  if (until > now) std::this_thread::sleep_for(std::min(until - now, Time(1ms)));
}

void FaultyTransport::close(const std::string& reason) noexcept {
  if (!dead_) inner_.close(reason);
}

}  // namespace weft
