// Ranks of a tcp job for tests: as threads of this process, each with a transport of its own over loopback.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transports/bare_rank.h"
#include "transports/tcp.h"
#include "weft/error.h"

namespace weft::testing {

// A port of loopback where nobody listens. (Closed before it is used: another process could take it, and a
// test fails then.)
inline std::uint16_t free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  EXPECT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&at), length), 0);
  EXPECT_EQ(::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length), 0);
  ::close(fd);
  return ntohs(at.sin_port);
}

inline int connect_to(std::uint16_t port) {  // a plain stranger; -1 if refused
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_port = htons(port);
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0) return fd;
  ::close(fd);
  return -1;
}

inline TcpOptions job_options(int size, std::uint16_t port = free_port()) {
  TcpOptions options;
  options.size = size;
  options.port = port;
  options.job = "test";
  options.connect_timeout = 20s;
  options.dead_after = 1s;  // tests that stop a rank wait for it
  return options;
}

inline TcpOptions as_rank(TcpOptions options, int rank) {
  options.rank = rank;
  return options;
}

using RankBody = std::function<void(Transport&, BareRank&)>;

// Every rank on a thread of its own; the exceptions come back by rank, null where there was none. The
// transport of a rank closes when its body returns.
inline std::vector<std::exception_ptr> run_ranks_caught(const TcpOptions& options, const RankBody& body) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(options.size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < options.size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const std::unique_ptr<Transport> transport = connect_tcp(as_rank(options, rank));
        BareRank bare(*transport);
        body(*transport, bare);
      } catch (...) {
        errors[static_cast<std::size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

inline std::string text_of(const std::exception_ptr& error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

inline void run_ranks(const TcpOptions& options, const RankBody& body) {
  const std::vector<std::exception_ptr> errors = run_ranks_caught(options, body);
  for (std::size_t rank = 0; rank < errors.size(); ++rank) {
    EXPECT_EQ(text_of(errors[rank]), "") << "on rank " << rank;
  }
}

inline std::span<const std::byte> view(const std::vector<std::byte>& bytes) { return bytes; }

// Byte i of a message that can be told from others.
inline std::vector<std::byte> pattern(std::size_t bytes, unsigned seed) {
  std::vector<std::byte> data(bytes);
  std::uint64_t x = mix(seed);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (i % 8 == 0) x = mix(x);
    data[i] = static_cast<std::byte>(x >> (8 * (i % 8)));
  }
  return data;
}

// Drives an operation that is under way without waiting for its end, until `enough` or the time is over.
template <class Enough>
bool drive(Transport& transport, BareRank& bare, Time limit, Enough enough) {
  const Time deadline = transport.clock().now() + limit;
  while (!enough()) {
    if (transport.clock().now() > deadline) return false;
    if (!bare.poll() && !enough()) transport.wait(std::min(deadline, bare.next_deadline()));
  }
  return true;
}

}  // namespace weft::testing
