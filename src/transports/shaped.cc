#include "transports/shaped.h"

#include <algorithm>

namespace weft {

namespace {
constexpr Time kNoCause = Time::min();
}  // namespace

ShapedNetwork::ShapedNetwork(const LinkOptions& options, Time catch_up)
    : options_(options), catch_up_(catch_up), epoch_(SteadyClock().now()), model_(options) {
  for (int r = 0; r < options.ranks; ++r) ranks_.push_back(std::make_unique<Rank>());
}

void ShapedNetwork::advance(Time now) {
  // The lambdas are called under the lock, which clang does not see.
  const auto* const in_flight = in_flight_.data();
  const auto notify = [this, in_flight](std::uint32_t transfer, LinkNotice notice, Time at) {
    if (notice == LinkNotice::sent) return;
    const auto [from, held] = in_flight[transfer];
    held->arrived = true;
    held->ideal = at + epoch_;
    rank_at(from).arrived.push_back(held);
  };
  model_.advance(now - epoch_, notify);
}

Time ShapedNetwork::add(int from, Held& held, Time at, Time now, Time begins) {
  const Lock lock(mutex_);
  advance(now);
  held.transfer = model_.add(from, held.record->peer, held.record->payload.size(), model_time(at),
                             model_time(begins), operation_of(held.record->id));
  if (held.transfer >= in_flight_.size()) in_flight_.resize(held.transfer + 1);
  in_flight_[held.transfer] = {from, &held};
  const Time prediction = model_.earliest_arrival(held.transfer);
  rank_at(from).predictions.push({prediction, &held, held.number});
  return prediction + epoch_;
}

Time ShapedNetwork::give_way(int from, Time until, Time now) {
  const Lock lock(mutex_);
  advance(now);
  std::vector<Held*> may_begin;
  const auto* const in_flight = in_flight_.data();
  const auto waits = [&](std::uint32_t transfer) {
    Held& held = *in_flight[transfer].second;
    if (gives_way(*held.record)) return true;
    may_begin.push_back(&held);
    return false;
  };
  model_.give_way(from, model_time(until), model_time(now), waits);
  Time earliest = kNever;
  for (Held* held : may_begin) {
    const Time at = model_.earliest_arrival(held->transfer);
    rank_at(from).predictions.push({at, held, held->number});
    earliest = std::min(earliest, at + epoch_);
  }
  return earliest;
}

void ShapedNetwork::cancel(int from, Held& held) {
  const Lock lock(mutex_);
  if (held.arrived)
    std::erase(rank_at(from).arrived, &held);
  else
    model_.cancel(held.transfer);
}

Time ShapedNetwork::take_arrived(int from, Time now, std::vector<Held*>& out) {
  const Lock lock(mutex_);
  advance(now);
  Rank& rank = rank_at(from);
  out.insert(out.end(), rank.arrived.begin(), rank.arrived.end());
  rank.arrived.clear();
  // The first prediction is looked at again until it holds.
  while (!rank.predictions.empty()) {
    Prediction first = rank.predictions.top();
    const bool gone = first.held->number != first.number || first.held->arrived;
    const Time at = gone ? kNever : model_.earliest_arrival(first.held->transfer);
    if (at == first.at) return at + epoch_;
    rank.predictions.pop();
    first.at = at;
    if (!gone) rank.predictions.push(first);
  }
  return kNever;
}

ShapedTransport::ShapedTransport(Transport& inner, ShapedNetwork& network)
    : Decorator(inner), network_(network) {}
ShapedTransport::~ShapedTransport() = default;

void ShapedTransport::post(SendRecord& send) noexcept {
  if (send.peer == rank() || closed_ || inner_.failure()) return inner_.post(send);
  if (idle_) {  // not a reaction to anything that came over the links
    idle_ = false;
    lag_ = Time{0};
  }
  if (unused_.empty()) unused_.push_back(&pool_.emplace_back());
  Held& held = *unused_.back();
  unused_.pop_back();
  held.record = &send;
  held.arrived = held.taken = false;
  held.key = {send.peer, send.id};
  order_.enter(held);
  const Time now = clock().now();
  const Time begins = now < gives_way_until_ && gives_way(send) ? gives_way_until_ : Time{0};
  due_ = std::min(due_, network_.add(rank(), held, now - lag_, now, begins));
}

void ShapedTransport::give_way(Time until) noexcept {
  gives_way_until_ = until;
  due_ = std::min(due_, network_.give_way(rank(), until, clock().now()));
  inner_.give_way(until);
}

void ShapedTransport::release(Held& held) {
  held.record = nullptr;
  held.taken = false;
  ++held.number;
  unused_.push_back(&held);
}

// The record belongs to the inner transport from here on. Gives the one behind it in its flow.
ShapedNetwork::Held* ShapedTransport::hand_over(Held& held) {
  SendRecord& send = *held.record;
  auto* behind = static_cast<Held*>(order_.leave(held));
  network_.rank_at(send.peer).last_arrival.store(held.ideal.count(), std::memory_order_relaxed);
  release(held);
  inner_.post(send);
  return behind;
}

// Gives the ideal time of the last arrival.
Time ShapedTransport::hand_over_arrived(Time now) {
  const std::size_t known = ready_.size();
  due_ = network_.take_arrived(rank(), now, ready_);
  for (std::size_t i = known; i < ready_.size(); ++i) ready_[i]->taken = true;
  Time last = kNoCause;
  for (std::size_t i = 0; i < ready_.size(); ++i) {  // grows on the way
    Held* held = ready_[i];
    if (held == nullptr || !held->taken || !FlowOrder::is_first(*held))
      continue;  // or handed over already, as the one behind another
    last = std::max(last, held->ideal);
    ready_[i] = nullptr;
    if (Held* behind = hand_over(*held); behind != nullptr && behind->taken) ready_.push_back(behind);
  }
  ready_.clear();
  if (last != kNoCause) last_handed_over_ = last;
  return last;
}

bool ShapedTransport::poll() noexcept {
  const Time now = clock().now();
  Time cause = kNoCause;
  if (now >= due_ || !ready_.empty()) cause = hand_over_arrived(now);
  bool any = cause != kNoCause;
  if (inner_.poll()) {
    any = true;
    const std::int64_t arrival =
        network_.rank_at(rank()).last_arrival.exchange(-1, std::memory_order_relaxed);
    if (arrival >= 0)
      cause = std::max(cause, Time(arrival));
    else if (now - last_handed_over_ <= network_.catch_up())
      cause = std::max(cause, last_handed_over_);  // it was taken
  }
  keep_own_time(now, any, cause);
  return any;
}

void ShapedTransport::keep_own_time(Time now, bool any, Time cause) {
  if (!any) {
    if (!idle_) idle_since_ = now - lag_;
    idle_ = true;
    return;
  }
  const Time own = idle_ ? idle_since_ : now - lag_;
  if (cause != kNoCause)
    lag_ = std::clamp(now - std::max(own, cause), Time{0}, network_.catch_up());
  else if (idle_)
    lag_ = Time{0};
  idle_ = false;
}

Time ShapedTransport::next_event() const {
  return ready_.empty() ? std::min(due_, inner_.next_event()) : Time{0};
}

void ShapedTransport::wait(Time until) noexcept { inner_.wait(std::min(until, next_event())); }

void ShapedTransport::cancel(TransferRecord& record) noexcept {
  const auto held = std::ranges::find_if(pool_, [&](const Held& h) { return h.record == &record; });
  if (held == pool_.end()) return inner_.cancel(record);
  SendRecord& send = *held->record;
  if (held->taken)
    std::ranges::replace(ready_, &*held, nullptr);
  else
    network_.cancel(rank(), *held);
  auto* behind = static_cast<Held*>(order_.leave(*held));
  if (behind != nullptr && behind->taken && FlowOrder::is_first(*behind)) ready_.push_back(behind);
  release(*held);
  if (send.observer != nullptr) send.observer->sent(send);
}

// What is still held goes ahead of the goodbye.
void ShapedTransport::close(const std::string& reason) noexcept {
  for (Held& held : pool_) {
    for (Held* next = &held; next != nullptr && next->record != nullptr && FlowOrder::is_first(*next);) {
      if (!next->taken) network_.cancel(rank(), *next);
      next->ideal = clock().now();
      next = hand_over(*next);
    }
  }
  ready_.clear();
  due_ = kNever;
  closed_ = true;
  inner_.close(reason);
}

}  // namespace weft
