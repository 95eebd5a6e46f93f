// The frame: bytes, checks, and that each kind of damage is named.
#include "wire/frame.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "weft/error.h"
#include "weft/random.h"
#include "wire/crc32c.h"

namespace weft::wire {
namespace {

std::span<const std::byte> bytes_of(const std::string& s) { return std::as_bytes(std::span(s)); }

TEST(Crc32c, KnownAnswersAndTwins) {
  EXPECT_EQ(crc32c(bytes_of("123456789")),
            0xe3069283u);  // the check value of the polynomial's catalogue entry
  EXPECT_EQ(crc32c({}), 0u);
  std::vector<std::byte> data(20'000);
  Random random(1);
  for (std::byte& b : data) b = static_cast<std::byte>(random());
  for (const std::size_t length :
       {0ul, 1ul, 7ul, 8ul, 9ul, 63ul, 1023ul, 3071ul, 3072ul, 3073ul, 6144ul, 9999ul, 20'000ul}) {
    for (const std::size_t offset : {0ul, 1ul, 3ul}) {
      if (offset > length) continue;
      const auto part = std::span(data).subspan(offset, length - offset);
      EXPECT_EQ(crc32c(part), crc32c_table(part)) << length << " from " << offset;
      const auto head = part.first(part.size() / 3);
      EXPECT_EQ(crc32c(part.subspan(head.size()), crc32c(head)), crc32c(part)) << "in two pieces";
    }
  }
}

Frame example() {
  return {.kind = FrameKind::data,
          .dtype = DType::bfloat16,
          .codec = 3,
          .epoch = 7,
          .job = 0x1122334455667788u,
          .id = {.group = 0xa0a1a2a3a4a5a6a7u, .slot = 12, .step = 13, .hop = 14},
          .source = 5,
          .length = 1u << 20,
          .fingerprint = 0xdeadbeefu,
          .payload_crc = 99};
}

std::string refusal(const FrameBytes& bytes) {
  try {
    parse_frame(bytes, 5);
  } catch (const TransportError& e) {
    EXPECT_EQ(e.kind(), TransportError::Kind::corrupt);
    EXPECT_EQ(e.peer(), 5);
    return e.what();
  }
  return "accepted";
}

TEST(Frame, RoundTripAndLayout) {
  const FrameBytes bytes = encode_frame(example());
  EXPECT_EQ(parse_frame(bytes, 5), example());
  EXPECT_EQ(std::memcmp(bytes.data(), "WEFT", 4), 0);  // docs/wire_format.md
  EXPECT_EQ(bytes[4], std::byte{kVersion});
  EXPECT_EQ(bytes[5], std::byte{1});
  EXPECT_EQ(bytes[8], std::byte{7});      // epoch
  EXPECT_EQ(bytes[12], std::byte{5});     // source
  EXPECT_EQ(bytes[16], std::byte{0x88});  // job
  EXPECT_EQ(bytes[24], std::byte{0xa7});  // group
  EXPECT_EQ(bytes[32], std::byte{12});
  EXPECT_EQ(bytes[36], std::byte{13});
  EXPECT_EQ(bytes[40], std::byte{14});
  EXPECT_EQ(bytes[44], std::byte{0xef});  // fingerprint
  EXPECT_EQ(bytes[50], std::byte{0x10});  // length
  EXPECT_EQ(bytes[56], std::byte{99});    // payload checksum
}

TEST(Frame, EverySingleBitFlipIsNoticed) {
  for (std::size_t bit = 0; bit < kFrameBytes * 8; ++bit) {
    FrameBytes bytes = encode_frame(example());
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    EXPECT_NE(refusal(bytes), "accepted") << "bit " << bit;
  }
}

TEST(Frame, RefusalsNameWhatIsWrong) {
  FrameBytes bytes = encode_frame(example());
  bytes[0] = std::byte{0};
  EXPECT_NE(refusal(bytes).find("magic"), std::string::npos);
  bytes = encode_frame(example());
  bytes[4] = std::byte{9};
  EXPECT_NE(refusal(bytes).find("version is 9, expected 1"), std::string::npos);
  bytes = encode_frame(example());
  bytes[20] ^= std::byte{1};
  EXPECT_NE(refusal(bytes).find("header checksum"), std::string::npos);
  Frame strange = example();
  strange.kind = static_cast<FrameKind>(77);
  EXPECT_NE(refusal(encode_frame(strange)).find("unknown kind 77"), std::string::npos);
  strange = example();
  strange.dtype = static_cast<DType>(42);
  EXPECT_NE(refusal(encode_frame(strange)).find("unknown dtype 42"), std::string::npos);
}

std::string complaint(const std::function<void()>& f) {
  try {
    f();
  } catch (const TransportError& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Frame, JobEpochSourceAndLengthAreChecked) {
  const Expected good{.job = 0x1122334455667788u, .epoch = 7, .source = 5, .max_length = 1u << 20};
  EXPECT_EQ(complaint([&] { check_frame(example(), good); }), "accepted");
  const auto with = [&](auto change) {
    Expected e = good;
    change(e);
    return complaint([&] { check_frame(example(), e); });
  };
  EXPECT_NE(with([](Expected& e) { e.job = 1; }).find("job"), std::string::npos);
  EXPECT_NE(with([](Expected& e) { e.epoch = 8; }).find("epoch is 7, expected 8"), std::string::npos);
  EXPECT_NE(with([](Expected& e) { e.source = 4; }).find("source is 5, expected 4"), std::string::npos);
  EXPECT_NE(with([](Expected& e) { e.max_length = (1u << 20) - 1; }).find("length"), std::string::npos);
}

TEST(Frame, MismatchesSayWhatDiffers) {
  const Frame f = example();
  const ExpectedMessage good{.id = f.id,
                             .dtype = f.dtype,
                             .codec = 3,
                             .fingerprint = f.fingerprint,
                             .exact_length = true,
                             .length = f.length};
  EXPECT_EQ(complaint([&] { check_message(f, good, 0); }), "accepted");
  const auto with = [&](auto change) {
    ExpectedMessage e = good;
    change(e);
    return complaint([&] { check_message(f, e, 0); });
  };
  EXPECT_NE(with([](ExpectedMessage& e) { e.id.hop = 9; }).find("identity"), std::string::npos);
  EXPECT_NE(with([](ExpectedMessage& e) { e.dtype = DType::float32; }).find("float32 here, bfloat16 there"),
            std::string::npos);
  EXPECT_NE(with([](ExpectedMessage& e) { e.codec = 1; }).find("codec"), std::string::npos);
  EXPECT_NE(with([](ExpectedMessage& e) { e.length = 5; }).find("5 bytes here, 1048576 there"),
            std::string::npos);
  EXPECT_EQ(with([](ExpectedMessage& e) {
              e.exact_length = false;
              e.length = 2u << 20;
            }),
            "accepted");

  Fingerprint mine{.family = 1, .algorithm = 2, .dtype = 1, .reduction = 0, .count = count_hash(1000)};
  EXPECT_EQ(pack(unpack_fingerprint(pack(mine))), pack(mine));
  const auto against = [&](auto change) {
    Fingerprint theirs = mine;
    change(theirs);
    Frame frame = f;
    frame.fingerprint = pack(theirs);
    ExpectedMessage e = good;
    e.fingerprint = pack(mine);
    return complaint([&] { check_message(frame, e, 0); });
  };
  EXPECT_NE(against([](Fingerprint& t) { t.reduction = 2; }).find("sum here, max there"), std::string::npos);
  EXPECT_NE(against([](Fingerprint& t) { t.dtype = 2; }).find("float32 here, float64 there"),
            std::string::npos);
  EXPECT_NE(against([](Fingerprint& t) { t.count = count_hash(1001); }).find("number of elements"),
            std::string::npos);
  EXPECT_NE(against([](Fingerprint& t) { t.algorithm = 3; }).find("algorithm"), std::string::npos);
  EXPECT_NE(against([](Fingerprint& t) { t.family = 3; }).find("family"), std::string::npos);
}

TEST(Frame, PayloadChecksum) {
  std::string payload = "the bytes that matter";
  Frame f = example();
  f.payload_crc = crc32c(bytes_of(payload));
  EXPECT_EQ(complaint([&] { check_payload(f, bytes_of(payload)); }), "accepted");
  payload[3] ^= 1;
  EXPECT_NE(complaint([&] { check_payload(f, bytes_of(payload)); }).find("payload checksum"),
            std::string::npos);
}

}  // namespace
}  // namespace weft::wire
