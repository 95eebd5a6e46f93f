// Hierarchical all-to-all(-v), where ranks form scale-up groups ("nodes") of consecutive ranks: instead of
// one message to each rank, one to each neighbour in the node and one to each other node, so that few, long
// messages cross the slow network. A column is the ranks with equal place in their nodes.
//   Step 1  uneven only: tell each neighbour how much it will get for each node of its column
//   Step 2  inside the node: give each neighbour what is meant for its column; what is for other nodes goes
//           first, into a staging area, ordered by node, then by neighbour; what is for this node lands in its
//           place, also while
//   Step 3  along the column the staging area of node b goes to this column's rank in b, where it lands in its
//           place
// Rounds: (node_size-1) + (nodes-1), and node_size-1 more where uneven. Bytes sent by a rank, equal parts of
// p bytes: (node_size-1) nodes p inside the node, (nodes-1) node_size p between nodes.
#include <string>

#include "collectives/pieces.h"
#include "collectives/registry.h"
#include "patterns/alltoall.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::int64_t kMostElements = std::int64_t{1}
                                       << 40;  // of one part; what a neighbour says is not trusted

class Plan {
 public:
  Plan(Comm comm, AllToAllParts exchange, std::size_t micro_op_bytes)
      : comm_(std::move(comm)),
        exchange_(exchange),
        micro_op_bytes_(micro_op_bytes),
        grid_{comm_.size(), exchange.node_size},
        node_(grid_.node_of(comm_.rank())),
        local_(grid_.local_of(comm_.rank())),
        counts_memory_(comm_.buffer(static_cast<std::size_t>(grid_.size) * sizeof(std::int64_t))) {}

  Arena& arena() const { return comm_.arena(); }  // where the frames of these coroutines come from
  Task<void> agree_counts();
  Task<void> exchange();

 private:
  Dense part_for(int rank) const { return exchange_.part_for(rank); }
  Dense place_of(int rank) const { return block_of(exchange_.recv, exchange_.recv_blocks, rank); }
  // What neighbour `local` has for this column's rank in `node`.
  std::int64_t& count(int node, int local) {
    return counts_memory_.as<std::int64_t>()[static_cast<std::size_t>(grid_.rank_of(node, local))];
  }
  void check_counts(int local);
  void lay_out_staging();
  Dense staged(int node, int local);
  void post_inside(TransferQueue& transfers, bool own_node);
  void post_column(TransferQueue& transfers);
  Task<void> copy_own();
  std::uint32_t hop_inside(int gap) const {
    return static_cast<std::uint32_t>(gap - 1 + (exchange_.uneven ? grid_.node_size - 1 : 0));
  }
  std::uint32_t hop_column(int gap) const {
    return hop_inside(grid_.node_size) + static_cast<std::uint32_t>(gap - 1);
  }
  int neighbour(int gap) const {
    return grid_.rank_of(node_, (local_ + gap + grid_.node_size) % grid_.node_size);
  }
  int column(int gap) const { return grid_.rank_of((node_ + gap + grid_.nodes()) % grid_.nodes(), local_); }

  Comm comm_;
  AllToAllParts exchange_;
  std::size_t micro_op_bytes_;
  NodeGrid grid_;
  int node_;
  int local_;
  Buffer counts_memory_;
  Buffer staging_memory_;
  Buffer offsets_memory_;  // of (node, local) in the staging area
};

Dense Plan::staged(int node, int local) {
  const std::int64_t first =
      offsets_memory_.as<std::int64_t>()[static_cast<std::size_t>(grid_.rank_of(node, local))];
  return Dense(staging_memory_.data(), 0, exchange_.send.dtype).sub(first, count(node, local));
}

// Step 1
Task<void> Plan::agree_counts() {
  for (int node = 0; node < grid_.nodes(); ++node) {
    for (int local = 0; local < grid_.node_size; ++local) {
      const bool known = !exchange_.uneven || local == local_;
      count(node, local) = known ? part_for(grid_.rank_of(node, local_)).count : 0;
    }
  }
  if (!exchange_.uneven) co_return;
  const auto row = static_cast<std::size_t>(grid_.nodes());
  const Buffer out_memory = comm_.buffer(row * sizeof(std::int64_t));
  const Buffer in_memory = comm_.buffer(row * sizeof(std::int64_t));
  const std::span<std::int64_t> out = out_memory.as<std::int64_t>();
  const std::span<std::int64_t> in = in_memory.as<std::int64_t>();
  for (int gap = 1; gap < grid_.node_size; ++gap) {
    const int to = neighbour(gap);
    const int from = neighbour(-gap);
    for (std::size_t node = 0; node < row; ++node) {
      out[node] = part_for(grid_.rank_of(static_cast<int>(node), grid_.local_of(to))).count;
    }
    Transfer received = comm_.recv(from, static_cast<std::uint32_t>(gap - 1), Dense(in));
    Transfer sent = comm_.send(to, static_cast<std::uint32_t>(gap - 1), Dense(out));
    co_await received;
    co_await sent;
    for (std::size_t node = 0; node < row; ++node)
      count(static_cast<int>(node), grid_.local_of(from)) = in[node];
    check_counts(grid_.local_of(from));
  }
}

