#include "transports/threads.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/worker_pool.h"
#include "transports/delivery.h"
#include "transports/match_table.h"
#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft {

namespace {

// A message on its way. Made by the sender; freed by the sender when the receiver has released it, or by the
// receiver when the sender does not wait for it (copied or cancelled).
struct Envelope {
  enum State { waiting, claimed, released, cancelled };

  MatchKey key;  // at the receiver
  Envelope* match_next = nullptr;
  Envelope* match_previous = nullptr;
  wire::FrameBytes frame;
  std::span<const std::byte> payload;
  Buffer copy;                 // eager: `payload` is this
  SendRecord* send = nullptr;  // who waits for the release; the sender's thread alone touches it
  bool eager = false;          // nobody waits: the receiver frees the envelope
  int source = 0;
  std::atomic<int> state{waiting};
};

struct Mail {
  enum Kind { arrived, released, refused, goodbye };
  Kind kind = arrived;
  Envelope* envelope = nullptr;
  int from = 0;  // goodbye
};

class Mailbox {
 public:
  // False once the owner has closed.
  bool push(const Mail& mail) {
    const Lock lock(mutex_);
    if (closed_) return false;
    mails_.push_back(mail);
    has_mail_.store(true, std::memory_order_release);
    if (sleeping_) changed_.notify_one();
    return true;
  }
  bool empty() const { return !has_mail_.load(std::memory_order_acquire); }
  void take(std::vector<Mail>& out) {
    const Lock lock(mutex_);
    out.swap(mails_);
    has_mail_.store(false, std::memory_order_relaxed);
  }
  void close(std::vector<Mail>& out) {
    const Lock lock(mutex_);
    closed_ = true;
    out.swap(mails_);
  }
  void sleep(Time until) {
    const Lock lock(mutex_);
    const std::chrono::steady_clock::time_point end(until);
    sleeping_ = true;
    bool late = false;
    while (!woken_ && mails_.empty() && !late) {
      if (until == kNever)
        lock.wait(changed_);
      else
        late = lock.wait_until(changed_, end) == std::cv_status::timeout;
    }
    sleeping_ = false;
    woken_ = false;
  }
  void wake() {
    const Lock lock(mutex_);
    woken_ = true;
    if (sleeping_) changed_.notify_one();
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  std::vector<Mail> mails_ WEFT_GUARDED_BY(mutex_);
  std::atomic<bool> has_mail_{false};
  bool sleeping_ WEFT_GUARDED_BY(mutex_) = false;
  bool woken_ WEFT_GUARDED_BY(mutex_) = false;
  bool closed_ WEFT_GUARDED_BY(mutex_) = false;
};

class ThreadsTransport;

// A delivery that runs on the worker pool. The receiver's thread frees it, when the worker is through.
struct Delivery : Remote {
  RecvRecord* recv = nullptr;  // the receiver's thread alone; null once cancelled
  RecvRecord* target = nullptr;
  Envelope* envelope = nullptr;
  ThreadsTransport* transport = nullptr;
  Executor* executor = nullptr;
  std::exception_ptr error;
  std::atomic<bool> over{false};  // the worker's last act: from here on it touches nothing of this world
  void wait_for_worker() const {
    while (!over.load(std::memory_order_acquire)) std::this_thread::yield();
  }
};

}  // namespace

struct ThreadsWorld::Shared {
  explicit Shared(ThreadsOptions o) : options(std::move(o)) {}
  Envelope* make_envelope() { return new (arena.allocate(sizeof(Envelope))) Envelope(); }
  void free_envelope(Envelope* envelope) {
    envelope->~Envelope();
    arena.deallocate(envelope, sizeof(Envelope));
  }
  std::string reason_of(int rank) {
    const Lock lock(mutex);
    return reasons[static_cast<std::size_t>(rank)];
  }

  ThreadsOptions options;
  SteadyClock clock;
  Arena arena;
  Mutex mutex;
  std::vector<std::string> reasons WEFT_GUARDED_BY(mutex);  // of each rank that said goodbye
  std::vector<std::unique_ptr<Mailbox>> boxes;
  std::vector<std::unique_ptr<Transport>> transports;
};

namespace {

class ThreadsTransport final : public Transport {
 public:
  template <class SharedState>
  ThreadsTransport(SharedState& shared, int rank)
      : options_(shared.options),
        clock_(shared.clock),
        arena_(shared.arena),
        boxes_(shared.boxes),
        rank_(rank),
        left_(static_cast<std::size_t>(shared.options.ranks), false),
        reason_of_([&shared](int r) { return shared.reason_of(r); }),
        leave_([&shared, rank](const std::string& reason) {
          const Lock lock(shared.mutex);
          shared.reasons[static_cast<std::size_t>(rank)] = reason;
        }) {}
  ~ThreadsTransport() override { close(""); }

