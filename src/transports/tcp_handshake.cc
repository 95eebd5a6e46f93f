#include "transports/tcp_handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "transports/tcp.h"
#include "weft/error.h"
#include "wire/crc32c.h"

namespace weft::tcp {

namespace {

// Each message has its own, so that an echo of one is never taken for another.
constexpr std::uint32_t kHelloMagic = 0x31485457u;      // "WTH1"
constexpr std::uint32_t kChallengeMagic = 0x31435457u;  // "WTC1"
constexpr std::uint32_t kVerdictMagic = 0x31565457u;    // "WTV1"
constexpr std::uint32_t kNoticeMagic = 0x314e5457u;     // "WTN1"
constexpr std::string_view kConnector = "weft tcp connector";
constexpr std::string_view kAcceptor = "weft tcp acceptor ";

// Byte offsets of Hello; of Challenge and Verdict: magic, version, refusal, then nonce or MAC at 16.
constexpr std::size_t kAtVersion = 4;
constexpr std::size_t kAtRole = 5;
constexpr std::size_t kAtRefusal = 5;
constexpr std::size_t kAtJob = 8;
constexpr std::size_t kAtEpoch = 16;
constexpr std::size_t kAtFrom = 20;
constexpr std::size_t kAtTo = 24;
constexpr std::size_t kAtSize = 28;
constexpr std::size_t kAtEagerLimit = 32;
constexpr std::size_t kAtCredit = 40;
constexpr std::size_t kAtMaxMessage = 48;
constexpr std::size_t kAtChecksum = 56;
constexpr std::size_t kAtHeartbeat = 58;
constexpr std::size_t kAtDeadAfter = 60;
constexpr std::size_t kAtHelloNonce = 64;
constexpr std::size_t kAtAnswer = 16;
// Of Proof.
constexpr std::size_t kAtAddress = 0;
constexpr std::size_t kAtPort = 16;
constexpr std::size_t kAtProofMac = 32;

template <class T, std::size_t N>
void put(std::array<std::byte, N>& bytes, std::size_t at, const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  std::memcpy(bytes.data() + at, &value, sizeof value);
}
template <class T>
T get(std::span<const std::byte> bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

bool known(std::uint8_t refusal) { return refusal <= static_cast<std::uint8_t>(Refusal::settings); }

// HMAC over label, hello, challenge and `rest`. One buffer: all parts have fixed lengths, so it has one
// reading only.
Mac mac_of(std::string_view token, std::string_view label, const HelloBytes& hello,
           const ChallengeBytes& challenge, std::span<const std::byte> rest) {
  std::array<std::byte, kConnector.size() + sizeof(HelloBytes) + sizeof(ChallengeBytes) + 128> said{};
  static_assert(kConnector.size() == kAcceptor.size());
  auto end = std::transform(label.begin(), label.end(), said.begin(), [](char c) { return std::byte(c); });
  end = std::copy(hello.begin(), hello.end(), end);
  end = std::copy(challenge.begin(), challenge.end(), end);
  end = std::copy(rest.begin(), rest.end(), end);
  Mac mac{};
  unsigned length = 0;
  const auto* key = token.data();
  if (HMAC(EVP_sha256(), key, static_cast<int>(token.size()),
           reinterpret_cast<const unsigned char*>(said.data()), static_cast<std::size_t>(end - said.begin()),
           reinterpret_cast<unsigned char*>(mac.data()), &length) == nullptr ||
      length != kMacBytes) {
    throw TransportError(TransportError::Kind::refused, -1, "libcrypto could not compute an HMAC-SHA256");
  }
  return mac;
}

bool same(const Mac& a, std::span<const std::byte> b) {
  return b.size() == a.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace

std::string_view text_of(Refusal refusal) {
  switch (refusal) {
    case Refusal::none:
      return "welcome";
    case Refusal::token:
      return "the token differs (give all ranks of a job the same WEFT_TOKEN, and a port of its own)";
    case Refusal::version:
      return "the versions of weft differ (install the same on all hosts)";
    case Refusal::job:
      return "it belongs to another job (give each job a port of its own: WEFT_PORT; what tells jobs apart "
             "is "
             "WEFT_JOB, or else the launcher's id of the job, the same on all ranks)";
    case Refusal::epoch:
      return "it is in another epoch of the job";
    case Refusal::size:
      return "the numbers of ranks differ (WORLD_SIZE)";
    case Refusal::rank:
      return "the rank is out of range or not the one that was called (RANK)";
    case Refusal::taken:
      return "this rank is taken: another process claims it and is connected (RANK)";
    case Refusal::settings:
      return "the ranks differ in eager limit, credit, message limit, checksum, WEFT_HEARTBEAT or "
             "WEFT_DEAD_AFTER";
  }
  return "unknown reason";
}

Settings settings_of(const TcpOptions& options) {
  const auto milliseconds = [](Time t, std::int64_t most) { return std::min<std::int64_t>(t / 1ms, most); };
  return {.eager_limit = options.eager_limit,
          .credit = options.credit,
          .max_message = options.max_message,
          .checksum = options.checksum,
          .heartbeat = static_cast<std::uint16_t>(milliseconds(options.heartbeat, 0xffff)),
          .dead_after = static_cast<std::uint32_t>(milliseconds(options.dead_after, 0xffff'ffff))};
}

HelloBytes encode(const Hello& hello) {
  HelloBytes bytes{};
  put(bytes, 0, kHelloMagic);
  put(bytes, kAtVersion, kHandshakeVersion);
  put(bytes, kAtRole, hello.role);
  put(bytes, kAtJob, hello.job);
  put(bytes, kAtEpoch, hello.epoch);
  put(bytes, kAtFrom, static_cast<std::uint32_t>(hello.from));
  put(bytes, kAtTo, static_cast<std::uint32_t>(hello.to));
  put(bytes, kAtSize, static_cast<std::uint32_t>(hello.size));
  put(bytes, kAtEagerLimit, hello.settings.eager_limit);
  put(bytes, kAtCredit, hello.settings.credit);
  put(bytes, kAtMaxMessage, hello.settings.max_message);
  put(bytes, kAtChecksum, static_cast<std::uint8_t>(hello.settings.checksum ? 1 : 0));
  put(bytes, kAtHeartbeat, hello.settings.heartbeat);
  put(bytes, kAtDeadAfter, hello.settings.dead_after);
  put(bytes, kAtHelloNonce, hello.nonce);
  return bytes;
}

std::optional<Hello> parse_hello(const HelloBytes& bytes) {
  if (get<std::uint32_t>(bytes, 0) != kHelloMagic) return std::nullopt;
  Hello hello;
  hello.version = get<std::uint8_t>(bytes, kAtVersion);
  if (hello.version != kHandshakeVersion) return hello;
  const auto role = get<std::uint8_t>(bytes, kAtRole);
  if (role != static_cast<std::uint8_t>(Role::rendezvous) && role != static_cast<std::uint8_t>(Role::mesh))
    return std::nullopt;
  const auto checksum = get<std::uint8_t>(bytes, kAtChecksum);
  if (checksum > 1) return std::nullopt;
  const auto rank_at = [&](std::size_t at) {  // what does not fit an int becomes -1, which no rank is
    const auto value = get<std::uint32_t>(bytes, at);
    return value > 0x7fff'ffffu ? -1 : static_cast<int>(value);
  };
  hello.role = static_cast<Role>(role);
  hello.job = get<std::uint64_t>(bytes, kAtJob);
  hello.epoch = get<std::uint32_t>(bytes, kAtEpoch);
  hello.from = rank_at(kAtFrom);
  hello.to = rank_at(kAtTo);
  hello.size = rank_at(kAtSize);
  hello.settings = {.eager_limit = get<std::uint64_t>(bytes, kAtEagerLimit),
                    .credit = get<std::uint64_t>(bytes, kAtCredit),
                    .max_message = get<std::uint64_t>(bytes, kAtMaxMessage),
                    .checksum = checksum == 1,
                    .heartbeat = get<std::uint16_t>(bytes, kAtHeartbeat),
                    .dead_after = get<std::uint32_t>(bytes, kAtDeadAfter)};
  hello.nonce = get<Nonce>(bytes, kAtHelloNonce);
  return hello;
}

ChallengeBytes encode(const Challenge& challenge) {
  ChallengeBytes bytes{};
  put(bytes, 0, kChallengeMagic);
  put(bytes, kAtVersion, kHandshakeVersion);
  put(bytes, kAtRefusal, challenge.refusal);
  put(bytes, kAtAnswer, challenge.nonce);
  return bytes;
}

std::optional<Challenge> parse_challenge(const ChallengeBytes& bytes) {
  if (get<std::uint32_t>(bytes, 0) != kChallengeMagic) return std::nullopt;
  Challenge challenge;
  const auto refusal = get<std::uint8_t>(bytes, kAtRefusal);
  if (get<std::uint8_t>(bytes, kAtVersion) != kHandshakeVersion) {
    challenge.refusal = Refusal::version;
    return challenge;
  }
  if (!known(refusal)) return std::nullopt;
  challenge.refusal = static_cast<Refusal>(refusal);
  challenge.nonce = get<Nonce>(bytes, kAtAnswer);
  return challenge;
}

Refusal check_hello(const Hello& hello, const Hello& expected) {
  if (hello.version != kHandshakeVersion) return Refusal::version;
  if (hello.job != expected.job) return Refusal::job;
  if (hello.epoch != expected.epoch) return Refusal::epoch;
  if (hello.size != expected.size) return Refusal::size;
  if (hello.role != expected.role || hello.to != expected.to || hello.from < 0 ||
      hello.from >= expected.size || hello.from <= expected.to) {
    return Refusal::rank;  // the higher rank connects to the lower
  }
  if (hello.settings != expected.settings) return Refusal::settings;
  return Refusal::none;
}

ProofBytes make_proof(std::string_view token, const HelloBytes& hello, const ChallengeBytes& challenge,
                      const Place& listens) {
  ProofBytes proof{};
  put(proof, kAtAddress, listens.address);
  put(proof, kAtPort, listens.port);
  put(proof, kAtProofMac, mac_of(token, kConnector, hello, challenge, std::span(proof).first(kAtProofMac)));
  return proof;
}

std::optional<Place> check_proof(std::string_view token, const HelloBytes& hello,
                                 const ChallengeBytes& challenge, const ProofBytes& proof) {
  const Mac mac = mac_of(token, kConnector, hello, challenge, std::span(proof).first(kAtProofMac));
  if (!same(mac, std::span(proof).subspan(kAtProofMac))) return std::nullopt;
  return Place{.address = get<std::array<std::byte, 16>>(proof, kAtAddress),
               .port = get<std::uint16_t>(proof, kAtPort)};
}

VerdictBytes make_verdict(std::string_view token, const HelloBytes& hello, const ChallengeBytes& challenge,
                          const ProofBytes& proof, Refusal refusal) {
  VerdictBytes verdict{};
  put(verdict, 0, kVerdictMagic);
  put(verdict, kAtVersion, kHandshakeVersion);
  put(verdict, kAtRefusal, refusal);
  if (refusal == Refusal::token) return verdict;
  std::array<std::byte, kAtAnswer + sizeof(ProofBytes)> rest{};
  std::copy(proof.begin(), proof.end(), std::copy_n(verdict.begin(), kAtAnswer, rest.begin()));
  put(verdict, kAtAnswer, mac_of(token, kAcceptor, hello, challenge, rest));
  return verdict;
}

std::optional<Refusal> check_verdict(std::string_view token, const HelloBytes& hello,
                                     const ChallengeBytes& challenge, const ProofBytes& proof,
                                     const VerdictBytes& verdict) {
  if (get<std::uint32_t>(verdict, 0) != kVerdictMagic) return std::nullopt;
  const auto refusal = get<std::uint8_t>(verdict, kAtRefusal);
  if (!known(refusal)) return std::nullopt;
  const auto said = static_cast<Refusal>(refusal);
  const VerdictBytes right = make_verdict(token, hello, challenge, proof, said);
  if (said == Refusal::token || CRYPTO_memcmp(right.data(), verdict.data(), right.size()) != 0)
    return Refusal::token;
  return said;
}

std::vector<std::byte> encode_notice(NoticeKind kind, std::span<const std::byte> body) {
  std::array<std::byte, kNoticeBytes> head{};
  put(head, 0, kNoticeMagic);
  put(head, kAtVersion, kind);
  put(head, 8, static_cast<std::uint32_t>(body.size()));
  put(head, 12, wire::crc32c(body));
  std::vector<std::byte> bytes(kNoticeBytes + body.size());
  std::copy(body.begin(), body.end(), std::copy(head.begin(), head.end(), bytes.begin()));
  return bytes;
}

std::optional<Notice> parse_notice(std::span<const std::byte, kNoticeBytes> bytes, int size) {
  if (get<std::uint32_t>(bytes, 0) != kNoticeMagic) return std::nullopt;
  const auto kind = get<std::uint8_t>(bytes, kAtVersion);
  const Notice notice{.kind = static_cast<NoticeKind>(kind),
                      .length = get<std::uint32_t>(bytes, 8),
                      .crc = get<std::uint32_t>(bytes, 12)};
  switch (notice.kind) {
    case NoticeKind::table:
      if (notice.length != static_cast<std::size_t>(size) * kPlaceBytes) return std::nullopt;
      return notice;
    case NoticeKind::ready:
    case NoticeKind::go:
      if (notice.length != 0) return std::nullopt;
      return notice;
    case NoticeKind::abort:
      if (notice.length > kAbortText) return std::nullopt;
      return notice;
  }
  return std::nullopt;
}

bool body_is_whole(const Notice& notice, std::span<const std::byte> body) {
  return body.size() == notice.length && wire::crc32c(body) == notice.crc;
}

std::vector<std::byte> encode_table(std::span<const Place> places) {
  std::vector<std::byte> body;
  body.reserve(places.size() * kPlaceBytes);
  for (const Place& place : places) {
    body.insert(body.end(), place.address.begin(), place.address.end());
    body.push_back(static_cast<std::byte>(place.port & 0xffu));
    body.push_back(static_cast<std::byte>(place.port >> 8));
  }
  return body;
}

std::vector<Place> parse_table(std::span<const std::byte> body) {
  std::vector<Place> places(body.size() / kPlaceBytes);
  for (std::size_t i = 0; i < places.size(); ++i) {
    const auto entry = body.subspan(i * kPlaceBytes, kPlaceBytes);
    std::copy_n(entry.begin(), 16, places[i].address.begin());
    places[i].port = get<std::uint16_t>(entry, 16);
  }
  return places;
}

std::string printable(std::span<const std::byte> text) {
  std::string out;
  out.reserve(text.size());
  std::transform(text.begin(), text.end(), std::back_inserter(out), [](std::byte b) {
    const auto c = static_cast<unsigned char>(b);
    return c >= 0x20 && c < 0x7f ? static_cast<char>(c) : '?';
  });
  return out;
}

std::uint64_t job_hash(std::string_view job) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned length = 0;
  if (EVP_Digest(job.data(), job.size(), digest.data(), &length, EVP_sha256(), nullptr) != 1) {
    throw TransportError(TransportError::Kind::refused, -1, "libcrypto could not compute a SHA-256");
  }
  std::uint64_t hash = 0;
  std::memcpy(&hash, digest.data(), sizeof hash);
  return hash;
}

Nonce random_nonce() {
  Nonce nonce{};
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) != 1) {
    throw TransportError(TransportError::Kind::refused, -1, "the system gives no random numbers");
  }
  return nonce;
}

}  // namespace weft::tcp
