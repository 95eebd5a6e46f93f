#include "measure/bench/message_log.h"

#include <algorithm>

#include "collectives/pieces.h"
#include "transports/decorator.h"
#include "transports/endpoint.h"

namespace weft {

// Stands before the engine's scheduler, so that it sees a send when the program makes it and not when the
// window has room for it.
class MessageLog::Listener final : public Decorator {
 public:
  Listener(Transport& inner, MessageLog& log) : Decorator(inner), log_(log) {}

  void post(SendRecord& send) noexcept override {
    log_.note(send, true, send.payload.size());
    inner_.post(send);
  }
  void post(RecvRecord& recv) noexcept override {
    log_.note(recv, false, recv.sink.kind == Sink::Kind::into ? recv.sink.into.size() : recv.sink.limit);
    inner_.post(recv);
  }

 private:
  MessageLog& log_;
};

void MessageLog::note(const TransferRecord& record, bool send, std::size_t bytes) {
  std::vector<const Wait*> pending;
  for (const Wait* wait = record.operation.first_pending(); wait != nullptr;
       wait = Operation::next_pending(*wait)) {
    if (wait != &record) pending.push_back(wait);  // an older one at its address has gone
  }
  std::sort(pending.begin(), pending.end());
  Posted posted{.send = send, .peer = record.peer, .hop = record.id.hop, .bytes = bytes, .after = {}};
  const auto is_done = [&](const auto& receive) {
    if (std::binary_search(pending.begin(), pending.end(), receive.first)) return false;
    posted.after.push_back(receive.second);
    return true;
  };
  open_.erase(std::remove_if(open_.begin(), open_.end(), is_done), open_.end());
  if (!send) open_.emplace_back(&record, receives_++);
  posted_.push_back(std::move(posted));
}

Task<void> MessageLog::record(Comm comm, std::function<Task<void>(Comm)> make) {
  posted_.clear();
  open_.clear();
  receives_ = 0;
  const Endpoint& outer = comm.endpoint();
  Listener listener(outer.transport(), *this);
  Endpoint endpoint(listener, outer.executor(), outer.pool());
  endpoint.set_micro_op_bytes(outer.micro_op_bytes());
  endpoint.set_cost(outer.cost());
  const Comm listened(endpoint.world(), &comm.operation());
  co_await make(listened);
}

std::size_t MessageLog::longest() const {
  std::size_t longest = 0;
  for (const Posted& p : posted_) longest = std::max(longest, p.send ? p.bytes : 0);
  return longest;
}

Task<void> replay(Comm comm, const MessageLog& log, std::span<const std::byte> payload) {
  auto ignore = [](std::span<const std::byte>) {};
  TransferQueue sends(comm);
  std::vector<Transfer> receives;
  receives.reserve(log.receives());
  for (const MessageLog::Posted& p : log.posted()) {
    for (const std::uint32_t number : p.after) {
      Transfer& receive = receives[number];
      co_await receive;
    }
    if (p.send)
      sends.add(comm.send(p.peer, p.hop, payload.first(p.bytes)));
    else
      receives.push_back(comm.recv_with(p.peer, p.hop, p.bytes, ignore));
  }
  for (Transfer& receive : receives) co_await receive;
  while (!sends.empty()) co_await sends.next();
}

}  // namespace weft
