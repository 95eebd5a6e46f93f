// Somebody else at the port: speaks the handshake by hand, over blocking sockets with a time limit.
#pragma once

#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tcp/tcp_job.h"
#include "transports/tcp_handshake.h"
#include "wire/frame.h"

namespace weft::testing {

inline const std::string kToken = "a secret of forty characters for testing";

class Stranger {
 public:
  explicit Stranger(std::uint16_t port, Time patience = 5s) {
    const Time deadline = SteadyClock().now() + patience;
    while ((fd_ = connect_to(port)) < 0 && SteadyClock().now() < deadline) ::usleep(2000);
    timeval limit{.tv_sec = 10, .tv_usec = 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
  }
  Stranger(Stranger&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Stranger& operator=(Stranger&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Stranger() { close(); }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  bool connected() const { return fd_ >= 0; }
  int fd() const { return fd_; }

  bool send(std::span<const std::byte> bytes) const {
    return ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  // Exactly that many, or false at the end of the stream.
  bool receive(std::span<std::byte> bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = ::recv(fd_, bytes.data(), bytes.size(), 0);
      if (n <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(n));
    }
    return true;
  }
  bool closed_by_peer() const {
    std::array<std::byte, 64> rest;
    ssize_t n = 0;
    while ((n = ::recv(fd_, rest.data(), rest.size(), 0)) > 0) {
    }
    return n == 0 || errno == ECONNRESET;
  }

 private:
  int fd_ = -1;
};

inline tcp::Hello hello_of(const TcpOptions& options, int from, int to = 0) {
  return {.role = to == 0 ? tcp::Role::rendezvous : tcp::Role::mesh,
          .job = tcp::job_hash(options.job),
          .epoch = options.epoch,
          .from = from,
          .to = to,
          .size = options.size,
          .settings = tcp::settings_of(options),
          .nonce = tcp::random_nonce()};
}

// All that went over the wire in one handshake, from the connector's side.
struct Spoken {
  tcp::HelloBytes hello{};
  tcp::ChallengeBytes challenge{};
  tcp::ProofBytes proof{};
  tcp::VerdictBytes verdict{};
};

// Up to the verdict; nothing if the line was cut before.
inline std::optional<tcp::Refusal> greet(const Stranger& line, const tcp::Hello& hello,
                                         const std::string& token, Spoken* spoken = nullptr) {
  Spoken s;
  s.hello = tcp::encode(hello);
  if (!line.send(s.hello) || !line.receive(s.challenge)) return std::nullopt;
  const auto challenge = tcp::parse_challenge(s.challenge);
  if (!challenge) return std::nullopt;
  if (challenge->refusal != tcp::Refusal::none) return challenge->refusal;
  s.proof = tcp::make_proof(token, s.hello, s.challenge, tcp::Place{.port = 1});
  if (!line.send(s.proof) || !line.receive(s.verdict)) return std::nullopt;
  if (spoken != nullptr) *spoken = s;
  return tcp::check_verdict(token, s.hello, s.challenge, s.proof, s.verdict);
}

// A peer that knows the secret and then does as it likes: joins a job of two as rank 1, up to "go".
inline bool join_as_last(const Stranger& line, const TcpOptions& options) {
  if (greet(line, hello_of(options, 1), options.token) != tcp::Refusal::none) return false;
  std::array<std::byte, tcp::kNoticeBytes> head{};
  std::vector<std::byte> table(2 * tcp::kPlaceBytes);
  return line.receive(head) && line.receive(table) &&
         line.send(tcp::encode_notice(tcp::NoticeKind::ready, {})) && line.receive(head);
}

}  // namespace weft::testing
