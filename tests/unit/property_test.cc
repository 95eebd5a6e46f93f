// Properties that must hold for any input, with shrinking where rapidcheck is there. (Where it is not, a
// fixed number of drawn inputs is tried by the same functions.)
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "kernels/sparse.h"
#include "patterns/deal.h"
#include "weft/random.h"
#include "wire/codec.h"
#include "wire/frame.h"

#if WEFT_HAVE_RAPIDCHECK
#include <rapidcheck/gtest.h>
#endif

namespace weft {
namespace {

bool frame_survives(std::uint64_t a, std::uint64_t b) {
  wire::Frame f;
  f.kind = static_cast<wire::FrameKind>(1 + a % 6);
  f.dtype = static_cast<DType>(b % 7);
  f.codec = static_cast<std::uint8_t>(a >> 8);
  f.epoch = static_cast<std::uint32_t>(b >> 8);
  f.job = a * 3;
  f.id = {.group = b,
          .slot = static_cast<std::uint32_t>(a),
          .step = static_cast<std::uint32_t>(b),
          .hop = static_cast<std::uint32_t>(a >> 32)};
  f.source = static_cast<int>(b >> 33);
  f.length = a ^ b;
  f.fingerprint = static_cast<std::uint32_t>(a >> 16);
  f.payload_crc = static_cast<std::uint32_t>(b >> 16);
  return wire::parse_frame(wire::encode_frame(f), 0) == f;
}

bool deal_is_a_bijection(std::uint32_t n, std::uint32_t m, bool contiguous) {
  const auto total = static_cast<std::int64_t>(n % 5000);
  const int blocks = 1 + static_cast<int>(m % 70);
  const Deal deal(contiguous ? Deal::Kind::contiguous : Deal::Kind::dealt, blocks, total);
  std::vector<bool> seen(static_cast<std::size_t>(total));
  std::int64_t elements = 0;
  for (int b = 0; b < blocks; ++b) {
    if (deal.first(b) != elements) return false;
    elements += deal.count(b);
    for (std::int64_t local = 0; local < deal.count(b); ++local) {
      const std::int64_t index = deal.global(b, local);
      if (index < 0 || index >= total || seen[static_cast<std::size_t>(index)]) return false;
      seen[static_cast<std::size_t>(index)] = true;
      if (deal.place(index) != Deal::Place{b, local}) return false;
    }
  }
  return elements == total;
}

// Entries from any list of numbers: sorted, each index once.
Entries entries_of(const std::vector<std::uint32_t>& numbers, std::uint32_t length) {
  std::map<std::uint32_t, float> sorted;
  for (const std::uint32_t x : numbers)
    sorted[x % length] = static_cast<float>(static_cast<int>(x % 2001) - 1000) + 0.5F;
  Entries out;
  for (const auto& [index, value] : sorted) out.push_back(index, value);
  return out;
}

bool codec_survives(const std::vector<std::uint32_t>& numbers, std::uint32_t length_seed,
                    wire::SparseCodec codec) {
  const std::uint32_t length = 1 + length_seed % 100'000;
  Entries entries = entries_of(numbers, length);
  if (codec == wire::SparseCodec::packed_bf16) {
    std::vector<float> errors;
    wire::round_to_bfloat16(entries.values, errors);
  }
  std::vector<std::byte> bytes;
  wire::encode(codec, entries, length, false, bytes);
  if (bytes.size() != wire::encoded_bytes(codec, entries, length)) return false;
  Entries back;
  const wire::Decoded decoded = wire::decode(
      codec, bytes, {.length = length, .max_count = static_cast<std::int64_t>(entries.size()), .peer = 0},
      back);
  return decoded.bytes == bytes.size() && back == entries;
}

bool merging_is_adding(const std::vector<std::uint32_t>& x, const std::vector<std::uint32_t>& y) {
  constexpr std::uint32_t kLength = 500;
  const Entries a = entries_of(x, kLength);
  const Entries b = entries_of(y, kLength);
  Entries sum;
  merge_add(a, b, sum);
  std::vector<float> dense(kLength);
  for (std::size_t i = 0; i < a.size(); ++i) dense[a.indices[i]] += a.values[i];
  for (std::size_t i = 0; i < b.size(); ++i) dense[b.indices[i]] += b.values[i];
  for (std::size_t i = 0; i < sum.size(); ++i) {
    if (dense[sum.indices[i]] != sum.values[i]) return false;
    dense[sum.indices[i]] = 0;
  }
  return std::is_sorted(sum.indices.begin(), sum.indices.end()) &&
         std::all_of(dense.begin(), dense.end(), [](float v) { return v == 0; });
}

TEST(Property, ControlTheyCanFail) {
  // What the functions above compare is not always equal: an odd value in the wrong codec comes back another.
  Entries entries;
  entries.push_back(3, 1.000001F);
  std::vector<std::byte> bytes;
  wire::encode(wire::SparseCodec::packed_bf16, entries, 10, false, bytes);
  Entries back;
  wire::decode(wire::SparseCodec::packed_bf16, bytes, {.length = 10, .max_count = 1, .peer = 0}, back);
  EXPECT_NE(back, entries);
}

#if WEFT_HAVE_RAPIDCHECK

RC_GTEST_PROP(Property, FramesSurvive, (std::uint64_t a, std::uint64_t b)) {
  RC_ASSERT(frame_survives(a, b));
}
RC_GTEST_PROP(Property, DealsAreBijections, (std::uint32_t n, std::uint32_t m, bool contiguous)) {
  RC_ASSERT(deal_is_a_bijection(n, m, contiguous));
}
RC_GTEST_PROP(Property, BlocksSurvive, (const std::vector<std::uint32_t>& numbers, std::uint32_t length)) {
  for (const auto codec :
       {wire::SparseCodec::coo, wire::SparseCodec::packed, wire::SparseCodec::packed_bf16}) {
    RC_ASSERT(codec_survives(numbers, length, codec));
  }
}
RC_GTEST_PROP(Property, MergingIsAdding,
              (const std::vector<std::uint32_t>& a, const std::vector<std::uint32_t>& b)) {
  RC_ASSERT(merging_is_adding(a, b));
}

#else

TEST(Property, HoldOnDrawnInputs) {
  Random random(11);
  for (int i = 0; i < 200; ++i) {
    const auto draw = [&] { return std::uint64_t{random()} << 32 | random(); };
    const auto list = [&] {
      std::vector<std::uint32_t> out(random.below(100));
      for (std::uint32_t& x : out) x = random();
      return out;
    };
    ASSERT_TRUE(frame_survives(draw(), draw()));
    ASSERT_TRUE(deal_is_a_bijection(random(), random(), i % 2 == 0));
    ASSERT_TRUE(codec_survives(list(), random(), static_cast<wire::SparseCodec>(i % 3)));
    ASSERT_TRUE(merging_is_adding(list(), list()));
  }
}

#endif

}  // namespace
}  // namespace weft