void Plan::check_counts(int local) {
  const int from = grid_.rank_of(node_, local);
  const auto refuse = [&](const std::string& what) {
    throw TransportError(TransportError::Kind::mismatch, comm_.world_rank(from),
                         "rank " + std::to_string(comm_.world_rank(from)) + " announces " + what);
  };
  for (int node = 0; node < grid_.nodes(); ++node) {
    if (count(node, local) < 0 || count(node, local) > kMostElements)
      refuse("an impossible number of elements");
  }
  if (count(node_, local) != place_of(from).count) {
    refuse(std::to_string(count(node_, local)) + " elements, but " + std::to_string(place_of(from).count) +
           " are expected");
  }
}

void Plan::lay_out_staging() {
  offsets_memory_ = comm_.buffer(static_cast<std::size_t>(grid_.size) * sizeof(std::int64_t));
  std::int64_t total = 0;
  for (int node = 0; node < grid_.nodes(); ++node) {
    for (int local = 0; local < grid_.node_size; ++local) {
      offsets_memory_.as<std::int64_t>()[static_cast<std::size_t>(grid_.rank_of(node, local))] = total;
      total += node == node_ ? 0 : count(node, local);
    }
  }
  staging_memory_ = comm_.buffer(static_cast<std::size_t>(total) * size_of(exchange_.send.dtype));
}

// What stays in the node, or what leaves it.
void Plan::post_inside(TransferQueue& transfers, bool own_node) {
  for (int gap = 1; gap < grid_.node_size; ++gap) {
    const int from = neighbour(-gap);
    for (int node = 0; node < grid_.nodes(); ++node) {
      if ((node == node_) != own_node) continue;
      const Pieces in(own_node ? place_of(from) : staged(node, grid_.local_of(from)), micro_op_bytes_);
      for (std::int64_t i = 0; i < in.size(); ++i) transfers.add(comm_.recv(from, hop_inside(gap), in[i]));
    }
  }
  for (int gap = 1; gap < grid_.node_size; ++gap) {
    const int to = neighbour(gap);
    for (int node = 0; node < grid_.nodes(); ++node) {
      if ((node == node_) != own_node) continue;
      const Pieces out(part_for(grid_.rank_of(node, grid_.local_of(to))), micro_op_bytes_);
      for (std::int64_t i = 0; i < out.size(); ++i) transfers.add(comm_.send(to, hop_inside(gap), out[i]));
    }
  }
}

void Plan::post_column(TransferQueue& transfers) {
  for (int gap = 1; gap < grid_.nodes(); ++gap) {
    const int first = grid_.rank_of(grid_.node_of(column(-gap)), 0);
    const std::int64_t begin = exchange_.recv_blocks.begin(first);
    const std::int64_t end = exchange_.recv_blocks.begin(first + grid_.node_size);
    const Pieces in(exchange_.recv.sub(begin, end - begin), micro_op_bytes_);
    for (std::int64_t i = 0; i < in.size(); ++i)
      transfers.add(comm_.recv(column(-gap), hop_column(gap), in[i]));
  }
  for (int gap = 1; gap < grid_.nodes(); ++gap) {
    const int node = grid_.node_of(column(gap));
    std::int64_t total = 0;
    for (int local = 0; local < grid_.node_size; ++local) total += count(node, local);
    const Pieces out(Dense(staged(node, 0).data, total, exchange_.send.dtype), micro_op_bytes_);
    for (std::int64_t i = 0; i < out.size(); ++i)
      transfers.add(comm_.send(column(gap), hop_column(gap), out[i]));
  }
}

Task<void> Plan::copy_own() {
  for (int node = 0; node < grid_.nodes(); ++node) {
    const Dense from = part_for(grid_.rank_of(node, local_));
    const Dense into = node == node_ ? place_of(comm_.rank()) : staged(node, local_);
    co_await copy_bytes(comm_, from.bytes(), into.bytes());
  }
}

Task<void> Plan::exchange() {
  // Step 2
  lay_out_staging();
  TransferQueue leaving(comm_), staying(comm_);
  post_inside(leaving, false);
  post_inside(staying, true);
  co_await copy_own();
  while (!leaving.empty()) co_await leaving.next();
  // Step 3
  post_column(leaving);
  while (!leaving.empty()) co_await leaving.next();
  while (!staying.empty()) co_await staying.next();
}

}  // namespace

Task<void> all_to_all_hierarchical(Comm comm, AllToAllParts exchange, std::size_t micro_op_bytes) {
  Plan plan(comm, exchange, micro_op_bytes);
  co_await plan.agree_counts();
  co_await plan.exchange();
}

}  // namespace weft