  std::string_view name() const override { return "threads"; }
  int rank() const override { return rank_; }
  int size() const override { return options_.ranks; }
  const Clock& clock() const override { return clock_; }
  Time next_event() const override { return kNever; }
  void wait(Time until) noexcept override { box(rank_).sleep(until); }
  void wake() noexcept override { box(rank_).wake(); }
  std::exception_ptr failure() const override { return failure_; }
  TrafficCounters counters() const override { return counters_; }

  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;
  void cancel(TransferRecord& record) noexcept override;
  void give_way(Time) noexcept override {}  // a message that was posted is already with its receiver
  bool poll() noexcept override;
  void close(const std::string& reason) noexcept override;

  // Worker and receiver: the sender may have its memory back.
  void release(Envelope* envelope) {
    if (envelope->eager) {
      free_envelope(envelope);
      return;
    }
    const int source = envelope->source;
    envelope->state.store(Envelope::released, std::memory_order_release);
    if (!box(source).push({.kind = Mail::released, .envelope = envelope})) free_envelope(envelope);
  }

 private:
  Mailbox& box(int rank) const { return *boxes_[static_cast<std::size_t>(rank)]; }
  Envelope* make_envelope(const SendRecord& send);
  void free_envelope(Envelope* envelope) {
    envelope->~Envelope();
    arena_.deallocate(envelope, sizeof(Envelope));
  }
  void sent(SendRecord& send, std::exception_ptr error = nullptr) {
    if (send.observer != nullptr) send.observer->sent(send);
    send.complete(std::move(error));
  }
  void handle(const Mail& mail);
  bool claim(Envelope* envelope);
  void give(RecvRecord& recv, Envelope* envelope);
  void give_on_pool(RecvRecord& recv, Envelope* envelope);
  void peer_left(int peer);
  std::exception_ptr lost(int peer) const;

