#include "transports/mpi.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <random>

#include "transports/mpi_transport.h"
#include "weft/error.h"

namespace weft::mpi {

namespace {

constexpr int kControlTag = 1;
constexpr std::size_t kReasonLimit = 1024;  // bytes of a goodbye's text
constexpr Time kYield = 50us;  // longer than a wake-up: two ranks that missed each other once catch up
constexpr Time kLongestSleep = 100us;  // while messages are expected or under way
constexpr Time kLateSleep = 2ms;       // at most, after a long wait, of which it is at most this part:
constexpr int kLatePart = 64;
constexpr Time kIdleSleep = 5ms;  // while only a goodbye can come
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
  layout_ = mpi_tag_layout(found != 0 ? *upper_bound : 32767);

  parent_ = duplicate_world();
  control_ = duplicate_world();
  agree_on_options();
  Members world{.comm = duplicate_world(), .rank_in_group = {}};
  for (int r = 0; r < size_; ++r) world.rank_in_group.push_back(r);
  groups_.emplace(0, std::move(world));
  memory_->control_head = Buffer(memory_->arena, wire::kFrameBytes + kReasonLimit);
  listen_to_control();
}

MPI_Comm MpiTransport::duplicate_world() {
  MPI_Comm comm = MPI_COMM_NULL;
  require(MPI_Comm_dup(MPI_COMM_WORLD, &comm), "MPI_Comm_dup");
  require(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return comm;
}

// All ranks look at all options, so that all of them throw when one differs.
void MpiTransport::agree_on_options() {
  constexpr std::array names{"job", "epoch", "checksum", "max_message", "bounce_bytes", "piece_limit"};
  using Row = std::array<std::uint64_t, names.size()>;
  const Row mine{options_.job,         options_.epoch,        static_cast<std::uint64_t>(options_.checksum),
                 options_.max_message, options_.bounce_bytes, options_.piece_limit};
  std::vector<Row> rows(static_cast<std::size_t>(size_));
  constexpr int columns = static_cast<int>(names.size());
  require(MPI_Allgather(mine.data(), columns, MPI_UINT64_T, rows.data(), columns, MPI_UINT64_T, parent_),
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
  require(MPI_Bcast(&options_.job, 1, MPI_UINT64_T, 0, parent_), "MPI_Bcast");
}

MpiTransport::~MpiTransport() {
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
    const Owner& owner = owners_[i];
    const bool asked = owner.role == Owner::Role::outgoing ||
                       (owner.role == Owner::Role::head && static_cast<Lane*>(owner.target)->cancelling);
    if (!asked) MPI_Cancel(&requests_[i]);
    MPI_Test(&requests_[i], &over, MPI_STATUS_IGNORE);
    if (over == 0) MPI_Request_free(&requests_[i]);
  }
  if (!healthy) {  // communicators, requests and what they name end with the process
    [[maybe_unused]] const Memory* left_behind = memory_.release();
    return;
  }
  for (auto& [id, members] : groups_) MPI_Comm_free(&members.comm);
  MPI_Comm_free(&control_);
  MPI_Comm_free(&parent_);
  if (finalise_) MPI_Finalize();
}

void MpiTransport::add_group(std::uint64_t group, std::span<const int> members) {
  if (groups_.contains(group)) return;
  if (closed_ || failure_) std::rethrow_exception(refusal());
  Members made{.comm = MPI_COMM_NULL, .rank_in_group = std::vector<int>(static_cast<std::size_t>(size_), -1)};
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (members[i] < 0 || members[i] >= size_) {
      throw UsageError("mpi: rank " + std::to_string(members[i]) + " of a group is outside the world of " +
                       std::to_string(size_));
    }
    made.rank_in_group[static_cast<std::size_t>(members[i])] = static_cast<int>(i);
  }
  MPI_Group world = MPI_GROUP_NULL;
  MPI_Group chosen = MPI_GROUP_NULL;
  require(MPI_Comm_group(parent_, &world), "MPI_Comm_group");
  require(MPI_Group_incl(world, static_cast<int>(members.size()), members.data(), &chosen), "MPI_Group_incl");
  // The tag keeps groups apart that are made at the same time by different members.
  const int tag = static_cast<int>(mix(group) & 0x7fff);
  const int code = MPI_Comm_create_group(parent_, chosen, tag, &made.comm);
  MPI_Group_free(&chosen);
  MPI_Group_free(&world);
  require(code, "MPI_Comm_create_group");
  require(MPI_Comm_set_errhandler(made.comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  groups_.emplace(group, std::move(made));
}

MpiTransport::Route MpiTransport::route(const TransferRecord& record) const {
  const auto members = groups_.find(record.id.group);
  if (members == groups_.end())
    throw UsageError("mpi: group " + std::to_string(record.id.group) + " was never added");
  const int peer = record.peer < 0 || record.peer >= size_
                       ? -1
                       : members->second.rank_in_group[static_cast<std::size_t>(record.peer)];
  if (peer < 0)
    throw UsageError("mpi: rank " + std::to_string(record.peer) + " is not in the group it is to talk in");
  return {members->second.comm, peer, mpi_tag(layout_, record.id)};
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

void MpiTransport::listen_to_control() {
  MPI_Request request = MPI_REQUEST_NULL;
  require(MPI_Irecv(memory_->control_head.data(), static_cast<int>(memory_->control_head.size()), MPI_BYTE,
                    MPI_ANY_SOURCE, kControlTag, control_, &request),
          "MPI_Irecv");
  requests_.push_back(request);
  owners_.push_back({Owner::Role::control, nullptr});
}

void MpiTransport::goodbye_came(const Event& event) {
  if (failure_) return;
  try {
    if (event.error != MPI_SUCCESS || static_cast<std::size_t>(event.bytes) < wire::kFrameBytes) {
      throw TransportError(TransportError::Kind::corrupt, -1,
                           "mpi: a goodbye of " + std::to_string(event.bytes) + " bytes");
    }
    const wire::Frame frame = wire::parse_frame(memory_->control_head.span().first<wire::kFrameBytes>(), -1);
    const std::size_t length = static_cast<std::size_t>(event.bytes) - wire::kFrameBytes;
    wire::check_frame(
        frame, {.job = options_.job, .epoch = options_.epoch, .source = frame.source, .max_length = length});
    const std::string reason(reinterpret_cast<const char*>(memory_->control_head.data()) + wire::kFrameBytes,
                             frame.length);
    throw TransportError(TransportError::Kind::peer_lost, frame.source,
                         "rank " + std::to_string(rank_) + ": rank " + std::to_string(frame.source) +
                             " has left the job: " + reason);
  } catch (...) {
    failure_ = std::current_exception();
  }
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
    std::memcpy(out.head.data(), encoded.data(), encoded.size());
    std::memcpy(out.head.data() + wire::kFrameBytes, text.data(), text.size());
    if (!start_send(out, out.head.data(), wire::kFrameBytes + text.size(), {control_, peer, kControlTag}))
      release(out);
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
  const bool idle = requests_.size() <= 1;
  const Time end = std::min(until, now + sleep_);
  const Time longest =
      idle ? kIdleSleep : std::clamp((now - last_event_) / kLatePart, kLongestSleep, kLateSleep);
  sleep_ = std::min(2 * sleep_, longest);
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, std::chrono::steady_clock::time_point(end), [this] { return woken_; });
  woken_ = false;
}

void MpiTransport::wake() noexcept {
  const std::lock_guard lock(mutex_);
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
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &level);
  try {
    if (level < MPI_THREAD_SERIALIZED) {
      throw UsageError(
          std::string("mpi: MPI was initialised with ") + mpi::name_of_level(level) +
          "; weft needs MPI_THREAD_SERIALIZED: ask for it in MPI_Init_thread, or let weft do it");
    }
    return std::make_unique<mpi::MpiTransport>(options, initialised == 0);
  } catch (const UsageError&) {  // thrown on all ranks alike
    if (initialised == 0) MPI_Finalize();
    throw;
  }
}

}  // namespace weft
