#include "transports/mpi.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>

#include "transports/mpi_transport.h"
#include "weft/error.h"

namespace weft::mpi {

namespace {

constexpr std::size_t kReasonLimit = 1024;  // bytes of a goodbye's text
constexpr Time kYield = 50us;  // longer than a wake-up: two ranks that missed each other once catch up
constexpr Time kLongestSleep = 100us;  // while messages are expected or under way
constexpr Time kLateSleep = 2ms;       // at most, after a long wait, of which it is at most this part:
constexpr int kLatePart = 64;
constexpr Time kIdleSleep = 5ms;  // while nobody waits for anything
constexpr Time kDrainPatience = 1s;

void require(int code, const char* doing) {
  if (code == MPI_SUCCESS) return;
  throw TransportError(TransportError::Kind::refused, -1,
                       std::string("mpi: ") + doing + ": " + text_of(code));
}

const char* name_of_level(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    case MPI_THREAD_MULTIPLE:
      return "MPI_THREAD_MULTIPLE";
    default:
      return "an unknown thread level";
  }
}

}  // namespace

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING + 1> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

MpiTransport::MpiTransport(const MpiOptions& options, bool finalise)
    : options_(options), finalise_(finalise) {
  require(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "rank");
  require(MPI_Comm_size(MPI_COMM_WORLD, &size_), "size");
  const int* upper_bound = nullptr;
  int found = 0;
  require(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&upper_bound), &found),
          "MPI_TAG_UB");
  payload_tags_ = found != 0 ? *upper_bound : 32767;  // the least that the standard allows

  require(MPI_Comm_dup(MPI_COMM_WORLD, &comm_), "MPI_Comm_dup");
  require(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  agree_on_options();
  long_sent_.resize(static_cast<std::size_t>(size_));
  long_announced_.resize(static_cast<std::size_t>(size_));
  for (Listener& listener : memory_->listeners) {
    listener.head = Buffer(memory_->arena, wire::kFrameBytes + options_.bounce_bytes);
    listen(listener);
  }
  if (failure_) std::rethrow_exception(failure_);
}

// All ranks look at all options, so that all of them throw when one differs.
void MpiTransport::agree_on_options() {
  constexpr std::array names{"job", "epoch", "checksum", "max_message", "bounce_bytes", "piece_limit"};
  using Row = std::array<std::uint64_t, names.size()>;
  const Row mine{options_.job,         options_.epoch,        static_cast<std::uint64_t>(options_.checksum),
                 options_.max_message, options_.bounce_bytes, options_.piece_limit};
  std::vector<Row> rows(static_cast<std::size_t>(size_));
  constexpr int columns = static_cast<int>(names.size());
  require(MPI_Allgather(mine.data(), columns, MPI_UINT64_T, rows.data(), columns, MPI_UINT64_T, comm_),
          "MPI_Allgather");
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t c = 0; c < names.size(); ++c) {
      if (rows[r][c] == rows[0][c]) continue;
      throw UsageError("mpi: option " + std::string(names[c]) + " is " + std::to_string(rows[0][c]) +
                       " on rank 0 and " + std::to_string(rows[r][c]) + " on rank " + std::to_string(r) +
                       "; it must be equal on all ranks");
    }
  }
  if (options_.job != 0) return;
  std::random_device random;
  options_.job = std::uint64_t{random()} << 32 | random() | 1;
  require(MPI_Bcast(&options_.job, 1, MPI_UINT64_T, 0, comm_), "MPI_Bcast");
}

MpiTransport::~MpiTransport() {
  while (workers_.load(std::memory_order_acquire) > 0) sched_yield();
  const Time give_up = clock_.now() + kDrainPatience;
  const auto sending = [this] {
    return std::any_of(owners_.begin(), owners_.end(),
                       [](const Owner& o) { return o.role == Owner::Role::outgoing; });
  };
  while (!failure_ && sending() && clock_.now() < give_up) {
    if (!poll()) wait(give_up);
  }
  const bool healthy = !failure_ && !sending();
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    int over = 0;
    if (owners_[i].role != Owner::Role::outgoing) MPI_Cancel(&requests_[i]);
    MPI_Test(&requests_[i], &over, MPI_STATUS_IGNORE);
    if (over == 0) MPI_Request_free(&requests_[i]);
  }
  if (!healthy) {  // the communicator, requests and what they name end with the process
    [[maybe_unused]] const Memory* left_behind = memory_.release();
    return;
  }
  MPI_Comm_free(&comm_);
  if (finalise_) MPI_Finalize();
}