  const ThreadsOptions& options_;
  const Clock& clock_;
  Arena& arena_;
  std::vector<std::unique_ptr<Mailbox>>& boxes_;
  int rank_;
  bool closed_ = false;
  std::vector<bool> left_;
  std::function<std::string(int)> reason_of_;
  std::function<void(const std::string&)> leave_;
  std::exception_ptr failure_;
  MatchTable<RecvRecord> posted_;
  MatchTable<Envelope> arrived_;
  std::vector<Mail> mails_;
  TrafficCounters counters_;
};

std::exception_ptr ThreadsTransport::lost(int peer) const {
  const std::string reason = reason_of_(peer);
  return std::make_exception_ptr(TransportError(TransportError::Kind::peer_lost, peer,
                                                "rank " + std::to_string(rank_) + ": rank " +
                                                    std::to_string(peer) + " has left the job" +
                                                    (reason.empty() ? "" : ": " + reason)));
}

Envelope* ThreadsTransport::make_envelope(const SendRecord& send) {
  auto* envelope = new (arena_.allocate(sizeof(Envelope))) Envelope();
  wire::Frame frame = frame_of(send, options_.job, 0, rank_);
  if (options_.checksum_always) frame.payload_crc = wire::crc32c(send.payload);
  envelope->key = {rank_, send.id};
  envelope->frame = wire::encode_frame(frame);
  envelope->payload = send.payload;
  envelope->source = rank_;
  return envelope;
}

void ThreadsTransport::post(SendRecord& send) noexcept {
  if (closed_ || failure_) {
    sent(send, failure_ ? failure_
                        : std::make_exception_ptr(
                              TransportError(TransportError::Kind::closed, -1, "the transport is closed")));
    return;
  }
  counters_.messages_sent += 1;
  counters_.payload_bytes_sent += send.payload.size();
  counters_.wire_bytes_sent += send.payload.size() + wire::kFrameBytes;
  Envelope* envelope = make_envelope(send);
  const bool eager =
      options_.tamper || (options_.eager_limit > 0 && send.payload.size() <= options_.eager_limit);
  if (eager) {
    envelope->copy = Buffer(arena_, send.payload.size());
    std::copy(send.payload.begin(), send.payload.end(), envelope->copy.data());
    if (options_.tamper && !options_.tamper(rank_, send.peer, envelope->frame, envelope->copy)) {
      free_envelope(envelope);
      sent(send);
      return;
    }
    envelope->payload = envelope->copy.span();
    envelope->eager = true;
  } else {
    envelope->send = &send;
    send.transport_data = envelope;
  }
  if (!box(send.peer).push({.kind = Mail::arrived, .envelope = envelope})) {
    free_envelope(envelope);
    sent(send, lost(send.peer));
  } else if (eager) {
    sent(send);
  }
}

void ThreadsTransport::post(RecvRecord& recv) noexcept {
  if (closed_ || failure_) {
    recv.complete(failure_ ? failure_
                           : std::make_exception_ptr(TransportError(TransportError::Kind::closed, -1,
                                                                    "the transport is closed")));
    return;
  }
  while (Envelope* envelope = arrived_.pop(recv.key)) {
    if (!claim(envelope)) continue;
    give(recv, envelope);
    return;
  }
  if (left_[static_cast<std::size_t>(recv.peer)])
    recv.complete(lost(recv.peer));
  else
    posted_.push(recv);
}

// False if the sender has taken the message back; it is then gone.
bool ThreadsTransport::claim(Envelope* envelope) {
  int expected = Envelope::waiting;
  if (envelope->state.compare_exchange_strong(expected, Envelope::claimed, std::memory_order_acq_rel))
    return true;
  free_envelope(envelope);
  return false;
}

void ThreadsTransport::give(RecvRecord& recv, Envelope* envelope) {
  counters_.messages_received += 1;
  counters_.payload_bytes_received += envelope->payload.size();
  counters_.wire_bytes_received += envelope->payload.size() + wire::kFrameBytes;
  std::exception_ptr error;
  try {
    const wire::Frame frame = wire::parse_frame(envelope->frame, envelope->source);
    wire::check_frame(frame,
                      {.job = options_.job, .epoch = 0, .source = recv.peer, .max_length = frame.length});
    if (frame.length != envelope->payload.size()) {
      throw TransportError(TransportError::Kind::corrupt, recv.peer,
                           "frame from rank " + std::to_string(recv.peer) + ": length is " +
                               std::to_string(frame.length) + ", but " +
                               std::to_string(envelope->payload.size()) + " bytes arrived");
    }
    if (options_.checksum_always) wire::check_payload(frame, envelope->payload);
    check_arrival(recv, frame, rank_);
    if (recv.operation.pool != nullptr && envelope->payload.size() >= options_.worker_bytes) {
      give_on_pool(recv, envelope);
      return;
    }
    deliver(recv, envelope->payload, recv.operation.executor->arena());
  } catch (...) {
    error = std::current_exception();
  }
  release(envelope);
  recv.complete(error);
}

void ThreadsTransport::give_on_pool(RecvRecord& recv, Envelope* envelope) {
  auto* job = new (arena_.allocate(sizeof(Delivery))) Delivery();
  job->recv = job->target = &recv;
  job->envelope = envelope;
  job->transport = this;
  job->executor = recv.operation.executor;
  recv.transport_data = job;
  job->run = [](Remote& remote) {
    auto& d = static_cast<Delivery&>(remote);
    d.wait_for_worker();  // it has only to say so
    if (d.recv != nullptr) {
      d.recv->transport_data = nullptr;
      d.recv->complete(d.error);
    }
    Arena& arena = d.transport->arena_;
    d.~Delivery();
    arena.deallocate(&d, sizeof(Delivery));
  };
  recv.operation.pool->submit(FunctionRef<void()>(job, [](void* target) {
    auto* d = static_cast<Delivery*>(target);
    try {
      deliver(*d->target, d->envelope->payload, d->executor->arena());
    } catch (...) {
      d->error = std::current_exception();
    }
    d->transport->release(d->envelope);
    d->executor->post(*d);
    d->over.store(true, std::memory_order_release);
  }));
}

void ThreadsTransport::cancel(TransferRecord& record) noexcept {
  if (auto* recv = dynamic_cast<RecvRecord*>(&record)) {
    if (auto* job = static_cast<Delivery*>(std::exchange(recv->transport_data, nullptr))) {
      job->wait_for_worker();
      job->recv = nullptr;
    } else {
      posted_.erase(*recv);
    }
    return;
  }
  auto& send = static_cast<SendRecord&>(record);
  auto* envelope = static_cast<Envelope*>(std::exchange(send.transport_data, nullptr));
  if (envelope == nullptr) return;
  int expected = Envelope::waiting;
  // After a successful exchange the receiver frees the envelope; otherwise it reads the memory just now, and
  // the mail that says so frees the envelope here.
  if (!envelope->state.compare_exchange_strong(expected, Envelope::cancelled, std::memory_order_acq_rel)) {
    while (envelope->state.load(std::memory_order_acquire) != Envelope::released) std::this_thread::yield();
    envelope->send = nullptr;
  }
  if (send.observer != nullptr) send.observer->sent(send);
}

bool ThreadsTransport::poll() noexcept {
  if (closed_ || box(rank_).empty()) return false;
  box(rank_).take(mails_);
  for (const Mail& mail : mails_) handle(mail);
  mails_.clear();
  return true;
}

void ThreadsTransport::handle(const Mail& mail) {
  Envelope* envelope = mail.envelope;
  switch (mail.kind) {
    case Mail::arrived:
      if (RecvRecord* recv = posted_.front(envelope->key); recv == nullptr) {
        arrived_.push(*envelope);
      } else if (claim(envelope)) {
        posted_.erase(*recv);
        give(*recv, envelope);
      }
      break;
    case Mail::released:
    case Mail::refused:
      if (SendRecord* send = envelope->send) {
        send->transport_data = nullptr;
        sent(*send, mail.kind == Mail::refused ? lost(send->peer) : nullptr);
      }
      free_envelope(envelope);
      break;
    case Mail::goodbye:
      peer_left(mail.from);
      break;
  }
}

void ThreadsTransport::peer_left(int peer) {
  left_[static_cast<std::size_t>(peer)] = true;
  const std::exception_ptr error = lost(peer);
  if (!reason_of_(peer).empty()) failure_ = error;
  std::vector<RecvRecord*> orphans;
  posted_.for_each([&](RecvRecord& recv) {
    if (recv.peer == peer || failure_) orphans.push_back(&recv);
  });
  for (RecvRecord* recv : orphans) {
    posted_.erase(*recv);
    recv->complete(error);
  }
}

void ThreadsTransport::close(const std::string& reason) noexcept {
  if (std::exchange(closed_, true)) return;
  leave_(reason);
  for (int peer = 0; peer < size(); ++peer) {
    if (peer != rank_) box(peer).push({.kind = Mail::goodbye, .from = rank_});
  }
  std::vector<Mail> mails;
  box(rank_).close(mails);
  std::vector<Envelope*> unread;
  arrived_.for_each([&](Envelope& envelope) { unread.push_back(&envelope); });
  for (Envelope* envelope : unread) arrived_.erase(*envelope);
  for (const Mail& mail : mails) {
    if (mail.kind == Mail::arrived)
      unread.push_back(mail.envelope);
    else if (mail.kind != Mail::goodbye)
      handle(mail);
  }
  for (Envelope* envelope : unread) {
    int expected = Envelope::waiting;
    const bool mine =
        envelope->state.compare_exchange_strong(expected, Envelope::claimed, std::memory_order_acq_rel);
    if (!mine || envelope->eager) {
      free_envelope(envelope);
      continue;
    }
    const int source = envelope->source;
    envelope->state.store(Envelope::released, std::memory_order_release);
    if (!box(source).push({.kind = Mail::refused, .envelope = envelope})) free_envelope(envelope);
  }
}

}  // namespace

ThreadsWorld::ThreadsWorld(ThreadsOptions options) {
  if (options.ranks < 1)
    throw UsageError("a job needs at least one rank, not " + std::to_string(options.ranks));
  shared_ = std::make_unique<Shared>(std::move(options));
  const auto n = static_cast<std::size_t>(shared_->options.ranks);
  shared_->reasons.resize(n);
  for (std::size_t r = 0; r < n; ++r) shared_->boxes.push_back(std::make_unique<Mailbox>());
  for (std::size_t r = 0; r < n; ++r) {
    shared_->transports.push_back(std::make_unique<ThreadsTransport>(*shared_, static_cast<int>(r)));
  }
}

ThreadsWorld::~ThreadsWorld() = default;

Transport& ThreadsWorld::transport(int rank) {
  return *shared_->transports.at(static_cast<std::size_t>(rank));
}

}  // namespace weft
