#include "wire/codec.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "base/half.h"
#include "weft/error.h"
#include "wire/rice.h"

namespace weft::wire {

static_assert(std::endian::native == std::endian::little,
              "blocks are written in the byte order of little-endian machines");

namespace {

constexpr std::size_t kHeadBytes = 4;
constexpr std::size_t kCodingBytes = 1;
constexpr std::uint32_t kNonFinite = 0x8000'0000u;
constexpr int kLargestRice = 31;

std::size_t value_bytes(SparseCodec codec) { return codec == SparseCodec::packed_bf16 ? 2 : 4; }
std::size_t bytes_of(std::int64_t bits) { return static_cast<std::size_t>((bits + 7) / 8); }

// A block that its receiver would refuse is not written.
void check(EntriesView entries, std::int64_t length) {
  if (entries.size() >= kNonFinite || entries.values.size() != entries.size() ||
      (!entries.empty() && entries.indices.back() >= length)) {
    throw UsageError("entries do not fit into a block of " + std::to_string(length) + " elements");
  }
}

std::size_t packed_bytes(SparseCodec codec, std::size_t count, std::size_t index_bytes) {
  return kHeadBytes + kCodingBytes + index_bytes + count * value_bytes(codec);
}

void write_values(SparseCodec codec, std::span<const float> values, std::byte* into) {
  if (codec != SparseCodec::packed_bf16) {
    std::memcpy(into, values.data(), values.size_bytes());
    return;
  }
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bfloat16 rounded = half::narrow_bfloat16(values[i]);
    std::memcpy(into + i * sizeof rounded, &rounded, sizeof rounded);
  }
}

// The bytes of one block as they are used up, and how to complain about them.
class Block {
 public:
  Block(std::span<const std::byte> bytes, const ExpectedBlock& expected)
      : bytes_(bytes), expected_(expected) {}

  [[noreturn]] void corrupt(const std::string& what) const {
    const std::string from = expected_.peer < 0 ? "" : " from rank " + std::to_string(expected_.peer);
    throw TransportError(TransportError::Kind::corrupt, expected_.peer, "sparse block" + from + ": " + what);
  }
  void require(std::size_t more, const char* what) const {
    if (left() >= more) return;
    corrupt("it ends inside its " + std::string(what) + " (" + std::to_string(more) + " bytes are needed, " +
            std::to_string(left()) + " are there)");
  }
  std::span<const std::byte> take(std::size_t count) {
    const std::span<const std::byte> taken = bytes_.subspan(used_, count);
    used_ += count;
    return taken;
  }
  std::span<const std::byte> rest() const { return bytes_.subspan(used_); }
  std::size_t left() const { return bytes_.size() - used_; }
  std::size_t used() const { return used_; }
  const ExpectedBlock& expected() const { return expected_; }

