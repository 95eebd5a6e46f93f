#include "wire/frame.h"

#include <bit>
#include <cstring>
#include <string>

#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::wire {

static_assert(std::endian::native == std::endian::little,
              "frames are written in the byte order of little-endian machines");

namespace {

// Byte offsets. docs/wire_format.md is this table.
constexpr std::size_t kAtMagic = 0;
constexpr std::size_t kAtVersion = 4;
constexpr std::size_t kAtKind = 5;
constexpr std::size_t kAtDType = 6;
constexpr std::size_t kAtCodec = 7;
constexpr std::size_t kAtEpoch = 8;
constexpr std::size_t kAtSource = 12;
constexpr std::size_t kAtJob = 16;
constexpr std::size_t kAtGroup = 24;
constexpr std::size_t kAtSlot = 32;
constexpr std::size_t kAtStep = 36;
constexpr std::size_t kAtHop = 40;
constexpr std::size_t kAtFingerprint = 44;
constexpr std::size_t kAtLength = 48;
constexpr std::size_t kAtPayloadCrc = 56;
constexpr std::size_t kAtHeaderCrc = 60;
static_assert(kAtHeaderCrc + 4 == kFrameBytes);

template <class T>
void put(FrameBytes& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
T get(std::span<const std::byte, kFrameBytes> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

[[noreturn]] void corrupt(int peer, const std::string& what) {
  throw TransportError(TransportError::Kind::corrupt, peer,
                       "frame from rank " + std::to_string(peer) + ": " + what);
}

std::string said(std::string_view field, std::uint64_t theirs, std::uint64_t mine) {
  return std::string(field) + " is " + std::to_string(theirs) + ", expected " + std::to_string(mine);
}

std::string text_of(const Identity& id) {
  return "group " + std::to_string(id.group) + " slot " + std::to_string(id.slot) + " step " +
         std::to_string(id.step) + (id.hop == kAskingHop ? "" : " hop " + std::to_string(id.hop));
}

}  // namespace

FrameBytes encode_frame(const Frame& frame) {
  FrameBytes bytes{};
  put(bytes, kAtMagic, kMagic);
  put(bytes, kAtVersion, kVersion);
  put(bytes, kAtKind, frame.kind);
  put(bytes, kAtDType, frame.dtype);
  put(bytes, kAtCodec, frame.codec);
  put(bytes, kAtEpoch, frame.epoch);
  put(bytes, kAtSource, static_cast<std::uint32_t>(frame.source));
  put(bytes, kAtJob, frame.job);
  put(bytes, kAtGroup, frame.id.group);
  put(bytes, kAtSlot, frame.id.slot);
  put(bytes, kAtStep, frame.id.step);
  put(bytes, kAtHop, frame.id.hop);
  put(bytes, kAtFingerprint, frame.fingerprint);
  put(bytes, kAtLength, frame.length);
  put(bytes, kAtPayloadCrc, frame.payload_crc);
  put(bytes, kAtHeaderCrc, crc32c(std::span(bytes).first(kAtHeaderCrc)));
  return bytes;
}

Frame parse_frame(std::span<const std::byte, kFrameBytes> bytes, int peer) {
  if (const auto magic = get<std::uint32_t>(bytes, kAtMagic); magic != kMagic) {
    corrupt(peer, said("magic", magic, kMagic));
  }
  if (const auto version = get<std::uint8_t>(bytes, kAtVersion); version != kVersion) {
    corrupt(peer, said("version", version, kVersion) + "; all ranks must run the same weft");
  }
  const auto said_crc = get<std::uint32_t>(bytes, kAtHeaderCrc);
  const std::uint32_t crc = crc32c(bytes.first(kAtHeaderCrc));
  if (said_crc != crc) corrupt(peer, said("header checksum", said_crc, crc));
  const auto kind = get<std::uint8_t>(bytes, kAtKind);
  if (kind < 1 || kind > 6) corrupt(peer, "unknown kind " + std::to_string(kind));
  const auto dtype = get<std::uint8_t>(bytes, kAtDType);
  if (dtype > static_cast<std::uint8_t>(DType::int64))
    corrupt(peer, "unknown dtype " + std::to_string(dtype));
  const auto source = get<std::uint32_t>(bytes, kAtSource);
  if (source > 0x7fff'ffffu) corrupt(peer, "source is out of range");

  Frame frame;
  frame.kind = static_cast<FrameKind>(kind);
  frame.dtype = static_cast<DType>(dtype);
  frame.codec = get<std::uint8_t>(bytes, kAtCodec);
  frame.epoch = get<std::uint32_t>(bytes, kAtEpoch);
  frame.job = get<std::uint64_t>(bytes, kAtJob);
  frame.id.group = get<std::uint64_t>(bytes, kAtGroup);
  frame.id.slot = get<std::uint32_t>(bytes, kAtSlot);
  frame.id.step = get<std::uint32_t>(bytes, kAtStep);
  frame.id.hop = get<std::uint32_t>(bytes, kAtHop);
  frame.source = static_cast<int>(source);
  frame.length = get<std::uint64_t>(bytes, kAtLength);
  frame.fingerprint = get<std::uint32_t>(bytes, kAtFingerprint);
  frame.payload_crc = get<std::uint32_t>(bytes, kAtPayloadCrc);
  return frame;
}

void check_frame(const Frame& frame, const Expected& expected) {
  if (frame.job != expected.job) corrupt(expected.source, said("job", frame.job, expected.job));
  if (frame.epoch != expected.epoch) corrupt(expected.source, said("epoch", frame.epoch, expected.epoch));
  if (frame.source != expected.source) {
    corrupt(expected.source, said("source", static_cast<std::uint64_t>(frame.source),
                                  static_cast<std::uint64_t>(expected.source)));
  }
  if (frame.length > expected.max_length) {
    corrupt(expected.source, "length " + std::to_string(frame.length) + " is above the limit of " +
                                 std::to_string(expected.max_length) + " bytes");
  }
}

void check_message(const Frame& frame, const ExpectedMessage& expected, int rank) {
  if (frame.id != expected.id) {
    corrupt(frame.source, "identity is " + text_of(frame.id) + ", expected " + text_of(expected.id));
  }
  const auto mismatch = [&](const std::string& what) {
    throw TransportError(TransportError::Kind::mismatch, frame.source,
                         "ranks disagree about an operation (" + text_of(expected.id) + "): rank " +
                             std::to_string(rank) + " and rank " + std::to_string(frame.source) +
                             " differ in " + what);
  };
  if (frame.fingerprint != expected.fingerprint) {
    const Fingerprint mine = unpack_fingerprint(expected.fingerprint);
    const Fingerprint theirs = unpack_fingerprint(frame.fingerprint);
    if (mine.family != theirs.family) {
      mismatch("the family of the collective: " + std::string(family_name(mine.family)) + " here, " +
               std::string(family_name(theirs.family)) + " there");
    }
    if (mine.algorithm != theirs.algorithm) {
      mismatch("the algorithm: row " + std::to_string(mine.algorithm) + " of " +
               std::string(family_name(mine.family)) + " here, row " + std::to_string(theirs.algorithm) +
               " there (`weft info` has the rows in order, from 0)");
    }
    if (mine.dtype != theirs.dtype) {
      mismatch("the element type: " + std::string(name_of(static_cast<DType>(mine.dtype))) + " here, " +
               std::string(name_of(static_cast<DType>(theirs.dtype))) + " there");
    }
    if (mine.reduction != theirs.reduction) {
      mismatch("the reduction: " + std::string(name_of(static_cast<Reduction>(mine.reduction))) + " here, " +
               std::string(name_of(static_cast<Reduction>(theirs.reduction))) + " there");
    }
    mismatch("the number of elements, the counts of blocks, or a root or k");
  }
  if (frame.dtype != expected.dtype) {
    mismatch("the element type: " + std::string(name_of(expected.dtype)) + " here, " +
             std::string(name_of(frame.dtype)) + " there");
  }
  if (frame.codec != expected.codec) mismatch("the codec");
  if (expected.exact_length ? frame.length != expected.length : frame.length > expected.length) {
    mismatch("the length of a message: " + std::to_string(expected.length) + " bytes here, " +
             std::to_string(frame.length) + " there");
  }
}

void check_payload(const Frame& frame, std::span<const std::byte> payload) {
  const std::uint32_t crc = crc32c(payload);
  if (crc != frame.payload_crc)
    corrupt(frame.source, said("payload checksum", frame.payload_crc, crc) + " (" + text_of(frame.id) + ")");
}

std::uint32_t pack(const Fingerprint& f) {
  return (f.family & 31u) | (f.algorithm & 63u) << 5 | (f.dtype & 15u) << 11 | (f.reduction & 7u) << 15 |
         (f.count & 0x3fffu) << 18;
}

Fingerprint unpack_fingerprint(std::uint32_t packed) {
  return {.family = static_cast<std::uint8_t>(packed & 31u),
          .algorithm = static_cast<std::uint8_t>(packed >> 5 & 63u),
          .dtype = static_cast<std::uint8_t>(packed >> 11 & 15u),
          .reduction = static_cast<std::uint8_t>(packed >> 15 & 7u),
          .count = static_cast<std::uint16_t>(packed >> 18)};
}

std::string_view family_name(std::size_t family) {
  constexpr std::string_view names[] = {"allreduce", "reducescatter", "allgather", "broadcast",
                                        "barrier",   "alltoall",      "message",   "sparse_allreduce"};
  return family < std::size(names) ? names[family] : "unknown";
}

std::uint16_t count_hash(std::uint64_t count) { return static_cast<std::uint16_t>(mix(count) & 0x3fffu); }

}  // namespace weft::wire
