// Sends and receives as whoever carries them has them: what travels, where it goes, and the places that the
// scheduler and the matching keep inside a record, so that a message costs no memory beside it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "transports/match_key.h"
#include "transports/operation.h"
#include "weft/arena.h"
#include "weft/dtype.h"
#include "weft/function_ref.h"
#include "weft/transport.h"

namespace weft {

// Told when a send is done, before its waiter goes on.
class SendObserver {
 public:
  virtual void sent(SendRecord& record) noexcept = 0;

 protected:
  ~SendObserver() = default;
};

class SendRecord final : public TransferRecord {
 public:
  using TransferRecord::TransferRecord;
  std::span<const std::byte> payload;
  DType dtype = DType::bytes;
  std::uint8_t codec = 0;
  SendObserver* observer = nullptr;

  // The engine's own (engine/scheduler.h): where the send stands on its way to the transport.
  enum class Stage : std::uint8_t { fresh, queued, moving, stalled };
  struct Schedule {
    Stage stage = Stage::fresh;
    Unheld unheld = Unheld::no;
    Time queued{}, begun{};
    SendRecord* next = nullptr;
    SendRecord* previous = nullptr;
  };
  Schedule schedule;
};

// Whether a send that has not begun leaves the link to urgent traffic of its rank (Transport::give_way).
inline bool gives_way(const SendRecord& send) {
  return send.operation.traffic != TrafficClass::blocking && !send.operation.waited_for;
}

// Where a received payload goes. Exactly one of:
//   into      it must have exactly that many bytes, and is placed there (by the network card, the kernel, or
//             one copy)
//   consume   called once with the bytes, which are valid only during the call, on the engine's thread or on
//             a worker
//   keep      a buffer of the payload's length is taken from the arena; at most `limit` bytes
struct Sink {
  enum class Kind : std::uint8_t { into, consume, keep };
  Kind kind = Kind::into;
  std::span<std::byte> into;
  FunctionRef<void(std::span<const std::byte>)> consume;
  Buffer kept;
  std::size_t limit = 0;        // consume and keep: a longer payload is refused before memory is taken for it
  double seconds_per_byte = 0;  // of `consume`, in virtual time
};

class RecvRecord final : public TransferRecord {
 public:
  RecvRecord(Transport& carrier, Operation& op, int peer_rank, const Identity& identity)
      : TransferRecord(carrier, op, peer_rank, identity), key{peer_rank, identity} {}
  Sink sink;
  MatchKey key;  // and its place among the receives that wait (transports/match_table.h)
  RecvRecord* match_next = nullptr;
  RecvRecord* match_previous = nullptr;
  DType dtype = DType::bytes;
  std::uint8_t codec = 0;
  alignas(16) std::array<std::byte, 48> context{};  // for a consumer that needs state as old as the record
};

}  // namespace weft