std::exception_ptr MpiTransport::refusal() const {
  if (failure_) return failure_;
  return std::make_exception_ptr(
      TransportError(TransportError::Kind::closed, -1, "mpi: the transport is closed"));
}

// An error of MPI itself: nothing that this transport carries can be relied upon any more.
void MpiTransport::fail(int code, int peer, const char* doing) {
  if (failure_) return;
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  const auto kind =
      error_class == MPI_ERR_TRUNCATE ? TransportError::Kind::corrupt : TransportError::Kind::peer_lost;
  failure_ = std::make_exception_ptr(
      TransportError(kind, peer, "rank " + std::to_string(rank_) + ": mpi: " + doing + ": " + text_of(code)));
}

// ---- goodbye ----

void MpiTransport::goodbye_came(const wire::Frame& frame, std::span<const std::byte> text) {
  const std::string reason(reinterpret_cast<const char*>(text.data()), text.size());
  throw TransportError(TransportError::Kind::peer_lost, frame.source,
                       "rank " + std::to_string(rank_) + ": rank " + std::to_string(frame.source) +
                           " has left the job: " + reason);
}

// A graceful close tells nobody: peers that still need this rank wait for it in MPI_Finalize, or for their
// deadline.
void MpiTransport::close(const std::string& reason) noexcept {
  if (std::exchange(closed_, true) || reason.empty()) return;
  const std::string text = reason.substr(0, std::min(kReasonLimit, options_.bounce_bytes));
  const wire::Frame frame{.kind = wire::FrameKind::goodbye,
                          .epoch = options_.epoch,
                          .job = options_.job,
                          .source = rank_,
                          .length = text.size()};
  const wire::FrameBytes encoded = wire::encode_frame(frame);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    Outgoing& out = take_outgoing();
    const std::span<std::byte> head = out.head.span().first(wire::kFrameBytes + text.size());
    std::memcpy(head.data(), encoded.data(), encoded.size());
    std::memcpy(head.data() + wire::kFrameBytes, text.data(), text.size());
    if (!start_send(out, head, peer, kHeadTag)) release(out);
  }
  if (!failure_) {
    failure_ =
        std::make_exception_ptr(TransportError(TransportError::Kind::closed, -1, "mpi: closed: " + text));
  }
  const Time give_up = clock_.now() + kCancelPatience;  // what an eager send needs to leave
  do {
    if (collect()) dispatch();
    sched_yield();
  } while (clock_.now() < give_up && std::any_of(owners_.begin(), owners_.end(), [](const Owner& o) {
             return o.role == Owner::Role::outgoing && static_cast<Outgoing*>(o.target)->record == nullptr;
           }));
}

// ---- letting go ----

void MpiTransport::cancel(TransferRecord& record) noexcept {
  if (record.transport_data == nullptr) return;
  if (auto* recv = dynamic_cast<RecvRecord*>(&record)) {
    cancel_recv(*recv);
    return;
  }
  cancel_send(static_cast<SendRecord&>(record));
}

void MpiTransport::cancel_send(SendRecord& send) {
  auto& out = *static_cast<Outgoing*>(std::exchange(send.transport_data, nullptr));
  if (out.running) out.wait_for_worker();  // which reads the payload
  out.record = nullptr;
  if (send.observer != nullptr) send.observer->sent(send);
}

void MpiTransport::cancel_recv(RecvRecord& recv) {
  void* const state = std::exchange(recv.transport_data, nullptr);
  if (state == &waiting_) {
    waiting_.erase(recv);
    return;
  }
  auto& incoming = *static_cast<Incoming*>(state);
  if (incoming.running) incoming.wait_for_worker();
  incoming.record = nullptr;
  if (recv.sink.kind == Sink::Kind::consume) return;  // the memory is ours
  if (recv.sink.kind == Sink::Kind::keep) {           // and now this is, too
    incoming.staging = std::move(recv.sink.kept);
    return;
  }
  take_back(incoming);
}

