#include "engine/inquiry.h"

#include "weft/error.h"

namespace weft {

Inquiry::Inquiry(const Comm& comm, const Operation& about) {
  operation_.name = about.name;
  operation_.traffic = TrafficClass::blocking;  // behind gradients that cannot move it would not arrive
  operation_.group = about.group;
  operation_.slot = about.slot;
  operation_.step = about.step;
  operation_.fingerprint = about.opening;
  operation_.executor = about.executor;
  const Comm bound = comm.bound(operation_);
  asked_.reserve(static_cast<std::size_t>(comm.size()));
  for (int gap = 1; gap < comm.size(); ++gap) {
    const int peer = comm.after(gap);
    Asked& asked = asked_.emplace_back();
    asked.world_rank = comm.world_rank(peer);
    asked.answer = bound.recv(peer, kAskingHop, std::span<std::byte>());
    asked.question = bound.send(peer, kAskingHop, std::span<const std::byte>());
  }
}

std::exception_ptr Inquiry::disagreement() const {
  for (const Asked& asked : asked_) {
    if (!asked.answer.done()) continue;
    try {
      asked.answer.await_resume();
    } catch (const TransportError& error) {
      if (error.kind() == TransportError::Kind::mismatch) return std::current_exception();
    } catch (const Error&) {
      continue;  // the question could not be put: nothing is known
    }
  }
  return nullptr;
}

std::vector<int> Inquiry::silent() const {
  std::vector<int> out;
  for (const Asked& asked : asked_) {
    if (!asked.answer.done()) out.push_back(asked.world_rank);
  }
  return out;
}

}  // namespace weft
