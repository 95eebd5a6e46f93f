#include "world/calibrate.h"

#include <algorithm>
#include <array>
#include <vector>

#include "base/statistics.h"
#include "kernels/fold.h"

namespace weft {

namespace {

constexpr int kShortRounds = 15;
constexpr int kLongRounds = 5;
constexpr std::size_t kLongBytes = std::size_t{1} << 20;

// Median seconds of one direction.
Task<double> ping_pong(Comm comm, std::span<std::byte> message, int rounds) {
  const int peer = 1 - comm.rank();
  std::vector<double> one_way;
  for (int round = 0; round < rounds; ++round) {
    const auto hop = static_cast<std::uint32_t>(2 * round);
    const Time start = comm.now();
    if (comm.rank() == 0) {
      Transfer pong = comm.recv(peer, hop + 1, message);
      Transfer ping = comm.send(peer, hop, message);
      co_await ping;
      co_await pong;
    } else {
      Transfer ping = comm.recv(peer, hop, message);
      co_await ping;
      Transfer pong = comm.send(peer, hop + 1, message);
      co_await pong;
    }
    one_way.push_back(seconds(comm.now() - start) / 2);
  }
  co_return median(one_way);
}

double fold_seconds_per_byte(Comm comm) {
  const Buffer a = comm.buffer(std::size_t{1} << 18);
  const Buffer b = comm.buffer(a.size());
  std::fill(a.span().begin(), a.span().end(), std::byte{0});
  std::fill(b.span().begin(), b.span().end(), std::byte{0});
  std::vector<double> runs;
  for (int i = 0; i < 5; ++i) {
    const Time start = comm.now();
    fold_into(Dense(a.as<float>()), b.span(), Reduction::sum);
    runs.push_back(seconds(comm.now() - start));
  }
  return std::max(1e-12, median(runs) / static_cast<double>(a.size()));
}

Task<LinkCost> measure(Comm comm) {
  const Buffer message = comm.buffer(kLongBytes);
  std::fill(message.span().begin(), message.span().end(), std::byte{0});
  const std::span<std::byte> whole = message.span();
  const double hop = co_await ping_pong(comm.hops_from(0), whole.first(4), kShortRounds);
  const double bulk = co_await ping_pong(comm.hops_from(2 * kShortRounds), whole, kLongRounds);
  LinkCost cost;
  cost.hop_seconds = std::max(hop, 1e-7);
  cost.seconds_per_byte = std::max((bulk - hop) / static_cast<double>(kLongBytes), 1e-11);
  cost.fold_seconds_per_byte = fold_seconds_per_byte(comm);
  co_return cost;
}

}  // namespace

std::uint64_t micro_op_bytes(const LinkCost& cost, const Config& config) {
  if (config.micro_op_bytes != 0) return std::max<std::uint64_t>(config.micro_op_bytes, 64);
  const double time = std::max(seconds(config.micro_op_time), 5 * cost.hop_seconds);
  const double bytes = time / cost.seconds_per_byte;
  return static_cast<std::uint64_t>(std::clamp(bytes, 4096.0, 64.0 * (1 << 20))) / 64 * 64;
}

// REQUIRES (reference parameters): awaited where it is called, as Engine::submit does.
Task<void> calibrate(Comm comm, const LinkCost* known, const Config& config, Agreement& agreed) {
  constexpr std::uint32_t kAgree = 2 * (kShortRounds + kLongRounds);
  constexpr std::uint32_t kAsk = kAgree + 1;
  if (known != nullptr && comm.rank() == 0) agreed.cost = *known;
  std::array<std::byte, 1> asked{std::byte{known == nullptr ? std::uint8_t{1} : std::uint8_t{0}}};
  if (comm.rank() < 2 && comm.size() > 1) {
    Transfer ask = comm.rank() == 0 ? comm.send(1, kAsk, std::span<std::byte>(asked))
                                    : comm.recv(0, kAsk, std::span<std::byte>(asked));
    co_await ask;
    if (asked[0] != std::byte{0}) agreed.cost = co_await measure(comm);
  }
  agreed.micro_op_bytes = micro_op_bytes(agreed.cost, config);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&agreed, 1));
  if (comm.rank() != 0) {
    Transfer told = comm.recv(0, kAgree, bytes);
    co_await told;
    co_return;
  }
  std::vector<Transfer> telling;
  for (int peer = 1; peer < comm.size(); ++peer) telling.push_back(comm.send(peer, kAgree, bytes));
  for (Transfer& told : telling) co_await told;
}

}  // namespace weft
