// Rank 0 of two sends 3 MB and leaves as soon as the kernel has them; rank 1 must get them all, and learn
// that rank 0 has left. Started by weft_netlab_test.py on slow links.
#include <cstdio>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "transports/bare_rank.h"
#include "weft/config.h"
#include "weft/error.h"
#include "world/open.h"

namespace {

using weft::Comm;
using weft::Task;
using weft::Transfer;

constexpr std::size_t kBytes = 3'000'000;

std::vector<std::byte> gift() {
  std::vector<std::byte> bytes(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 2654435761u >> 24);
  return bytes;
}

Task<void> give(Comm comm, const std::vector<std::byte>& bytes) {
  Transfer sent = comm.send(1, 0, std::span<const std::byte>(bytes));
  co_await sent;
}

// Throws what the second receive ends with: nobody answers it.
Task<void> take(Comm comm, std::vector<std::byte>& into, std::vector<std::byte>& more) {
  Transfer received = comm.recv(0, 0, std::span<std::byte>(into));
  Transfer never = comm.recv(0, 1, std::span<std::byte>(more));
  co_await received;
  if (into != gift()) throw weft::Error("rank 1 has other bytes than rank 0 sent");
  co_await never;
}

}  // namespace

int main() {
  try {
    const std::unique_ptr<weft::Transport> transport =
        weft::open_transport(weft::Config::from_environment(), weft::detect_placement());
    weft::BareRank bare(*transport);
    std::vector<std::byte> bytes = gift();
    if (transport->rank() == 0) {
      bare.start([&](Comm comm) { return give(comm, bytes); });
      bare.run();
      return 0;
    }
    std::vector<std::byte> into(kBytes);
    std::vector<std::byte> more(8);
    bare.start([&](Comm comm) { return take(comm, into, more); });
    bare.run();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return std::string(e.what()).find("rank 0 has left the job") != std::string::npos ? 0 : 1;
  }
  return 1;
}
