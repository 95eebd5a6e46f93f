// The handshake as bytes: what is said is understood, and nothing that was not said under the secret is
// believed.
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "transports/tcp_handshake.h"

namespace weft::tcp {
namespace {

const std::string kToken = "0123456789abcdef0123456789abcdef";

Hello some_hello() {
  return {.role = Role::mesh,
          .job = job_hash("job"),
          .epoch = 3,
          .from = 5,
          .to = 2,
          .size = 8,
          .settings = {.eager_limit = 1,
                       .credit = 2,
                       .max_message = 3,
                       .checksum = true,
                       .heartbeat = 4,
                       .dead_after = 5},
          .nonce = random_nonce()};
}

struct Talk {
  Hello hello = some_hello();
  HelloBytes said = encode(hello);
  ChallengeBytes challenge = encode(Challenge{.nonce = random_nonce()});
  ProofBytes proof = make_proof(kToken, said, challenge, Place{.port = 77});
  VerdictBytes verdict = make_verdict(kToken, said, challenge, proof, Refusal::none);
};

TEST(Handshake, SaysWhatWasMeant) {
  const Talk talk;
  EXPECT_EQ(parse_hello(talk.said), talk.hello);
  const auto place = check_proof(kToken, talk.said, talk.challenge, talk.proof);
  ASSERT_TRUE(place);
  EXPECT_EQ(place->port, 77);
  EXPECT_EQ(check_verdict(kToken, talk.said, talk.challenge, talk.proof, talk.verdict), Refusal::none);
  for (const Refusal refusal : {Refusal::taken, Refusal::rank, Refusal::settings}) {
    const VerdictBytes verdict = make_verdict(kToken, talk.said, talk.challenge, talk.proof, refusal);
    EXPECT_EQ(check_verdict(kToken, talk.said, talk.challenge, talk.proof, verdict), refusal);
  }
}

// One bit anywhere in what the MACs cover, and neither side believes the other.
TEST(Handshake, EveryBitCounts) {
  const Talk talk;
  const auto flip = [](auto bytes, std::size_t bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1u << bit % 8);
    return bytes;
  };
  for (std::size_t bit = 0; bit < 8 * sizeof(HelloBytes); ++bit) {
    const HelloBytes other = flip(talk.said, bit);
    EXPECT_FALSE(check_proof(kToken, other, talk.challenge, talk.proof)) << bit;
    EXPECT_NE(check_verdict(kToken, other, talk.challenge, talk.proof, talk.verdict), Refusal::none);
  }
  for (std::size_t bit = 0; bit < 8 * sizeof(ChallengeBytes); ++bit) {
    const ChallengeBytes other = flip(talk.challenge, bit);
    EXPECT_FALSE(check_proof(kToken, talk.said, other, talk.proof)) << bit;
    EXPECT_NE(check_verdict(kToken, talk.said, other, talk.proof, talk.verdict), Refusal::none);
  }
  for (std::size_t bit = 0; bit < 8 * sizeof(ProofBytes); ++bit) {
    EXPECT_FALSE(check_proof(kToken, talk.said, talk.challenge, flip(talk.proof, bit))) << bit;
  }
  for (std::size_t bit = 0; bit < 8 * sizeof(VerdictBytes); ++bit) {
    EXPECT_NE(check_verdict(kToken, talk.said, talk.challenge, talk.proof, flip(talk.verdict, bit)),
              Refusal::none)
        << bit;
  }
}

TEST(Handshake, AnotherTokenIsNotBelieved) {
  const Talk talk;
  for (const std::string& token : {std::string(32, 'x'), kToken + "0", kToken.substr(1), std::string()}) {
    EXPECT_FALSE(check_proof(token, talk.said, talk.challenge, talk.proof));
    EXPECT_EQ(check_verdict(token, talk.said, talk.challenge, talk.proof, talk.verdict), Refusal::token);
  }
}

// A connector's MAC is no acceptor's MAC: the labels differ even where all the rest is equal.
TEST(Handshake, DirectionsDiffer) {
  const Talk talk;
  VerdictBytes mirrored = talk.verdict;
  std::copy(talk.proof.begin() + 32, talk.proof.end(), mirrored.begin() + 16);
  EXPECT_EQ(check_verdict(kToken, talk.said, talk.challenge, talk.proof, mirrored), Refusal::token);
  EXPECT_FALSE(parse_challenge([&] {  // an echo of the hello is no challenge
    ChallengeBytes echo{};
    std::copy_n(talk.said.begin(), echo.size(), echo.begin());
    return echo;
  }()));
}

// S2 in small: random and near-right handshakes, none accepted; `accepted` counts the control's true ones.
TEST(Handshake, ForgeriesAreRefused) {
  std::mt19937_64 random(1);
  int accepted = 0;
  int forged = 0;
  for (int i = 0; i < 20'000; ++i) {
    Talk talk;
    const bool honest = i % 100 == 0;
    if (!honest) {
      switch (random() % 4) {
        case 0:
          std::generate(talk.proof.begin(), talk.proof.end(),
                        [&] { return static_cast<std::byte>(random()); });
          break;
        case 1:
          talk.challenge = encode(Challenge{.nonce = random_nonce()});
          break;  // replayed to another challenge
        case 2:   // of an older epoch
          talk.hello.epoch -= 1;
          talk.said = encode(talk.hello);
          break;
        case 3:  // as another rank
          talk.hello.from += 1;
          talk.said = encode(talk.hello);
          break;
      }
    }
    const bool taken = check_proof(kToken, talk.said, talk.challenge, talk.proof).has_value();
    (honest ? accepted : forged) += taken ? 1 : 0;
  }
  EXPECT_EQ(forged, 0);
  EXPECT_EQ(accepted, 200);
}

TEST(Handshake, HelloIsCheckedFieldByField) {
  Hello mine = some_hello();
  EXPECT_EQ(check_hello(some_hello(), mine), Refusal::none);
  const auto with = [&](auto change) {
    Hello other = some_hello();
    change(other);
    return check_hello(other, mine);
  };
  EXPECT_EQ(with([](Hello& h) { h.version = kHandshakeVersion + 1; }), Refusal::version);
  EXPECT_EQ(with([](Hello& h) { h.job += 1; }), Refusal::job);
  EXPECT_EQ(with([](Hello& h) { h.epoch += 1; }), Refusal::epoch);
  EXPECT_EQ(with([](Hello& h) { h.size += 1; }), Refusal::size);
  EXPECT_EQ(with([](Hello& h) { h.to = 3; }), Refusal::rank);
  EXPECT_EQ(with([](Hello& h) { h.from = 8; }), Refusal::rank);
  EXPECT_EQ(with([](Hello& h) { h.from = -1; }), Refusal::rank);
  EXPECT_EQ(with([](Hello& h) { h.from = 2; }), Refusal::rank);  // oneself
  EXPECT_EQ(with([](Hello& h) { h.from = 1; }), Refusal::rank);  // the higher rank calls the lower
  EXPECT_EQ(with([](Hello& h) { h.role = Role::rendezvous; }), Refusal::rank);
  EXPECT_EQ(with([](Hello& h) { h.settings.checksum = false; }), Refusal::settings);
  EXPECT_EQ(with([](Hello& h) { h.settings.credit += 1; }), Refusal::settings);
  EXPECT_EQ(with([](Hello& h) { h.settings.heartbeat += 1; }), Refusal::settings);
  EXPECT_EQ(with([](Hello& h) { h.settings.dead_after += 1; }), Refusal::settings);
}

TEST(Handshake, NoticesAreBounded) {
  const auto parse = [](NoticeKind kind, std::size_t length, int size) {
    const std::vector<std::byte> bytes = encode_notice(kind, std::vector<std::byte>(length));
    return parse_notice(std::span<const std::byte, kNoticeBytes>(bytes.data(), kNoticeBytes), size)
        .has_value();
  };
  EXPECT_TRUE(parse(NoticeKind::table, 4 * kPlaceBytes, 4));
  EXPECT_FALSE(parse(NoticeKind::table, 4 * kPlaceBytes, 5));
  EXPECT_TRUE(parse(NoticeKind::ready, 0, 4));
  EXPECT_FALSE(parse(NoticeKind::ready, 1, 4));
  EXPECT_TRUE(parse(NoticeKind::abort, kAbortText, 4));
  EXPECT_FALSE(parse(NoticeKind::abort, kAbortText + 1, 4));
  EXPECT_FALSE(parse(static_cast<NoticeKind>(9), 0, 4));
  std::vector<Place> places(3);
  places[1].port = 0x1234;
  places[2].address[15] = std::byte{1};
  EXPECT_EQ(parse_table(encode_table(places)), places);
  EXPECT_EQ(printable(std::as_bytes(std::span(std::string_view("a\x1b[2Jb\n\xff")))), "a?[2Jb??");
}

TEST(Handshake, NoncesDiffer) {
  std::set<Nonce> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random_nonce());
  EXPECT_EQ(seen.size(), 1000u);
  EXPECT_NE(job_hash("a"), job_hash("b"));
}

}  // namespace
}  // namespace weft::tcp
