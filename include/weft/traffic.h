// Traffic: its classes, and how much of it there was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace weft {

// In the order in which they go: what blocks computation first, what has most slack last.
enum class TrafficClass : std::uint8_t { blocking, prior, gradient, delayed };
constexpr std::string_view name_of(TrafficClass c) {
  constexpr std::string_view names[] = {"blocking", "prior", "gradient", "delayed"};
  return names[static_cast<std::size_t>(c)];
}

// Why a message started although it was to be held back: it had been for too long, or somebody waited for its
// operation.
enum class Unheld : std::uint8_t { no, aged, wanted };

// Whole life of the transport, payload and frames (what a link counter would see of them), from this rank.
struct TrafficCounters {
  std::uint64_t messages_sent = 0, messages_received = 0;
  std::uint64_t payload_bytes_sent = 0, payload_bytes_received = 0;
  std::uint64_t wire_bytes_sent = 0, wire_bytes_received = 0;
};

}  // namespace weft
