// The handshake of the tcp transport, bytes only: no I/O, no clock, no allocation from anything a peer said.
//
//   connector                                   acceptor
//   Hello      who I am, whom I want, nonce  ->            checked field by field
//                                            <- Challenge  nonce, or why not
//   Proof      where I listen, MAC           ->            compared in constant time
//                                            <- Verdict    welcome or why not, MAC
//
// Both MACs are HMAC-SHA256 under the job's secret over everything said so far: version, role of the
// connection, job, epoch, both ranks, both nonces, settings. The label in front of it differs for the two
// directions, so a MAC cannot be reflected; the nonces are fresh, so none can be replayed. The acceptor
// proves itself only to who has proved itself first.
//
// Before the proof an acceptor reads 160 bytes of fixed layout. Afterwards rank 0 and the others exchange
// Notices: the table of addresses, "ready", "go", or the reason why the job cannot form.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {
struct TcpOptions;
}

namespace weft::tcp {

inline constexpr std::uint8_t kHandshakeVersion = 2;
inline constexpr std::size_t kNonceBytes = 32;
inline constexpr std::size_t kMacBytes = 32;
using Nonce = std::array<std::byte, kNonceBytes>;
using Mac = std::array<std::byte, kMacBytes>;

enum class Role : std::uint8_t {
  rendezvous = 1,  // to rank 0, which learns where the connector listens
  mesh = 2,        // between two others
};

// Why an acceptor says no. On the wire: only append.
enum class Refusal : std::uint8_t { none, token, version, job, epoch, size, rank, taken, settings };
// One clause for a person, with the remedy.
std::string_view text_of(Refusal refusal);

// What all ranks must agree upon.
struct Settings {
  std::uint64_t eager_limit = 0;
  std::uint64_t credit = 0;
  std::uint64_t max_message = 0;
  bool checksum = true;
  // In milliseconds, and no more than what fits: one who speaks seldom must not meet one who is impatient.
  std::uint16_t heartbeat = 0;
  std::uint32_t dead_after = 0;
  friend bool operator==(const Settings&, const Settings&) = default;
};

Settings settings_of(const TcpOptions& options);

struct Hello {
  std::uint8_t version = kHandshakeVersion;
  Role role = Role::rendezvous;
  std::uint64_t job = 0;
  std::uint32_t epoch = 0;
  int from = 0;
  int to = 0;
  int size = 0;
  Settings settings;
  Nonce nonce{};
  friend bool operator==(const Hello&, const Hello&) = default;
};

struct Challenge {
  Refusal refusal = Refusal::none;
  Nonce nonce{};
};

// An address as the table carries it: 16 bytes of IPv6 (IPv4 is mapped) and a port.
struct Place {
  std::array<std::byte, 16> address{};
  std::uint16_t port = 0;
  friend bool operator==(const Place&, const Place&) = default;
};

using HelloBytes = std::array<std::byte, 96>;
using ChallengeBytes = std::array<std::byte, 48>;
using ProofBytes = std::array<std::byte, 64>;
using VerdictBytes = std::array<std::byte, 48>;

HelloBytes encode(const Hello& hello);
ChallengeBytes encode(const Challenge& challenge);
// Nothing if it does not start as a weft handshake does. A hello of another version comes back with its
// version alone.
std::optional<Hello> parse_hello(const HelloBytes& bytes);
std::optional<Challenge> parse_challenge(const ChallengeBytes& bytes);

// What an acceptor finds wrong with a hello; `expected` is what it would have said itself (its own rank as
// `to`).
Refusal check_hello(const Hello& hello, const Hello& expected);

// The two sides after the challenge. `token` is the secret.
ProofBytes make_proof(std::string_view token, const HelloBytes& hello, const ChallengeBytes& challenge,
                      const Place& listens);
std::optional<Place> check_proof(std::string_view token, const HelloBytes& hello,
                                 const ChallengeBytes& challenge, const ProofBytes& proof);
// With Refusal::token it carries no MAC.
VerdictBytes make_verdict(std::string_view token, const HelloBytes& hello, const ChallengeBytes& challenge,
                          const ProofBytes& proof, Refusal refusal);
// Nothing: not a verdict at all. Refusal::token also where the acceptor could not prove that it knows the
// secret.
std::optional<Refusal> check_verdict(std::string_view token, const HelloBytes& hello,
                                     const ChallengeBytes& challenge, const ProofBytes& proof,
                                     const VerdictBytes& verdict);

// Between rank 0 and an authenticated rank while the job forms.
enum class NoticeKind : std::uint8_t { table = 1, ready = 2, go = 3, abort = 4 };
inline constexpr std::size_t kNoticeBytes = 16;
inline constexpr std::size_t kAbortText = 1024;
inline constexpr std::size_t kPlaceBytes = 18;
struct Notice {
  NoticeKind kind = NoticeKind::ready;
  std::uint32_t length = 0;
  std::uint32_t crc = 0;
};
std::vector<std::byte> encode_notice(NoticeKind kind, std::span<const std::byte> body);
// Nothing if it is no notice, or its length does not suit its kind and the size of the job.
std::optional<Notice> parse_notice(std::span<const std::byte, kNoticeBytes> bytes, int size);
bool body_is_whole(const Notice& notice, std::span<const std::byte> body);

std::vector<std::byte> encode_table(std::span<const Place> places);
std::vector<Place> parse_table(std::span<const std::byte> body);  // REQUIRES: a multiple of kPlaceBytes
// What a peer sent as text, made fit to be printed.
std::string printable(std::span<const std::byte> text);

std::uint64_t job_hash(std::string_view job);
Nonce random_nonce();  // throws TransportError if the system has no randomness

}  // namespace weft::tcp
