// The frame in front of every message: 64 bytes, little-endian, docs/wire_format.md has the map. One parser
// for all transports; nothing of a frame is used before parse_frame() and check_frame() have passed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/identity.h"
#include "weft/dtype.h"

namespace weft::wire {

inline constexpr std::uint32_t kMagic = 0x54464557u;  // "WEFT"
inline constexpr std::uint8_t kVersion = 1;
inline constexpr std::size_t kFrameBytes = 64;

enum class FrameKind : std::uint8_t {
  data = 1,       // `length` bytes of payload follow
  request = 2,    // "may I send `length` bytes of this identity?"; no payload
  grant = 3,      // "send them"; no payload
  credit = 4,     // `length` bytes of unexpected messages were taken; no payload
  heartbeat = 5,  // no payload
  goodbye = 6,    // `length` bytes of text follow: empty for a graceful close, else the reason
};

struct Frame {
  FrameKind kind = FrameKind::data;
  DType dtype = DType::bytes;
  std::uint8_t codec = 0;
  std::uint32_t epoch = 0;
  std::uint64_t job = 0;
  Identity id;
  int source = 0;
  std::uint64_t length = 0;
  std::uint32_t fingerprint = 0;
  std::uint32_t payload_crc = 0;  // 0 where payloads are not checked (inside a process)

  friend bool operator==(const Frame&, const Frame&) = default;
};

using FrameBytes = std::array<std::byte, kFrameBytes>;

FrameBytes encode_frame(const Frame& frame);

// Throws TransportError(corrupt) that names what is wrong: magic, version, kind, dtype, or the header's
// checksum. `peer` is for the message only.
Frame parse_frame(std::span<const std::byte, kFrameBytes> bytes, int peer);

// What the receiver knows of the job and of this message.
struct Expected {
  std::uint64_t job = 0;
  std::uint32_t epoch = 0;
  int source = -1;               // the peer at the other end
  std::uint64_t max_length = 0;  // agreed when the job started; never taken from the frame
};
// Throws TransportError(corrupt) for a wrong job, epoch, source or a length above the limit.
void check_frame(const Frame& frame, const Expected& expected);

// What the operation that receives says about the message it expects.
struct ExpectedMessage {
  Identity id;
  DType dtype = DType::bytes;
  std::uint8_t codec = 0;
  std::uint32_t fingerprint = 0;
  bool exact_length = true;  // else at most `length`
  std::uint64_t length = 0;
};
// Throws TransportError(mismatch) that says what this rank runs and what the peer runs; corrupt for a wrong
// identity.
void check_message(const Frame& frame, const ExpectedMessage& expected, int rank);
// Throws TransportError(corrupt).
void check_payload(const Frame& frame, std::span<const std::byte> payload);

// A fingerprint says what an operation is in 32 bits, so that a mismatch can be told in words without another
// message.
struct Fingerprint {
  std::uint8_t family = 0;     // 5 bits, Family of the registry
  std::uint8_t algorithm = 0;  // 6 bits, row of the family's table
  std::uint8_t dtype = 0;      // 4 bits
  std::uint8_t reduction = 0;  // 3 bits
  std::uint16_t count = 0;     // 14 bits, a hash of the element count
};
std::uint32_t pack(const Fingerprint& fingerprint);
Fingerprint unpack_fingerprint(std::uint32_t packed);
// As in `weft bench`. REQUIRES: the order of Family (collectives/registry.h), whose numbers are not reused.
std::string_view family_name(std::size_t family);
std::uint16_t count_hash(std::uint64_t count);

}  // namespace weft::wire
