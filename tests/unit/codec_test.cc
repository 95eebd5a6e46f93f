// Codecs of sparse blocks: what is written comes back, in exactly the bytes that were announced; what was not
// written so is refused.
#include "wire/codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/select.h"
#include "reference/data.h"
#include "weft/error.h"
#include "wire/rice.h"
#include "workload/distributions.h"

namespace weft::wire {
namespace {

constexpr SparseCodec kCodecs[] = {SparseCodec::coo, SparseCodec::packed, SparseCodec::packed_bf16};
constexpr SparseCodec kPacked[] = {SparseCodec::packed, SparseCodec::packed_bf16};

float value_of(std::uint64_t seed, std::uint32_t index) {  // one that bfloat16 holds
  return std::ldexp(static_cast<float>(reference::hash(seed, 2, index) % 255) - 127.0f,
                    static_cast<int>(index % 60) - 30);
}
Entries with_values(std::vector<std::uint32_t> indices, std::uint64_t seed = 1) {
  Entries entries;
  for (const std::uint32_t index : indices) entries.push_back(index, value_of(seed, index));
  return entries;
}
// About `count` of `length` indices at random, by jumps of hashed length.
Entries scattered(std::int64_t length, std::int64_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> indices;
  const auto step =
      static_cast<std::uint64_t>(std::max<std::int64_t>(1, 2 * length / std::max<std::int64_t>(count, 1)));
  for (std::uint64_t at = reference::hash(seed, 3, 0) % step; at < static_cast<std::uint64_t>(length);) {
    indices.push_back(static_cast<std::uint32_t>(at));
    at += 1 + reference::hash(seed, 3, at) % step;
  }
  return with_values(std::move(indices), seed);
}
std::vector<std::uint32_t> range(std::uint32_t first, std::uint32_t last) {
  std::vector<std::uint32_t> indices;
  for (std::uint32_t i = first; i < last; ++i) indices.push_back(i);
  return indices;
}

std::vector<std::byte> encoded(SparseCodec codec, const Entries& entries, std::int64_t length,
                               bool non_finite = false) {
  std::vector<std::byte> bytes;
  encode(codec, entries, length, non_finite, bytes);
  return bytes;
}
Decoded decoded(SparseCodec codec, std::span<const std::byte> bytes, std::int64_t length, Entries& out) {
  return decode(codec, bytes, {.length = length, .max_count = length, .peer = 3}, out);
}

void check_round_trip(SparseCodec codec, const Entries& entries, std::int64_t length) {
  for (const bool non_finite : {false, true}) {
    std::vector<std::byte> bytes(3, std::byte{9});  // appended to, and something follows
    encode(codec, entries, length, non_finite, bytes);
    const std::size_t size = bytes.size() - 3;
    EXPECT_EQ(size, encoded_bytes(codec, entries, length));
    EXPECT_LE(size, max_encoded_bytes(codec, static_cast<std::int64_t>(entries.size()), length));
    EXPECT_LE(size, max_encoded_bytes(codec, static_cast<std::int64_t>(entries.size()) + 9, length));
    bytes.resize(bytes.size() + 11, std::byte{0xff});
    Entries out = with_values({1, 2, 3});
    const auto expected = static_cast<std::int64_t>(entries.size());
    const Decoded result =
        decode(codec, std::span(bytes).subspan(3), {.length = length, .max_count = expected}, out);
    EXPECT_EQ(result.bytes, size);
    EXPECT_EQ(result.non_finite, non_finite);
    EXPECT_EQ(out, entries);
  }
}

TEST(SparseCodec, WhatIsWrittenComesBack) {
  for (const SparseCodec codec : kCodecs) {
    for (const std::int64_t length :
         {0ll, 1ll, 7ll, 8ll, 64ll, 65ll, 1000ll, 65'537ll, 1ll << 20, (1ll << 24) + 3, 1ll << 32}) {
      const auto last = static_cast<std::uint32_t>(length - 1);
      SCOPED_TRACE(std::string(name_of(codec)) + " length " + std::to_string(length));
      check_round_trip(codec, {}, length);
      if (length == 0) continue;
      check_round_trip(codec, with_values({0}), length);
      check_round_trip(codec, with_values({last}), length);
      for (const std::int64_t count : {3, 100, 20'000}) {
        if (count < length) check_round_trip(codec, scattered(length, count, 4), length);
      }
      if (length < 5) continue;
      check_round_trip(codec, with_values({0, last}), length);
      check_round_trip(codec, with_values({0, 1, 2, last - 1, last}), length);
      if (length > 70'000) continue;
      check_round_trip(codec, with_values(range(0, last + 1)), length);
      check_round_trip(codec, with_values(range(last / 2, last)), length);
    }
  }
}

TEST(SparseCodec, CooIsThePapersFormat) {
  Entries entries;
  entries.push_back(2, 1.0f);
  entries.push_back(0x01020304u, -2.0f);
  const std::vector<std::byte> bytes = encoded(SparseCodec::coo, entries, 1ll << 31, true);
  const std::uint8_t expected[] = {2, 0, 0, 0x80, 2, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0};
  ASSERT_EQ(bytes.size(), sizeof expected);
  EXPECT_EQ(std::memcmp(bytes.data(), expected, sizeof expected), 0);
}

TEST(SparseCodec, PackedIsWhatTheHeaderSays) {
  // Gaps 5, 0, 6 take 14 bits with r = 0, and 11 with 1 or 2: 0011 10 00010, from the lowest bit of the first
  // byte on.
  Entries entries;
  for (const std::uint32_t index : {5u, 6u, 13u}) entries.push_back(index, 1.0f);
  const std::vector<std::byte> bytes = encoded(SparseCodec::packed_bf16, entries, 1000);
  const std::uint8_t expected[] = {3,    0,    0,    0,    1,    0b0001'1100, 0b0000'0010,
                                   0x80, 0x3f, 0x80, 0x3f, 0x80, 0x3f};
  ASSERT_EQ(bytes.size(), sizeof expected);
  EXPECT_EQ(std::memcmp(bytes.data(), expected, sizeof expected), 0);
  // Every second element: a bitmap.
  const std::vector<std::byte> map = encoded(SparseCodec::packed, with_values({0, 2, 4, 6, 8}), 10);
  EXPECT_EQ(map[4], std::byte{0});
  EXPECT_EQ(map[5], std::byte{0b0101'0101});
  EXPECT_EQ(map[6], std::byte{0b0000'0001});
}

TEST(SparseCodec, TheRiceParameterIsTheBest) {
  for (const std::int64_t length : {10ll, 1000ll, 1ll << 20, 1ll << 32}) {
    for (const std::int64_t count : {1, 2, 5, 300}) {
      for (std::uint64_t seed = 0; seed < 20; ++seed) {
        std::vector<std::uint32_t> indices = scattered(length, count, seed).indices;
        if (seed % 3 == 1) indices.push_back(static_cast<std::uint32_t>(length + 40'000));  // an outlier
        if (seed % 3 == 2)
          indices =
              range(static_cast<std::uint32_t>(length / 2), static_cast<std::uint32_t>(length / 2 + count));
        if (indices.empty()) continue;
        if (!std::is_sorted(indices.begin(), indices.end())) continue;  // the outlier fell over 2^32
        RiceChoice best{-1, std::numeric_limits<std::int64_t>::max()};
        for (int r = 0; r < 32; ++r) {
          std::int64_t bits = 0;
          std::uint64_t next = 0;
          for (const std::uint32_t index : indices) {
            bits += static_cast<std::int64_t>((index - next) >> r) + 1 + r;
            next = std::uint64_t{index} + 1;
          }
          if (bits < best.bits) best = {r, bits};
        }
        const RiceChoice choice = choose_rice(indices);
        EXPECT_EQ(choice.parameter, best.parameter);
        EXPECT_EQ(choice.bits, best.bits);
      }
    }
  }
}

// The share of coo's bytes at 1 % of a gaussian vector in dealt blocks (`bench_select` has it at 25 M
// elements).
TEST(SparseCodec, PackedTakesTheShareThatIsPromised) {
  const std::int64_t n = 2'000'000;
  const Deal deal(Deal::Kind::dealt, 8, n);
  std::vector<float> gradient(static_cast<std::size_t>(n));
  std::vector<float> staged(gradient.size());
  draw({.distribution = Distribution::gaussian, .seed = 8}, gradient);
  std::vector<std::int64_t> quotas;
  for (int b = 0; b < 8; ++b) quotas.push_back(deal.quota(b, n / 100));
  Candidates candidates;
  std::vector<Entries> out(8);
  select_topk({gradient, {}, staged}, deal, quotas, candidates, out);
  double bytes[3] = {};
  for (int b = 0; b < 8; ++b) {
    for (int c = 0; c < 3; ++c) {
      bytes[c] +=
          static_cast<double>(encoded_bytes(kCodecs[c], out[static_cast<std::size_t>(b)], deal.count(b)));
    }
  }
  EXPECT_EQ(bytes[0], 8.0 * static_cast<double>(n / 100) + 32);
  EXPECT_LT(bytes[1] / bytes[0], 0.65);
  EXPECT_LT(bytes[2] / bytes[0], 0.42);
}

TEST(SparseCodec, LongBlocksKeepTheirIndices) {
  Entries entries = scattered(1ll << 31, 3000, 5);
  Entries as_floats;
  for (std::size_t i = 0; i < entries.size(); ++i) {
    as_floats.push_back(static_cast<std::uint32_t>(static_cast<float>(entries.indices[i])),
                        entries.values[i]);
  }
  EXPECT_NE(as_floats, entries) << "control: float indices would not come back";
  EXPECT_GT(entries.indices.back(), 1u << 24);
  for (const SparseCodec codec : kCodecs) check_round_trip(codec, entries, 1ll << 31);
}

// ---- what is refused ----

std::string refusal(SparseCodec codec, std::span<const std::byte> bytes, std::int64_t length,
                    std::int64_t max_count = 1 << 30) {
  Entries out;
  try {
    decode(codec, bytes, {.length = length, .max_count = max_count, .peer = 3}, out);
  } catch (const TransportError& e) {
    EXPECT_EQ(e.kind(), TransportError::Kind::corrupt);
    EXPECT_EQ(e.peer(), 3);
    EXPECT_NE(std::string(e.what()).find("rank 3"), std::string::npos);
    return e.what();
  }
  return "";
}
void expect_refused(const std::string& said, const std::string& what) {
  EXPECT_NE(said.find(what), std::string::npos) << "said: '" << said << "'";
}
void put_u32(std::vector<std::byte>& bytes, std::size_t at, std::uint32_t value) {
  std::memcpy(bytes.data() + at, &value, 4);
}

TEST(SparseCodec, EveryPrefixIsRefused) {
  for (const SparseCodec codec : kCodecs) {
    for (const Entries& entries : {scattered(1000, 50, 6), with_values(range(3, 90))}) {
      const std::vector<std::byte> bytes = encoded(codec, entries, 1000);
      for (std::size_t n = 0; n < bytes.size(); ++n)
        expect_refused(refusal(codec, std::span(bytes).first(n), 1000), "it ends inside its");
    }
  }
}

TEST(SparseCodec, CountsAndIndicesAreChecked) {
  const std::vector<std::byte> good = encoded(SparseCodec::coo, with_values({1, 5, 9}), 10);
  EXPECT_EQ(refusal(SparseCodec::coo, good, 10, 3), "");
  expect_refused(refusal(SparseCodec::coo, good, 10, 2), "3 entries where at most 2");
  expect_refused(refusal(SparseCodec::coo, good, 2), "3 entries where at most 2");
  expect_refused(refusal(SparseCodec::coo, good, 9), "index 9 is outside its 9 elements");
  std::vector<std::byte> bytes(good);
  put_u32(bytes, 8, 1);
  expect_refused(refusal(SparseCodec::coo, bytes, 10), "do not increase");
  for (const SparseCodec codec : kPacked) {
    const std::vector<std::byte> packed = encoded(codec, with_values({100, 900}), 1000);
    expect_refused(refusal(codec, packed, 1000, 1), "2 entries where at most 1");
    expect_refused(refusal(codec, packed, 900), "outside the block");
  }
}

TEST(SparseCodec, OnlyTheRightCodingIsAccepted) {
  const Entries entries = scattered(1000, 30, 7);
  const std::vector<std::byte> good = encoded(SparseCodec::packed_bf16, entries, 1000);
  const int right = static_cast<int>(good[4]);
  for (int r = std::max(0, right - 2); r <= right + 2; ++r) {
    std::int64_t bits = 0;
    std::uint32_t next = 0;
    for (const std::uint32_t index : entries.indices) {
      bits += ((index - next) >> r) + 1 + r;
      next = index + 1;
    }
    std::vector<std::byte> bytes(5 + static_cast<std::size_t>((bits + 7) / 8) + 2 * entries.size());
    put_u32(bytes, 0, static_cast<std::uint32_t>(entries.size()));
    bytes[4] = static_cast<std::byte>(r);
    write_rice_codes(entries.indices, r,
                     std::span(bytes).subspan(5, static_cast<std::size_t>((bits + 7) / 8)));
    if (r == right)
      EXPECT_EQ(refusal(SparseCodec::packed_bf16, bytes, 1000), "");
    else
      expect_refused(refusal(SparseCodec::packed_bf16, bytes, 1000),
                     "the smallest is " + std::to_string(right));
  }
  for (const int code : {32, 127, 129, 255}) {
    std::vector<std::byte> bytes(good);
    bytes[4] = static_cast<std::byte>(code);
    expect_refused(refusal(SparseCodec::packed_bf16, bytes, 1000), "unknown coding");
  }
}

TEST(SparseCodec, FillingIsZero) {
  std::vector<std::byte> rice = encoded(SparseCodec::packed, with_values({5, 6, 13}), 1000);
  rice[6] |= std::byte{0x80};
  expect_refused(refusal(SparseCodec::packed, rice, 1000), "filled up");
}

TEST(SparseCodec, ValuesAreFiniteUnlessSomebodySaidSo) {
  for (const SparseCodec codec : kCodecs) {
    for (const float bad : {INFINITY, -INFINITY, std::nanf("")}) {
      Entries entries = with_values({1, 50});
      entries.values[1] = bad;
      expect_refused(refusal(codec, encoded(codec, entries, 100, false), 100), "not finite");
      EXPECT_EQ(refusal(codec, encoded(codec, entries, 100, true), 100), "");
    }
  }
}

TEST(SparseCodec, NoMemoryForEntriesThatAreNotThere) {
  for (const SparseCodec codec : kCodecs) {
    std::vector<std::byte> bytes(100);
    put_u32(bytes, 0, 0x7fff'ffffu);
    Entries out;
    EXPECT_THROW(decoded(codec, bytes, 1ll << 32, out), TransportError);
    EXPECT_EQ(out.indices.capacity() + out.values.capacity(), 0u);
  }
}

TEST(SparseCodec, RefusesRoomThatIsTooShortAndUnknownNames) {
  std::vector<std::byte> room(11);
  EXPECT_THROW(encode(SparseCodec::coo, with_values({1}), 10, false, std::span(room)), UsageError);
  room.resize(100);
  EXPECT_THROW(encode(SparseCodec::coo, with_values({1, 10}), 10, false, std::span(room)), UsageError);
  EXPECT_THROW(encoded_bytes(SparseCodec::packed, with_values({1, 10}), 10), UsageError);
  for (const SparseCodec codec : kCodecs) EXPECT_EQ(sparse_codec_of(name_of(codec)), codec);
  EXPECT_THROW(sparse_codec_of("zip"), UsageError);
}

// ---- bfloat16 ----

TEST(RoundToBfloat16, NothingIsLostAndNothingBecomesInfinite) {
  std::vector<float> before = {
      0.0f,       -0.0f, 1.0f, 1.00390625f, -3.14159265f, 0x1p-149f, -0x1.fffffep127f, 0x1.fffffep127f,
      0x1.ffp127f};
  for (std::uint32_t i = 0; i < 10'000; ++i) {
    const float x = std::bit_cast<float>(static_cast<std::uint32_t>(reference::hash(1, 4, i)));
    if (std::isfinite(x)) before.push_back(x);
  }
  std::vector<float> after(before);
  std::vector<float> errors;
  round_to_bfloat16(after, errors);
  ASSERT_EQ(errors.size(), before.size());
  bool any_error = false;
  for (std::size_t i = 0; i < before.size(); ++i) {
    ASSERT_EQ(static_cast<double>(before[i]), static_cast<double>(after[i]) + static_cast<double>(errors[i]));
    ASSERT_TRUE(std::isfinite(after[i]));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(after[i]) & 0xffffu, 0u);
    any_error |= errors[i] != 0.0f;
  }
  EXPECT_TRUE(any_error);
  EXPECT_EQ(after[3], 1.0f) << "nearest even";
  std::vector<float> again(after);
  round_to_bfloat16(again, errors);
  EXPECT_TRUE(reference::same_bits(again, after));
  // What was rounded travels unchanged.
  Entries entries;
  for (std::size_t i = 0; i < after.size(); ++i)
    entries.push_back(static_cast<std::uint32_t>(i * 7), after[i]);
  check_round_trip(SparseCodec::packed_bf16, entries, 1 << 20);
}

}  // namespace
}  // namespace weft::wire
