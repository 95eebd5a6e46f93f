#include "engine/inquiry.h"

#include <algorithm>
#include <cstring>

#include "weft/error.h"
#include "wire/frame.h"

namespace weft {

namespace {

// A note, as both ends lay it out: little-endian, as all integers on the wire.
struct NoteFields {
  std::uint32_t opening = 0;
  std::uint32_t unused = 0;
  std::uint64_t age = 0;  // of the last progress, in nanoseconds
};

}  // namespace

Inquiry::Inquiry(const Comm& comm, const Operation& about) : about_(about) {
  operation_.name = about.name;
  operation_.traffic = TrafficClass::blocking;  // behind gradients that cannot move it would not arrive
  operation_.group = about.group;
  operation_.slot = about.slot;
  operation_.step = about.step;
  operation_.executor = about.executor;
  comm_ = comm.bound(operation_);
  peers_.resize(static_cast<std::size_t>(comm.size() - 1));
  for (int gap = 1; gap < comm.size(); ++gap) {
    Peer& peer = peers_[static_cast<std::size_t>(gap - 1)];
    peer.rank = comm.after(gap);
    peer.answer = comm_.recv(peer.rank, kAskingHop, peer.coming);
  }
}

void Inquiry::tell(Time now, Time progressed) {
  const NoteFields fields{.opening = about_.opening,
                          .age = static_cast<std::uint64_t>(std::max(now - progressed, Time{0}).count())};
  for (Peer& peer : peers_) {
    if (!peer.question.done()) continue;  // its memory is the transport's
    peer.question = Transfer();
    static_assert(sizeof(NoteFields) == sizeof(Note));
    std::memcpy(peer.going.data(), &fields, sizeof fields);
    peer.question = comm_.send(peer.rank, kAskingHop, std::span<const std::byte>(peer.going));
  }
}

void Inquiry::listen(Time now) {
  for (Peer& peer : peers_) {
    while (peer.answer.done()) {
      try {
        peer.answer.await_resume();
      } catch (const Error&) {
        break;  // the question could not be put: nothing more is known
      }
      NoteFields fields;
      std::memcpy(&fields, peer.coming.data(), sizeof fields);
      peer.heard = true;
      if (fields.opening != 0) peer.opening = fields.opening;
      const auto before = static_cast<std::uint64_t>(now.count());
      if (fields.age <= before) progressed_ = std::max(progressed_, Time(before - fields.age));
      peer.answer = Transfer();
      peer.answer = comm_.recv(peer.rank, kAskingHop, peer.coming);
    }
  }
}

std::exception_ptr Inquiry::disagreement() const {
  for (const Peer& peer : peers_) {
    if (peer.opening == 0 || about_.opening == 0 || peer.opening == about_.opening) continue;
    const Identity id{about_.group, about_.slot, about_.step, kAskingHop};
    try {  // in the words of two messages that meet
      wire::check_message({.id = id, .source = comm_.world_rank(peer.rank), .fingerprint = peer.opening},
                          {.id = id, .fingerprint = about_.opening}, comm_.world_rank(comm_.rank()));
    } catch (const TransportError&) {
      return std::current_exception();
    }
  }
  return nullptr;
}

std::vector<int> Inquiry::silent() const {
  std::vector<int> out;
  for (const Peer& peer : peers_) {
    if (!peer.heard) out.push_back(comm_.world_rank(peer.rank));
  }
  return out;
}

}  // namespace weft
