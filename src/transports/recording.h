// `recording`: counts what an operation posts on its way to another transport. Formulas of bytes and rounds
// are tested with it, and `weft bench` reports from it.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <set>

#include "transports/decorator.h"

namespace weft {

// What one rank posted for one operation.
struct OperationTraffic {
  std::uint64_t messages_sent = 0;
  std::uint64_t messages_received = 0;
  std::uint64_t payload_bytes_sent = 0;
  std::set<std::uint32_t> hops;  // that it sent or received at; the pieces of a hop count once
};

class RecordingTransport final : public Decorator {
 public:
  using Decorator::Decorator;

  // Zeros if nothing of the operation was posted here.
  OperationTraffic traffic(std::uint64_t group, std::uint32_t slot, std::uint32_t step) const;
  // Over all groups that the operation used: a collective may run in subgroups.
  OperationTraffic traffic(std::uint32_t slot, std::uint32_t step) const;
  void forget() { operations_.clear(); }

  void post(SendRecord& send) noexcept override;
  void post(RecvRecord& recv) noexcept override;

 private:
  struct Key {
    std::uint32_t slot = 0;
    std::uint32_t step = 0;
    std::uint64_t group = 0;
    friend auto operator<=>(const Key&, const Key&) = default;
  };
  OperationTraffic& of(const Identity& id) { return operations_[{id.slot, id.step, id.group}]; }

  std::map<Key, OperationTraffic> operations_;
};

}  // namespace weft
