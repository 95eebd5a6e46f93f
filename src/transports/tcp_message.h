// Messages in the hands of the tcp transport: what this rank sends, and what it knows of what is sent to it.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <span>
#include <tuple>

#include "transports/match_table.h"
#include "transports/records.h"
#include "wire/frame.h"

namespace weft::tcp {

class TcpTransport;

// A send, from post() until its last byte is handed to the kernel.
struct Outgoing {
  enum class State : std::uint8_t {
    eager,      // its data waits in the peer's queue
    asking,     // its request does
    requested,  // waits for the grant
    granted,    // its data waits in the peer's queue
    writing,    // left its lane
  };

  MatchKey key;  // to whom, and what
  Outgoing* match_next = nullptr;
  Outgoing* match_previous = nullptr;
  Outgoing* lane_next = nullptr;  // the next one with the same key
  Outgoing* lane_last = nullptr;  // in the first of a lane: the last
  SendRecord* record = nullptr;   // null once cancelled
  wire::Frame frame;
  std::span<const std::byte> payload;
  Buffer detached;           // the payload, if its sender wanted the memory back
  std::size_t crc_done = 0;  // bytes of the payload that are in `crc`
  std::uint32_t crc = 0;
  TrafficClass traffic = TrafficClass::gradient;
  int priority = 0;
  std::uint64_t sequence = 0;
  State state = State::eager;

  // For a heap whose top goes first.
  static bool goes_after(const Outgoing* a, const Outgoing* b) {
    return std::tuple(a->traffic, a->priority, a->sequence) >
           std::tuple(b->traffic, b->priority, b->sequence);
  }
};

// Sends of one key that have not begun to be written, in the order in which they were posted. Needed because
// an urgent or a short message must not overtake an earlier one of the same key.
class Lanes {
 public:
  Outgoing* first(const MatchKey& key) { return heads_.front(key); }
  Outgoing* last(const MatchKey& key) {
    Outgoing* head = first(key);
    return head != nullptr ? head->lane_last : nullptr;
  }
  void append(Outgoing& message) {
    message.lane_next = nullptr;
    if (Outgoing* head = first(message.key)) {
      head->lane_last->lane_next = &message;
      head->lane_last = &message;
    } else {
      message.lane_last = &message;
      heads_.push(message);
    }
  }
  // REQUIRES: in its lane.
  void remove(Outgoing& message) {
    Outgoing* head = first(message.key);
    if (head == &message) {
      heads_.erase(message);
      if (Outgoing* next = message.lane_next) {
        next->lane_last = message.lane_last;
        heads_.push(*next);
      }
      return;
    }
    Outgoing* before = head;
    while (before->lane_next != &message) before = before->lane_next;
    before->lane_next = message.lane_next;
    if (head->lane_last == &message) head->lane_last = before;
  }
  template <class F>
  void for_each(F f) const {  // f may not change a lane
    heads_.for_each([&](Outgoing& head) {
      for (Outgoing* message = &head; message != nullptr; message = message->lane_next) f(*message);
    });
  }

 private:
  MatchTable<Outgoing> heads_;
};

// A message from a peer, from its first frame until it is delivered.
struct Incoming {
  enum class State : std::uint8_t {
    requested,  // its peer asks; no receive yet
    granted,    // the receive is there, the data is on its way
    reading,    // its payload is being read
    waiting,    // it is here; no receive yet
    consuming,  // a worker has it
  };

  MatchKey key;
  Incoming* match_next = nullptr;
  Incoming* match_previous = nullptr;
  State state = State::reading;
  bool eager = false;    // its bytes count against the peer's credit
  bool discard = false;  // nobody wants it any more; its payload is read and dropped
  wire::Frame frame;
  RecvRecord* recv = nullptr;
  SendRecord* local = nullptr;  // from this rank to itself: the send that waits
  Buffer buffer;                // the payload, if it does not go straight to the receive

  // On the worker pool:
  TcpTransport* transport = nullptr;
  Incoming* next_finished = nullptr;
  std::exception_ptr thrown;
  std::atomic<bool> finished{false};
};

}  // namespace weft::tcp