// The memory of a receive that nobody waits for any more is its owner's again when this returns.
void MpiTransport::take_back(Incoming& incoming) {
  const Time give_up = clock_.now() + kCancelPatience;
  bool asked = false;
  while (incoming.pending > 0) {
    // In a job that goes on the payload must be taken, or the sender waits for ever.
    if (failure_ && !std::exchange(asked, true)) {
      for (std::size_t i = 0; i < requests_.size(); ++i) {
        if (owners_[i].target == &incoming) MPI_Cancel(&requests_[i]);
      }
    }
    if (clock_.now() > give_up) {
      std::fprintf(
          stderr,
          "weft: rank %d: mpi: a receive from rank %d was cancelled while its payload arrived, and the "
          "rest did not come within 2 s; MPI would write it into memory that is given back now, so "
          "the job ends here\n",
          rank_, incoming.frame.source);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    if (collect())
      dispatch();
    else
      sched_yield();
  }
}

// ---- sleeping ----

void MpiTransport::wait(Time until) noexcept {
  const Time now = clock_.now();
  if (until <= now) return;
  if (now - last_event_ < kYield) {
    sched_yield();
    return;
  }
  if (std::exchange(sleeper_, std::this_thread::get_id()) != std::this_thread::get_id()) {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // nanoseconds; with the usual 50 us the short sleeps are none
  }
  const bool idle = requests_.size() <= kListeners && waiting_.size() == 0;
  const Time end = std::min(until, now + sleep_);
  const Time longest =
      idle ? kIdleSleep : std::clamp((now - last_event_) / kLatePart, kLongestSleep, kLateSleep);
  sleep_ = std::min(2 * sleep_, longest);
  const Lock lock(mutex_);
  const std::chrono::steady_clock::time_point wake_up(end);
  while (!woken_ && lock.wait_until(changed_, wake_up) == std::cv_status::no_timeout) {
  }
  woken_ = false;
}

void MpiTransport::wake() noexcept {
  const Lock lock(mutex_);
  woken_ = true;
  changed_.notify_one();
}

}  // namespace weft::mpi

namespace weft {

std::unique_ptr<Transport> open_mpi(const MpiOptions& options) {
  if (options.piece_limit < 1 || options.piece_limit > std::numeric_limits<int>::max()) {
    throw UsageError("mpi: piece_limit is " + std::to_string(options.piece_limit) +
                     "; it must be 1 .. 2^31 - 1 bytes");
  }
  if (options.bounce_bytes > (std::size_t{1} << 20)) {
    throw UsageError("mpi: bounce_bytes is " + std::to_string(options.bounce_bytes) +
                     "; it must be at most 1 MiB");
  }
  int initialised = 0;
  int finalised = 0;
  MPI_Initialized(&initialised);
  MPI_Finalized(&finalised);
  if (finalised != 0) throw UsageError("mpi: MPI was finalised in this process and cannot be used again");
  int level = MPI_THREAD_SINGLE;
  if (initialised != 0)
    MPI_Query_thread(&level);
  else
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
  try {
    // Who has initialised MPI calls it, while weft's own thread does.
    if (initialised != 0 && level < MPI_THREAD_MULTIPLE) {
      throw UsageError(
          std::string("mpi: MPI was initialised with ") + mpi::name_of_level(level) +
          "; beside weft's thread a program needs MPI_THREAD_MULTIPLE: ask for it in MPI_Init_thread, or let "
          "weft do it");
    }
    if (level < MPI_THREAD_SERIALIZED)
      throw UsageError(std::string("mpi: this MPI grants ") + mpi::name_of_level(level) +
                       ", and weft needs MPI_THREAD_SERIALIZED");
    return std::make_unique<mpi::MpiTransport>(options, initialised == 0);
  } catch (const UsageError&) {  // thrown on all ranks alike
    if (initialised == 0) MPI_Finalize();
    throw;
  }
}

}  // namespace weft
