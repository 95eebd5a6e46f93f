#include "transports/sim.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "transports/delivery.h"
#include "transports/sim_parts.h"

namespace weft {

SimWorld::State::State(SimOptions o)
    : options(std::move(o)), link([this] {
        if (options.link.max_quanta == 0) options.link.max_quanta = 64;
        return LinkModel(options.link);
      }()) {}

SimMessage& SimWorld::State::make_message(SendRecord& send, int from) {
  if (unused.empty()) unused.push_back(&pool.emplace_back());
  SimMessage& m = *unused.back();
  unused.pop_back();
  m.live = true;
  m.key = {from, send.id};
  m.frame = wire::encode_frame(frame_of(send, options.job, 0, from));
  m.send = &send;
  m.bytes = m.link_bytes = send.payload.size();
  if (send.operation.is_whole && options.link.byte_scale != 1)
    m.link_bytes =
        static_cast<std::size_t>(std::ceil(static_cast<double>(m.bytes) / options.link.byte_scale));
  m.to = send.peer;
  m.eager = options.eager_limit > 0 && m.bytes <= options.eager_limit;
  send.transport_data = &m;
  statistics.alive = pool.size() - unused.size();
  statistics.peak_alive = std::max(statistics.peak_alive, statistics.alive);
  return m;
}

// Frees a message that nothing refers to any more.
void SimWorld::State::release(SimMessage& m) {
  if (!m.delivered || !m.settled || m.delayed) return;
  m.live = m.eager = m.matched = m.started = m.left = m.placed = m.arrived = m.queued = m.handled =
      m.delivered = m.settled = false;
  m.copy = Buffer();
  unused.push_back(&m);
  statistics.alive = pool.size() - unused.size();
}

void SimWorld::State::match(SimMessage& m, RecvRecord& recv) {
  m.recv = &recv;
  m.matched = true;
  recv.transport_data = &m;
}

void SimWorld::State::start(SimMessage& m) {
  m.started = m.on_link = true;
  const Time until = rank_at(m.key.source).gives_way_until_;
  const bool waits = clock.time < until && m.send != nullptr && gives_way(*m.send);
  m.transfer =
      link.add(m.key.source, m.to, m.link_bytes, clock.time, waits ? until : Time{0}, operation_of(m.key.id));
  if (m.transfer >= in_flight.size()) in_flight.resize(m.transfer + 1);
  in_flight[m.transfer] = &m;
  ++statistics.messages;
}

// The sender's memory may go: the payload moves to where its receive wants it, or else into a buffer. (The
// receive's memory is the transport's until the record is completed, so nobody can see that it is early.)
void SimWorld::State::let_go_of_sender(SimMessage& m) {
  if (m.send == nullptr || m.bytes == 0) return;
  const std::span<const std::byte> payload = m.send->payload;
  m.placed =
      m.recv != nullptr && m.recv->sink.kind == Sink::Kind::into && m.recv->sink.into.size() == m.bytes;
  if (!m.placed) m.copy = Buffer(arena, m.bytes);
  std::copy(payload.begin(), payload.end(), m.placed ? m.recv->sink.into.data() : m.copy.data());
}

void SimWorld::State::arrive(SimMessage& m) {
  m.delayed = false;
  if (m.delivered) return release(m);  // it was lost meanwhile
  m.arrived = true;
  offer(m);
}

// To its receiver, if nothing is missing.
void SimWorld::State::offer(SimMessage& m) {
  if (!m.arrived || !m.matched || m.queued || !FlowOrder::is_first(m)) return;
  m.queued = true;
  Rank& to = rank_at(m.to);
  to.inbox_.push_back({&m, false});
  mark(to);
}

void SimWorld::State::tell_sender(SimMessage& m) {
  Rank& from = rank_at(m.key.source);
  from.inbox_.push_back({&m, true});
  mark(from);
}

void SimWorld::State::schedule(Time at, Event::Kind kind, SimMessage* message, int rank) {
  events.push({kind, at, sequence++, message, rank});
}

void SimWorld::State::depart(Rank& rank, std::string farewell, bool failed, Time known_after) {
  rank.gone_ = true;
  rank.failed_ = failed;
  rank.farewell_ = std::move(farewell);
  schedule(clock.time + known_after, Event::news, nullptr, rank.rank_);
  rank.end_records();
  mark(rank);
}

void SimWorld::State::die(Rank& rank, const std::string& how) {
  if (rank.gone_) return;
  rank.dead_ = true;
  rank.failure_ = sim_error(TransportError::Kind::closed, rank.rank_,
                            "rank " + std::to_string(rank.rank_) + " died (simulated) " + how);
  depart(rank, "died (simulated) " + how, true, from_seconds(options.detection_seconds));
  rank.lose_messages();
}

void SimWorld::State::handle(const Event& event) {
  Rank* rank = event.kind == Event::arrival ? nullptr : &rank_at(event.rank);
  switch (event.kind) {
    case Event::arrival:
      arrive(*event.message);
      break;
    case Event::death:
      die(*rank, "at " + std::to_string(seconds(clock.time)) + " s");
      break;
    case Event::news:
      rank->known_ = true;
      for (const std::unique_ptr<Rank>& other : ranks) other->peer_gone(*rank, rank->failed_);
      rank->give_up_messages();
      break;
  }
}

void SimWorld::State::poll(Rank& rank) {
  ++statistics.polls;
  if (rank.dead_ || rank.pollable_ == nullptr) {
    if (rank.poll()) mark(rank);
    return;
  }
  const bool any = rank.pollable_->poll();
  Time deadline = rank.pollable_->next_deadline();
  if (any || deadline <= clock.time) {
    mark(rank);
    deadline = kNever;
  }
  if (deadline == rank.deadline_) return;
  if (rank.deadline_ != kNever) deadlines.erase({rank.deadline_, rank.rank_});
  if (deadline != kNever) deadlines.emplace(deadline, rank.rank_);
  rank.deadline_ = deadline;
}

// Polls whoever has something to do, until nobody has.
void SimWorld::State::settle() {
  constexpr std::size_t kEndless = 100'000'000;
  for (std::size_t i = 0; i < dirty.size(); ++i) {
    Rank& rank = *dirty[i];
    rank.dirty_ = false;
    poll(rank);
    if (i == kEndless) {
      throw std::logic_error("sim: rank " + std::to_string(rank.rank_) + " has always something to do at " +
                             std::to_string(seconds(clock.time)) + " s");
    }
  }
  dirty.clear();
}

// To the next point in time at which something happens. False if nothing will.
bool SimWorld::State::step() {
  Time next = link.next_event();
  if (!events.empty()) next = std::min(next, events.top().at);
  if (!deadlines.empty()) next = std::min(next, deadlines.begin()->first);
  if (next == kNever) return false;
  clock.time = std::max(clock.time, next);
  ++statistics.instants;
  const auto notify = [this](std::uint32_t transfer, LinkNotice notice, Time) {
    SimMessage& m = *in_flight[transfer];
    if (notice == LinkNotice::sent) {
      m.left = true;
      if (m.eager) tell_sender(m);
      return;
    }
    m.on_link = false;
    if (options.jitter_seconds <= 0) return arrive(m);
    const std::uint64_t random = mix(mix(options.seed) ^ ++sequence);
    m.delayed = true;
    schedule(clock.time + from_seconds(options.jitter_seconds * 0x1p-64 * static_cast<double>(random)),
             Event::arrival, &m, 0);
  };
  link.advance(clock.time, notify);
  while (!events.empty() && events.top().at <= clock.time) {
    const Event event = events.top();
    events.pop();
    handle(event);
  }
  while (!deadlines.empty() && deadlines.begin()->first <= clock.time) {
    Rank& rank = rank_at(deadlines.begin()->second);
    deadlines.erase(deadlines.begin());
    rank.deadline_ = kNever;
    mark(rank);
  }
  return true;
}

SimWorld::SimWorld(SimOptions options) {
  const auto below_an_hour = [](double seconds) { return seconds >= 0 && seconds < 3600; };
  if (!below_an_hour(options.jitter_seconds) || !below_an_hour(options.detection_seconds)) {
    throw UsageError("sim: jitter_seconds and detection_seconds must be between 0 and 3600");
  }
  for (const SimDeath& death : options.deaths) {
    if (death.rank < 0 || death.rank >= options.link.ranks || death.at < Time{0}) {
      throw UsageError("sim: there is no rank " + std::to_string(death.rank) +
                       " that could die, or no such time");
    }
  }
  if (options.workers < 0) throw UsageError("sim: the number of workers must not be negative");
  std::shared_ptr<SimWorkers::Threads> cores;
  if (options.workers > 0)
    cores = std::make_shared<SimWorkers::Threads>(static_cast<std::size_t>(options.workers));
  state_ = std::make_unique<State>(std::move(options));
  for (int r = 0; r < state_->options.link.ranks; ++r)
    state_->ranks.push_back(std::make_unique<Rank>(*state_, r, cores ? SimWorkers(cores) : SimWorkers()));
  for (const SimDeath& death : state_->options.deaths) {
    Rank& rank = state_->rank_at(death.rank);
    rank.dies_at_message_ = std::min(rank.dies_at_message_, death.at_message);
    if (death.at != kNever) state_->schedule(death.at, State::Event::death, nullptr, death.rank);
  }
}

SimWorld::~SimWorld() = default;

int SimWorld::size() const { return static_cast<int>(state_->ranks.size()); }

Transport& SimWorld::transport(int rank) { return *state_->ranks.at(static_cast<std::size_t>(rank)); }

SimWorkers& SimWorld::workers(int rank) { return state_->ranks.at(static_cast<std::size_t>(rank))->workers_; }

void SimWorld::attach(int rank, Pollable& pollable) {
  state_->ranks.at(static_cast<std::size_t>(rank))->pollable_ = &pollable;
}

void SimWorld::detach(int rank) {
  Rank& r = *state_->ranks.at(static_cast<std::size_t>(rank));
  r.pollable_ = nullptr;
  if (r.deadline_ != kNever) state_->deadlines.erase({std::exchange(r.deadline_, kNever), rank});
}

void SimWorld::run() {
  const auto never = [] { return false; };
  run_until(never);
}

bool SimWorld::run_until(FunctionRef<bool()> done) {
  for (const std::unique_ptr<Rank>& rank : state_->ranks)
    state_->mark(*rank);  // their owners may have started something
  for (;;) {
    state_->settle();
    if (done()) return true;
    if (!state_->step()) return false;
  }
}

Time SimWorld::now() const { return state_->clock.time; }
std::uint64_t SimWorld::event_hash() const { return state_->hash; }
SimStatistics SimWorld::statistics() const { return state_->statistics; }

}  // namespace weft
