// Frames: garbage is refused with a TransportError and nothing else; what was encoded comes back equal; one
// changed bit in a frame, or in the payload behind it, is noticed.
//
// Needs no seeds: the second half builds valid frames out of the input itself.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <span>

#include "weft/error.h"
#include "wire/crc32c.h"
#include "wire/frame.h"

namespace weft::wire {
namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

// Takes numbers from the input, zeros when it is used up.
class Input {
 public:
  explicit Input(std::span<const std::byte> bytes) : rest_(bytes) {}
  template <class T>
  T take() {
    T value{};
    const std::size_t n = std::min(sizeof value, rest_.size());
    if (n > 0) std::memcpy(&value, rest_.data(), n);
    rest_ = rest_.subspan(n);
    return value;
  }
  std::span<const std::byte> rest() const { return rest_; }

 private:
  std::span<const std::byte> rest_;
};

// True if f() returned, false if it threw a TransportError; any other exception ends the run.
template <class F>
bool accepted(F f) {
  try {
    f();
    return true;
  } catch (const TransportError& e) {
    require(e.what()[0] != '\0');
    return false;
  }
}

Frame take_frame(Input& input) {
  Frame frame;
  frame.kind = static_cast<FrameKind>(1 + input.take<std::uint8_t>() % 6);
  frame.dtype = static_cast<DType>(input.take<std::uint8_t>() % 7);
  frame.codec = input.take<std::uint8_t>();
  frame.epoch = input.take<std::uint32_t>();
  frame.job = input.take<std::uint64_t>();
  frame.id.group = input.take<std::uint64_t>();
  frame.id.slot = input.take<std::uint32_t>();
  frame.id.step = input.take<std::uint32_t>();
  frame.id.hop = input.take<std::uint32_t>();
  frame.source = static_cast<int>(input.take<std::uint32_t>() & 0x7fff'ffffu);
  frame.length = input.take<std::uint64_t>();
  frame.fingerprint = input.take<std::uint32_t>();
  return frame;
}

// Both checks, with what this input makes the receiver expect: they hold exactly where everything agrees.
void check_checks(const Frame& frame, Input& input) {
  const std::uint8_t differs = input.take<std::uint8_t>();
  const auto flag = [&](int bit) { return static_cast<std::uint64_t>(differs >> bit & 1); };
  const Expected expected{.job = frame.job ^ flag(0),
                          .epoch = frame.epoch ^ static_cast<std::uint32_t>(flag(1)),
                          .source = frame.source ^ static_cast<int>(flag(2)),
                          .max_length = frame.length};
  require(accepted([&] { check_frame(frame, expected); }) == ((differs & 7) == 0));
  if (frame.length > 0) {
    const Expected shorter{
        .job = frame.job, .epoch = frame.epoch, .source = frame.source, .max_length = frame.length - 1};
    require(!accepted([&] { check_frame(frame, shorter); }));
  }
  ExpectedMessage message{.id = frame.id,
                          .dtype = frame.dtype,
                          .codec = static_cast<std::uint8_t>(frame.codec ^ flag(3)),
                          .fingerprint = frame.fingerprint ^ input.take<std::uint32_t>(),
                          .exact_length = flag(4) != 0,
                          .length = input.take<std::uint64_t>()};
  message.id.hop ^= static_cast<std::uint32_t>(flag(5));
  const bool fits = message.exact_length ? frame.length == message.length : frame.length <= message.length;
  const bool agrees = message.id == frame.id && message.codec == frame.codec &&
                      message.fingerprint == frame.fingerprint && fits;
  require(accepted([&] { check_message(frame, message, 3); }) == agrees);
}

void round_trip(std::span<const std::byte> bytes) {
  Input input(bytes);
  Frame frame = take_frame(input);
  const std::uint32_t bit = input.take<std::uint32_t>();
  check_checks(frame, input);

  std::array<std::byte, 256> payload{};
  const std::size_t length = std::min(payload.size(), input.rest().size());
  std::copy_n(input.rest().begin(), length, payload.begin());
  const std::span<std::byte> body = std::span(payload).first(length);
  frame.payload_crc = crc32c(body);
  require(frame.payload_crc == crc32c_table(body));

  FrameBytes encoded = encode_frame(frame);
  require(parse_frame(encoded, 0) == frame);
  encoded[bit / 8 % kFrameBytes] ^= std::byte{1} << bit % 8;
  require(!accepted([&] { parse_frame(encoded, 0); }));

  require(accepted([&] { check_payload(frame, body); }));
  if (length > 0) {
    body[bit / 8 % length] ^= std::byte{1} << bit % 8;
    require(!accepted([&] { check_payload(frame, body); }));
  }
  require(pack(unpack_fingerprint(frame.fingerprint)) == frame.fingerprint);
}

void garbage(std::span<const std::byte> bytes) {
  if (bytes.size() < kFrameBytes) return;
  FrameBytes raw{};
  std::copy_n(bytes.begin(), kFrameBytes, raw.begin());
  accepted([&] { parse_frame(raw, 1); });
  // With a right beginning and a right checksum, so that the fields are reached.
  const std::uint32_t magic = kMagic;
  std::memcpy(raw.data(), &magic, sizeof magic);
  raw[4] = std::byte{kVersion};
  const std::uint32_t crc = crc32c(std::span(raw).first(kFrameBytes - 4));
  std::memcpy(raw.data() + kFrameBytes - 4, &crc, sizeof crc);
  Frame frame;
  if (accepted([&] { frame = parse_frame(raw, 1); })) require(encode_frame(frame) == raw);
}

}  // namespace
}  // namespace weft::wire

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  weft::wire::garbage(bytes);
  weft::wire::round_trip(bytes);
  return 0;
}
