#include "weft/comm.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <string>

#include "base/thread_time.h"
#include "base/worker_pool.h"
#include "kernels/fold.h"
#include "transports/endpoint.h"
#include "transports/records.h"
#include "transports/sim_workers.h"
#include "weft/error.h"

namespace weft {

namespace {

// Of a Comm outside of operations: no.
bool is_whole(const Operation* operation) { return operation != nullptr && operation->is_whole; }

class SleepRecord final : public Wait {
 public:
  explicit SleepRecord(Operation& op)
      : Wait(op), alarm_(*this, [](Timer& timer) { static_cast<Alarm&>(timer).sleep.complete(); }) {}
  void begin(Time until) { operation.executor->arm(alarm_, until); }
  bool abandon() noexcept override { return true; }
  bool is_progress() const override { return false; }

 private:
  struct Alarm : Timer {
    Alarm(SleepRecord& s, Fire fire) : Timer(fire), sleep(s) {}
    SleepRecord& sleep;
  };
  Alarm alarm_;
};

class ComputeRecord final : public Wait {
 public:
  ComputeRecord(Operation& op, SimWorkers* workers, FunctionRef<double()> work)
      : Wait(op), workers_(workers), work_(work), alarm_(*this, [](Timer& timer) {
          ComputeRecord& self = static_cast<Alarm&>(timer).compute;
          self.complete(self.thrown_);
        }) {}
  bool abandon() noexcept override { return alarm_.armed(); }
  bool ready() noexcept;
  void begin(std::coroutine_handle<> h) noexcept;

 private:
  struct Done : Remote {
    ComputeRecord* compute = nullptr;
  };
  struct Alarm : Timer {
    Alarm(ComputeRecord& c, Fire fire) : Timer(fire), compute(c) {}
    ComputeRecord& compute;
  };
  void work() noexcept;

