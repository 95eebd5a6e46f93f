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
Task<double> ping_pong(Comm comm, int peer, std::span<std::byte> message, int rounds) {
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

// Rank 0 and `peer` call it, each with the other.
Task<LinkCost> measure(Comm comm, int peer) {
  const Buffer message = comm.buffer(kLongBytes);
  std::fill(message.span().begin(), message.span().end(), std::byte{0});
  const std::span<std::byte> whole = message.span();
  const double hop = co_await ping_pong(comm.hops_from(0), peer, whole.first(4), kShortRounds);
  const double bulk = co_await ping_pong(comm.hops_from(2 * kShortRounds), peer, whole, kLongRounds);
  LinkCost cost;
  cost.hop_seconds = std::max(hop, 1e-7);
  cost.seconds_per_byte = std::max((bulk - hop) / static_cast<double>(kLongBytes), 1e-11);
  cost.fold_seconds_per_byte = fold_seconds_per_byte(comm);
  co_return cost;
}

constexpr std::uint32_t kAgree = 2 * (kShortRounds + kLongRounds);
constexpr std::uint32_t kAsk = kAgree + 1;
constexpr std::uint32_t kHost = kAgree + 2;

// Of rank 0: everybody says where it is, and hears whether it is measured.
Task<LinkCost> measure_levels(Comm comm, const LinkCost* known, std::uint64_t host) {
  std::vector<std::uint64_t> hosts(static_cast<std::size_t>(comm.size()), host);
  std::vector<Transfer> transfers;
  for (int peer = 1; peer < comm.size(); ++peer) {
    const std::span<std::uint64_t> place(&hosts[static_cast<std::size_t>(peer)], 1);
    transfers.push_back(comm.recv(peer, kHost, std::as_writable_bytes(place)));
  }
  for (Transfer& said : transfers) co_await said;
  transfers.clear();
  const int node_ranks = node_ranks_of(hosts);
  const std::array<std::byte, 2> words{std::byte{0}, std::byte{1}};
  const auto is_measured = [&](int peer) { return known == nullptr && (peer == 1 || peer == node_ranks); };
  for (int peer = 1; peer < comm.size(); ++peer)
    transfers.push_back(comm.send(peer, kAsk, std::span(&words[is_measured(peer) ? 1 : 0], 1)));
  for (Transfer& asked : transfers) co_await asked;

  if (known != nullptr) co_return *known;
  if (comm.size() == 1) co_return LinkCost{};
  LinkCost cost = co_await measure(comm, 1);
  if (node_ranks == 1) co_return cost;
  const LinkCost inside = cost;
  cost = co_await measure(comm, node_ranks);
  cost.node_ranks = node_ranks;
  cost.scale_up_hop_seconds = inside.hop_seconds;
  cost.scale_up_seconds_per_byte = inside.seconds_per_byte;
  co_return cost;
}

}  // namespace

std::uint64_t micro_op_bytes(const LinkCost& cost, const Config& config) {
  if (config.micro_op_bytes != 0) return std::max<std::uint64_t>(config.micro_op_bytes, 64);
  const double time = std::max(seconds(config.micro_op_time), 5 * cost.hop_seconds);
  const double bytes = time / cost.seconds_per_byte;
  return static_cast<std::uint64_t>(std::clamp(bytes, 4096.0, 64.0 * (1 << 20))) / 64 * 64;
}

int node_ranks_of(std::span<const std::uint64_t> host_of_rank) {
  const auto other = std::ranges::find_if(host_of_rank, [&](auto host) { return host != host_of_rank[0]; });
  const auto run = static_cast<std::size_t>(other - host_of_rank.begin());
  const std::size_t size = host_of_rank.size();
  if (run == size || size % run != 0) return 1;
  for (std::size_t r = 1; r < size; ++r) {
    const bool same = host_of_rank[r] == host_of_rank[r - 1];
    if (same != (r % run != 0)) return 1;
  }
  return static_cast<int>(run);
}

void set_nodes(LinkCost& cost, int ranks, int nodes, double scale_up_hop_seconds,
               double scale_up_bytes_per_second) {
  if (nodes < 1 || ranks % nodes != 0 || ranks == nodes) return;
  cost.node_ranks = ranks / nodes;
  cost.scale_up_hop_seconds = std::max(scale_up_hop_seconds, 1e-9);
  cost.scale_up_seconds_per_byte = std::max(1 / scale_up_bytes_per_second, 1e-12);
}

LinkCost on_nodes_of(LinkCost planned, const LinkCost& found) {
  if (planned.node_ranks > 1 || found.node_ranks == 1) return planned;
  planned.node_ranks = found.node_ranks;
  planned.scale_up_hop_seconds = found.scale_up_hop_seconds;
  planned.scale_up_seconds_per_byte = found.scale_up_seconds_per_byte;
  return planned;
}

// REQUIRES (reference parameters): awaited where it is called, as Engine::submit does.
Task<void> calibrate(Comm comm, const LinkCost* known, std::uint64_t host, const Config& config,
                     Agreement& agreed) {
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(&agreed, 1));
  if (comm.rank() != 0) {
    Transfer said = comm.send(0, kHost, std::as_bytes(std::span(&host, 1)));
    std::array<std::byte, 1> asked{};
    Transfer ask = comm.recv(0, kAsk, std::span<std::byte>(asked));
    co_await said;
    co_await ask;
    if (asked[0] != std::byte{0}) co_await measure(comm, 0);
    Transfer told = comm.recv(0, kAgree, bytes);
    co_await told;
    co_return;
  }
  agreed.cost = co_await measure_levels(comm, known, host);
  agreed.micro_op_bytes = micro_op_bytes(agreed.cost, config);
  std::vector<Transfer> telling;
  for (int peer = 1; peer < comm.size(); ++peer) telling.push_back(comm.send(peer, kAgree, bytes));
  for (Transfer& told : telling) co_await told;
}

}  // namespace weft
