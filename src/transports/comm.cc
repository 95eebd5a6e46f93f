#include "weft/comm.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <string>

#include "kernels/fold.h"
#include "transports/records.h"
#include "transports/sim_workers.h"
#include "weft/error.h"

namespace weft {

namespace {

// A record from the arena, as a Transfer that owns it.
template <class Record>
Record* make_record(Arena& arena, Transport& transport, Operation& operation, int peer, const Identity& id) {
  return new (arena.allocate(sizeof(Record))) Record(transport, operation, peer, id);
}

// What Comm::recv_fold keeps in the record's context.
struct FoldInto {
  Dense into;
  Reduction reduction;
};
static_assert(sizeof(FoldInto) <= sizeof(RecvRecord::context));

template <class Record>
Transfer posted(Comm const& comm, Record* record) {
  Transfer transfer(record, &comm.arena(), sizeof(Record));
  Operation& operation = comm.operation();
  record->posted = comm.now();
  if (operation.failure)
    record->complete(operation.failure);
  else
    record->transport.post(*record);
  return transfer;
}

}  // namespace

Endpoint::Endpoint(Transport& transport, Executor& executor, WorkerPool* pool)
    : transport_(transport), executor_(executor), pool_(pool), world_(std::make_shared<Group>()) {
  world_->members.resize(static_cast<std::size_t>(transport.size()));
  std::iota(world_->members.begin(), world_->members.end(), 0);
  world_->rank = transport.rank();
  groups_.emplace(world_->id, world_);
}

std::shared_ptr<Group> Endpoint::group(std::uint64_t id, std::vector<int> members) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Group>& entry = groups_[id];
  if (entry != nullptr) {
    if (entry->members != members) throw UsageError("two groups of different members got the same id");
    return entry;
  }
  const auto self = std::find(members.begin(), members.end(), transport_.rank());
  if (self == members.end()) {
    groups_.erase(id);
    throw UsageError("rank " + std::to_string(transport_.rank()) +
                     " is not a member of the group it asks for");
  }
  entry = std::make_shared<Group>();
  entry->id = id;
  entry->rank = static_cast<int>(self - members.begin());
  entry->members = std::move(members);
  return entry;
}

void Comm::check_bound() const {
  if (operation_ == nullptr)
    throw UsageError("a Comm sends, receives and computes only inside an operation: use Engine::submit");
}

void Comm::check(int peer) const {
  check_bound();
  if (operation_->local) {
    throw UsageError(std::string(operation_->name) +
                     " was submitted as local, so it has no identity to send or receive with");
  }
  if (peer < 0 || peer >= size()) {
    throw UsageError("peer " + std::to_string(peer) + " is outside the group of " + std::to_string(size()) +
                     " ranks");
  }
}

Transfer Comm::send(int peer, std::uint32_t hop, std::span<const std::byte> payload, DType dtype) const {
  check(peer);
  auto* record =
      make_record<SendRecord>(arena(), endpoint_->transport(), *operation_, world_rank(peer), identity(hop));
  record->payload = payload;
  record->dtype = dtype;
  operation_->bytes_sent += payload.size();
  operation_->messages_sent += 1;
  return posted(*this, record);
}

Transfer Comm::recv(int peer, std::uint32_t hop, std::span<std::byte> into, DType dtype) const {
  check(peer);
  auto* record =
      make_record<RecvRecord>(arena(), endpoint_->transport(), *operation_, world_rank(peer), identity(hop));
  record->sink.kind = Sink::Kind::into;
  record->sink.into = into;
  record->dtype = dtype;
  return posted(*this, record);
}

Transfer Comm::recv_fold(int peer, std::uint32_t hop, const Dense& into, Reduction reduction) const {
  check(peer);
  auto* record =
      make_record<RecvRecord>(arena(), endpoint_->transport(), *operation_, world_rank(peer), identity(hop));
  auto* fold = new (record->context.data()) FoldInto{into, reduction};
  record->sink.kind = Sink::Kind::consume;
  record->sink.limit = into.size_bytes();
  record->sink.seconds_per_byte = kernels().fold(into.dtype);
  record->sink.consume =
      FunctionRef<void(std::span<const std::byte>)>(fold, [](void* target, std::span<const std::byte> bytes) {
        const FoldInto& self = *static_cast<FoldInto*>(target);
        if (bytes.size() != self.into.size_bytes()) {
          throw TransportError(
              TransportError::Kind::mismatch, -1,
              "ranks disagree about the length of a vector: " + std::to_string(self.into.size_bytes()) +
                  " bytes here, " + std::to_string(bytes.size()) + " arrived");
        }
        fold_into(self.into, bytes, self.reduction);
      });
  record->dtype = into.dtype;
  return posted(*this, record);
}

Transfer Comm::recv_with(int peer, std::uint32_t hop, std::size_t limit,
                         FunctionRef<void(std::span<const std::byte>)> consume,
                         double seconds_per_byte) const {
  check(peer);
  auto* record =
      make_record<RecvRecord>(arena(), endpoint_->transport(), *operation_, world_rank(peer), identity(hop));
  record->sink.kind = Sink::Kind::consume;
  record->sink.consume = consume;
  record->sink.limit = limit;
  record->sink.seconds_per_byte = seconds_per_byte;
  return posted(*this, record);
}

Transfer Comm::recv_any(int peer, std::uint32_t hop, std::size_t limit) const {
  check(peer);
  auto* record =
      make_record<RecvRecord>(arena(), endpoint_->transport(), *operation_, world_rank(peer), identity(hop));
  record->sink.kind = Sink::Kind::keep;
  record->sink.limit = limit;
  return posted(*this, record);
}

Sleep Comm::sleep_until(Time until) const {
  check_bound();
  return Sleep(*operation_, until);
}

Compute Comm::compute_priced(FunctionRef<double()> work) const {
  check_bound();
  return Compute(*operation_, endpoint_->sim_workers(), work);
}

Sleep Comm::charge(double seconds) const {
  check_bound();
  const Executor& executor = endpoint_->executor();
  if (seconds <= 0 || !executor.simulated()) return Sleep(*operation_, Time{0});
  SimWorkers* const workers = endpoint_->sim_workers();
  const Time now = executor.now();
  return Sleep(*operation_, workers != nullptr ? workers->handle(now, seconds) : now + from_seconds(seconds));
}

Comm Comm::subgroup(const std::vector<int>& ranks, std::uint32_t label) const {
  std::uint64_t id = mix(group_->id ^ label);
  std::vector<int> members;
  members.reserve(ranks.size());
  for (const int r : ranks) {
    if (r < 0 || r >= size()) throw UsageError("rank " + std::to_string(r) + " is not in the group to split");
    members.push_back(world_rank(r));
    id = mix(id ^ static_cast<std::uint64_t>(members.back()));
  }
  return {*endpoint_, endpoint_->group(id, std::move(members)), operation_, hop_base_};
}

}  // namespace weft