 private:
  std::span<const std::byte> bytes_;
  const ExpectedBlock& expected_;
  std::size_t used_ = 0;
};

void read_plain_indices(Block& block, std::span<std::uint32_t> into) {
  std::memcpy(into.data(), block.take(into.size_bytes()).data(), into.size_bytes());
  bool increasing = true;
  for (std::size_t i = 1; i < into.size(); ++i) increasing &= into[i - 1] < into[i];
  if (!increasing) block.corrupt("its indices do not increase");
  if (into.back() >= block.expected().length) {
    block.corrupt("index " + std::to_string(into.back()) + " is outside its " +
                  std::to_string(block.expected().length) + " elements");
  }
}

void read_packed_indices(Block& block, SparseCodec codec, std::size_t count, Entries& out) {
  const std::size_t values = count * value_bytes(codec);
  block.require(kCodingBytes + values, "values");
  const int parameter = static_cast<int>(block.take(kCodingBytes)[0]);
  if (parameter > kLargestRice) block.corrupt("unknown coding " + std::to_string(parameter));
  const std::size_t least = bytes_of(static_cast<std::int64_t>(count) * (parameter + 1));
  block.require(least + values, "indices");
  out.resize(count);
  const std::span<const std::byte> codes = block.rest().first(block.left() - values);
  const RiceResult result = read_rice_codes(codes, parameter, block.expected().length, out.indices);
  if (result.fault != nullptr) block.corrupt(result.fault);
  block.take(result.bytes);
  if (const RiceChoice right = choose_rice(out.indices); right.parameter != parameter) {
    block.corrupt("its indices have coding " + std::to_string(parameter) + ", the smallest is " +
                  std::to_string(right.parameter));
  }
}

void read_values(Block& block, SparseCodec codec, bool any, std::span<float> into) {
  const std::byte* from = block.take(into.size() * value_bytes(codec)).data();
  if (codec == SparseCodec::packed_bf16) {
    for (std::size_t i = 0; i < into.size(); ++i) {
      bfloat16 value;
      std::memcpy(&value, from + i * sizeof value, sizeof value);
      into[i] = half::widen(value);
    }
  } else {
    std::memcpy(into.data(), from, into.size_bytes());
  }
  if (any) return;
  bool finite = true;
  for (const float x : into) finite &= (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u;
  if (!finite) block.corrupt("a value is not finite, and nobody said so");
}

}  // namespace

SparseCodec sparse_codec_of(std::string_view name) {
  for (const SparseCodec codec : {SparseCodec::coo, SparseCodec::packed, SparseCodec::packed_bf16}) {
    if (name_of(codec) == name) return codec;
  }
  throw UsageError("unknown codec '" + std::string(name) + "': coo, packed or packed-bf16");
}

std::size_t encoded_bytes(SparseCodec codec, EntriesView entries, std::int64_t length) {
  check(entries, length);
  if (entries.empty()) return kHeadBytes;
  if (codec == SparseCodec::coo) return kHeadBytes + 8 * entries.size();
  return packed_bytes(codec, entries.size(), bytes_of(choose_rice(entries.indices).bits));
}

std::size_t max_encoded_bytes(SparseCodec codec, std::int64_t count, std::int64_t length) {
  count = std::min(count, length);
  if (count <= 0) return kHeadBytes;
  const auto entries = static_cast<std::size_t>(count);
  if (codec == SparseCodec::coo) return kHeadBytes + 8 * entries;
  // The gaps of c entries are at most length - c together, and shifting each of them gives no more than
  // shifting the sum. With length - 1 instead the bound holds for every c up to `count`.
  std::int64_t bits = length;  // with r = 0
  for (int r = 1; r <= kLargestRice; ++r) bits = std::min(bits, count * (r + 1) + ((length - 1) >> r));
  return packed_bytes(codec, entries, bytes_of(bits));
}

std::size_t encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
                   std::span<std::byte> into) {
  check(entries, length);
  const std::size_t count = entries.size();
  const bool packed = codec != SparseCodec::coo && count > 0;
  const RiceChoice rice = packed ? choose_rice(entries.indices) : RiceChoice{};
  const std::size_t total = packed ? packed_bytes(codec, count, bytes_of(rice.bits)) : kHeadBytes + 8 * count;
  if (into.size() < total) {
    throw UsageError("a block of " + std::to_string(total) + " bytes was to be written into " +
                     std::to_string(into.size()));
  }
  const std::uint32_t head = static_cast<std::uint32_t>(count) | (non_finite ? kNonFinite : 0);
  std::memcpy(into.data(), &head, sizeof head);
  if (count == 0) return total;
  std::byte* next = into.data() + kHeadBytes;
  if (packed) {
    *next++ = static_cast<std::byte>(rice.parameter);
    write_rice_codes(entries.indices, rice.parameter, {next, bytes_of(rice.bits)});
    next += bytes_of(rice.bits);
  } else {
    std::memcpy(next, entries.indices.data(), entries.indices.size_bytes());
    next += entries.indices.size_bytes();
  }
  write_values(codec, entries.values, next);
  return total;
}

void encode(SparseCodec codec, EntriesView entries, std::int64_t length, bool non_finite,
            std::vector<std::byte>& into) {
  const std::size_t before = into.size();
  into.resize(before + encoded_bytes(codec, entries, length));
  encode(codec, entries, length, non_finite, std::span(into).subspan(before));
}

Decoded decode(SparseCodec codec, std::span<const std::byte> bytes, const ExpectedBlock& expected,
               Entries& out) {
  Block block(bytes, expected);
  block.require(kHeadBytes, "head");
  std::uint32_t head;
  std::memcpy(&head, block.take(kHeadBytes).data(), sizeof head);
  const bool non_finite = (head & kNonFinite) != 0;
  const std::size_t count = head & ~kNonFinite;
  const std::int64_t most = std::clamp(expected.max_count, std::int64_t{0}, expected.length);
  if (count > static_cast<std::size_t>(most)) {
    block.corrupt(std::to_string(count) + " entries where at most " + std::to_string(most) + " may come");
  }
  if (count == 0) {
    out.clear();
    return {.bytes = block.used(), .non_finite = non_finite};
  }
  if (codec == SparseCodec::coo) {
    block.require(8 * count, "entries");
    out.resize(count);
    read_plain_indices(block, out.indices);
  } else {
    read_packed_indices(block, codec, count, out);
  }
  read_values(block, codec, non_finite, out.values);
  return {.bytes = block.used(), .non_finite = non_finite};
}

void round_to_bfloat16(std::span<float> values, std::span<float> errors) {
  constexpr std::uint32_t kLargest = 0x7f7f'0000u;  // finite
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float before = values[i];
    const float rounded = half::widen(half::narrow_bfloat16(before));
    const bool overflow = std::isinf(rounded) && !std::isinf(before);
    values[i] = overflow ? std::copysign(std::bit_cast<float>(kLargest), before) : rounded;
    errors[i] = before - values[i];
  }
}

}  // namespace weft::wire