  SimWorkers* workers_;
  FunctionRef<double()> work_;
  double simulated_seconds_ = 0;
  double computed_seconds_ = 0;
  Done remote_;
  Alarm alarm_;
  std::exception_ptr thrown_;
};

// What Comm::recv_fold keeps in the record's context.
struct FoldInto {
  Dense into;
  Reduction reduction;
};
static_assert(sizeof(FoldInto) <= sizeof(RecvRecord::context));

void ComputeRecord::work() noexcept {
  const bool simulated = operation.executor->simulated();
  const double before = simulated ? 0 : thread_seconds();
  try {
    simulated_seconds_ = work_();
  } catch (...) {
    thrown_ = std::current_exception();
  }
  computed_seconds_ = simulated ? simulated_seconds_ : thread_seconds() - before;
}

bool ComputeRecord::ready() noexcept {
  if (operation.failure) {
    complete(operation.failure);
    return true;
  }
  if (operation.pool != nullptr) return false;
  work();
  operation.computed_seconds += computed_seconds_;
  if (operation.executor->simulated() && simulated_seconds_ > 0) return false;
  complete(thrown_);
  return true;
}

void ComputeRecord::begin(std::coroutine_handle<> h) noexcept {
  waiter = h;
  if (operation.pool == nullptr) {
    const Time now = operation.executor->now();
    operation.executor->arm(alarm_, workers_ != nullptr ? workers_->compute(now, simulated_seconds_)
                                                        : now + from_seconds(simulated_seconds_));
    return;
  }
  remote_.compute = this;
  remote_.run = [](Remote& remote) {
    ComputeRecord& self = *static_cast<Done&>(remote).compute;
    self.operation.computed_seconds += self.computed_seconds_;
    self.complete(self.thrown_ ? self.thrown_ : self.operation.failure);
  };
  operation.pool->submit(FunctionRef<void()>(this, [](void* target) {
    ComputeRecord& self = *static_cast<ComputeRecord*>(target);
    self.work();
    self.operation.executor->post(self.remote_);  // from here on `self` may be gone
  }));
}

template <class Record>
Transfer posted(Comm const& comm, Record* record) {
  Transfer transfer(record, comm.arena(), sizeof(Record));
  Operation& operation = comm.operation();
  record->posted = comm.now();
  if (operation.failure)
    record->complete(operation.failure);
  else
    record->transport.post(*record);
  return transfer;
}

}  // namespace

Pending::~Pending() {
  if (record_ == nullptr) return;
  if (!record_->done) record_->abandon();
  record_->~Wait();
  arena_->deallocate(record_, record_bytes_);
}

bool Pending::done() const { return record_ == nullptr || record_->done; }
void Pending::await_suspend(std::coroutine_handle<> waiter) noexcept { record_->waiter = waiter; }
void Pending::await_resume() const {
  if (record_ != nullptr && record_->error) std::rethrow_exception(record_->error);
}

Buffer Transfer::take() {
  await_resume();
  return std::move(static_cast<RecvRecord*>(record_)->sink.kept);
}

bool Compute::await_ready() noexcept { return static_cast<ComputeRecord*>(record_)->ready(); }
void Compute::await_suspend(std::coroutine_handle<> waiter) noexcept {
  static_cast<ComputeRecord*>(record_)->begin(waiter);
}

Endpoint::Endpoint(Transport& transport, Executor& executor, WorkerPool* pool)
    : transport_(transport), executor_(executor), pool_(pool), world_(std::make_shared<Comm::Group>()) {
  world_->endpoint = this;
  world_->members.resize(static_cast<std::size_t>(transport.size()));
  std::iota(world_->members.begin(), world_->members.end(), 0);
  world_->rank = transport.rank();
  groups_.emplace(world_->id, world_);
}

std::shared_ptr<Comm::Group> Endpoint::group(std::uint64_t id, std::vector<int> members) {
  const Lock lock(mutex_);
  std::shared_ptr<Comm::Group>& entry = groups_[id];
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
  entry = std::make_shared<Comm::Group>();
  entry->endpoint = this;
  entry->id = id;
  entry->rank = static_cast<int>(self - members.begin());
  entry->members = std::move(members);
  return entry;
}

int Comm::rank() const { return group_->rank; }
int Comm::size() const { return static_cast<int>(group_->members.size()); }
int Comm::world_rank(int group_rank) const { return group_->members[static_cast<std::size_t>(group_rank)]; }
std::uint64_t Comm::group_id() const { return group_->id; }
std::uint32_t Comm::next_unnamed_slot() const {
  return kUnnamed | (group_->next_unnamed.fetch_add(1) & ~kUnnamed);
}

Endpoint& Comm::endpoint() const { return *group_->endpoint; }
Arena& Comm::arena() const { return endpoint().executor().arena(); }
Time Comm::now() const { return endpoint().executor().now(); }
std::size_t Comm::micro_op_bytes() const { return endpoint().micro_op_bytes(is_whole(operation_)); }
const LinkCost& Comm::cost() const { return endpoint().cost(is_whole(operation_)); }
int Comm::node_size() const {
  const int node_ranks = cost().node_ranks;
  if (node_ranks <= 1) return 1;
  const std::vector<int>& members = group_->members;
  const auto node_of = [&](std::size_t member) { return members[member] / node_ranks; };
  std::size_t run = 1;
  while (run < members.size() && node_of(run) == node_of(0)) ++run;
  if (members.size() % run != 0) return 1;
  for (std::size_t member = 0; member < members.size(); ++member) {
    const bool first = member % run == 0;
    if (!first && node_of(member) != node_of(member - 1)) return 1;
    if (first && member > 0 && node_of(member) == node_of(member - 1)) return 1;
  }
  return static_cast<int>(run);
}
const KernelCosts& Comm::kernels() const { return endpoint().kernels(is_whole(operation_)); }

std::uint64_t Comm::bytes_sent() const { return operation_->bytes_sent; }
void Comm::declare(std::uint32_t fingerprint) const {
  operation_->fingerprint = fingerprint;
  if (operation_->opening == 0) operation_->opening = fingerprint;
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

// From the arena.
template <class Record>
Record* Comm::record_to(int peer, std::uint32_t hop) const {
  check(peer);
  const Identity id{group_->id, operation_->slot, operation_->step, hop_base_ + hop};
  return new (arena().allocate(sizeof(Record)))
      Record(endpoint().transport(), *operation_, world_rank(peer), id);
}

Transfer Comm::send(int peer, std::uint32_t hop, std::span<const std::byte> payload, DType dtype) const {
  auto* record = record_to<SendRecord>(peer, hop);
  record->payload = payload;
  record->dtype = dtype;
  operation_->bytes_sent += payload.size();
  operation_->messages_sent += 1;
  return posted(*this, record);
}

Transfer Comm::recv(int peer, std::uint32_t hop, std::span<std::byte> into, DType dtype) const {
  auto* record = record_to<RecvRecord>(peer, hop);
  record->sink.kind = Sink::Kind::into;
  record->sink.into = into;
  record->dtype = dtype;
  return posted(*this, record);
}

Transfer Comm::recv_fold(int peer, std::uint32_t hop, const Dense& into, Reduction reduction) const {
  auto* record = record_to<RecvRecord>(peer, hop);
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
  auto* record = record_to<RecvRecord>(peer, hop);
  record->sink.kind = Sink::Kind::consume;
  record->sink.consume = consume;
  record->sink.limit = limit;
  record->sink.seconds_per_byte = seconds_per_byte;
  return posted(*this, record);
}

Transfer Comm::recv_any(int peer, std::uint32_t hop, std::size_t limit) const {
  auto* record = record_to<RecvRecord>(peer, hop);
  record->sink.kind = Sink::Kind::keep;
  record->sink.limit = limit;
  return posted(*this, record);
}

Sleep Comm::sleep_until(Time until) const {
  check_bound();
  if (!operation_->failure && until <= now()) return {};
  auto* record = new (arena().allocate(sizeof(SleepRecord))) SleepRecord(*operation_);
  Sleep sleep(record, arena(), sizeof(SleepRecord));
  if (operation_->failure)
    record->complete(operation_->failure);
  else
    record->begin(until);
  return sleep;
}

Sleep Comm::charge(double seconds) const {
  const Executor& executor = endpoint().executor();
  if (seconds <= 0 || !executor.simulated()) return sleep_until(Time{0});
  SimWorkers* const workers = endpoint().sim_workers();
  const Time now = executor.now();
  return sleep_until(workers != nullptr ? workers->handle(now, seconds) : now + from_seconds(seconds));
}

Compute Comm::compute_priced(FunctionRef<double()> work) const {
  check_bound();
  auto* record = new (arena().allocate(sizeof(ComputeRecord)))
      ComputeRecord(*operation_, endpoint().sim_workers(), work);
  return {record, arena(), sizeof(ComputeRecord)};
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
  return Comm(endpoint().group(id, std::move(members)), operation_, hop_base_);
}

}  // namespace weft
