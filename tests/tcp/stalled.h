// Connections of this process whose line stalls: the kernel drops what arrives for one socket, as a link does
// that loses or delays everything. Needs no root.
#pragma once

#include <linux/filter.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>

#include "tcp/tcp_job.h"

namespace weft::testing {

// What arrives for `fd` does not get through as long as this object lives: nothing at all, or no data, while
// bare acknowledgements do (then `fd` can still send).
class Stalled {
 public:
  enum class What { everything, data };
  explicit Stalled(int fd, What what = What::everything) : fd_(fd) {
    constexpr unsigned kLongestHeader = 60;  // of TCP; the kernel shows a segment without its IP header
    const unsigned passes = what == What::data ? kLongestHeader : 0;
    std::array<sock_filter, 4> filter{{BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0),
                                       BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, passes, 1, 0),
                                       BPF_STMT(BPF_RET | BPF_K, 0xffff), BPF_STMT(BPF_RET | BPF_K, 0)}};
    const sock_fprog program{.len = filter.size(), .filter = filter.data()};
    EXPECT_EQ(::setsockopt(fd_, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program), 0);
  }
  ~Stalled() {
    const int unused = 0;
    ::setsockopt(fd_, SOL_SOCKET, SO_DETACH_FILTER, &unused, sizeof unused);
  }
  Stalled(const Stalled&) = delete;
  Stalled& operator=(const Stalled&) = delete;

 private:
  int fd_;
};

// This process's socket of the connection with rank 0 of a job of two at `port`: rank 0's own end, or the
// other one. -1 if there is none.
inline int socket_of(std::uint16_t port, bool of_rank_0) {
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_in local{};
    sockaddr_in remote{};
    socklen_t length = sizeof local;
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&local), &length) != 0) continue;
    length = sizeof remote;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&remote), &length) != 0) continue;
    if (ntohs((of_rank_0 ? local : remote).sin_port) == port) return fd;
  }
  return -1;
}

}  // namespace weft::testing
