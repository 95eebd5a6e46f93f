// Ranks as processes, for tests that kill and stop them. REQUIRES: no other thread runs when they are forked.
#pragma once

#include <poll.h>
#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tcp/tcp_job.h"

namespace weft::testing {

// What a rank says to the test: a word, and when it said it (the monotonic clock is the same in all
// processes).
struct Report {
  Time at{};
  std::array<char, 400> text{};
};

class ForkedRanks {
 public:
  using Say = std::function<void(const std::string&)>;
  using Body = std::function<void(const TcpOptions&, const Say&)>;

  ForkedRanks(const TcpOptions& options, const Body& body) {
    for (int rank = 0; rank < options.size; ++rank) {
      std::array<int, 2> ends{};
      EXPECT_EQ(::pipe(ends.data()), 0);
      const pid_t child = ::fork();
      if (child == 0) {
        ::close(ends[0]);
        const auto say = [fd = ends[1]](const std::string& text) {
          Report report{.at = SteadyClock().now()};
          std::strncpy(report.text.data(), text.c_str(), report.text.size() - 1);
          if (::write(fd, &report, sizeof report) != static_cast<ssize_t>(sizeof report)) ::_exit(3);
        };
        try {
          body(as_rank(options, rank), say);
        } catch (const std::exception& e) {
          say(e.what());
        }
        ::_exit(0);
      }
      ::close(ends[1]);
      children_.push_back(child);
      pipes_.push_back(ends[0]);
    }
  }
  ~ForkedRanks() {
    for (const pid_t child : children_) ::kill(child, SIGKILL);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
    for (const int fd : pipes_) ::close(fd);
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;

  void signal(int rank, int number) { ::kill(children_[static_cast<std::size_t>(rank)], number); }
  // The next report of a rank; nothing if none comes in time.
  std::optional<Report> hear(int rank, Time limit) {
    pollfd ready{.fd = pipes_[static_cast<std::size_t>(rank)], .events = POLLIN, .revents = 0};
    if (::poll(&ready, 1, static_cast<int>(limit / 1ms)) <= 0) return std::nullopt;
    Report report;
    if (::read(ready.fd, &report, sizeof report) != static_cast<ssize_t>(sizeof report)) return std::nullopt;
    return report;
  }

 private:
  std::vector<pid_t> children_;
  std::vector<int> pipes_;
};

}  // namespace weft::testing
