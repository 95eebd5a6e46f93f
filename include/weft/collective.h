// Collectives: the front door of weft.
//
// Each is a coroutine that all ranks of a group call with an operation's Comm (Engine::submit hands one out)
// and that works in place on memory which the caller keeps until the task is done:
//
//   Ticket sum = engine.submit(world, {.name = "gradient"},
//                              [&](Comm comm) { return all_reduce(comm, gradient); });
//
// All ranks give the same options, element type and lengths; ranks that do not get TransportError(mismatch),
// which says what differs (where they disagree about who talks to whom, by another algorithm or root, it may
// take the deadline to find out). Calls that cannot be right on this rank alone throw UsageError before
// anything is sent. Lengths of zero, groups of one (which send nothing) and vectors shorter than the group
// are normal.
//
// Results: the order in which an element's values are added depends on algorithm, size, length and, where the
// algorithm goes by nodes, node_size only, never on timing, transport or micro-op size; all ranks get the same
// bits. kernels/fold.h defines each addition.
//
// Nodes: `node_size` consecutive ranks of the group share a node, and so its port to other nodes; 0 is what
// the group itself says (Comm::node_size), any other number must divide the size. Equal on all ranks.
//
// Cost, in the usual terms: size P, vector of n bytes, a per hop, b per byte. Every algorithm with its hops,
// bytes and order of additions is in docs/algorithms.md; `algorithm = "auto"` takes the one that the link's
// agreed cost predicts to be fastest.
//
// One operation runs one collective. To run several one after the other inside one operation, give each its
// own hops: `co_await all_reduce(comm.hops_from(1000), data)`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "weft/comm.h"
#include "weft/dtype.h"
#include "weft/task.h"

namespace weft {

// Elements [first, first + count).
struct BlockRange {
  std::int64_t first = 0;
  std::int64_t count = 0;
};
// The block of a vector of `count` elements that belongs to `rank`: blocks follow each other in rank order,
// and the first count mod size of them are one element longer than the others.
BlockRange block_of(std::int64_t count, int size, int rank);

struct AllReduceOptions {
  // affects results
  Reduction reduction = Reduction::sum;
  // Order of additions: ring, recursive_doubling, rabenseifner, direct, two_level.
  std::string_view algorithm = "auto";
  int node_size = 0;  // by which "auto" chooses, and order of additions of two_level
  // affects speed only
  std::size_t micro_op_bytes = 0;  // longest message; 0: the endpoint's
};
// data[i] = the reduction of all ranks' data[i], on every rank. Long: 2 n (P-1)/P bytes; short: log2 P hops.
Task<void> all_reduce(Comm comm, Dense data, AllReduceOptions options = {});

struct ReduceScatterOptions {
  // affects results
  Reduction reduction = Reduction::sum;
  std::string_view algorithm = "auto";  // ring, two_level
  int node_size = 0;                    // as in all_reduce
  // affects speed only
  std::size_t micro_op_bytes = 0;
};
// Reduces like all_reduce, and leaves on each rank only its own block (block_of) of the result, in place. The
// rest of `data` is scratch memory afterwards. n (P-1)/P bytes.
Task<void> reduce_scatter(Comm comm, Dense data, ReduceScatterOptions options = {});
// The same with blocks of counts[rank] elements; the counts are equal on all ranks, sum to data.count, and
// stay until the task is done.
Task<void> reduce_scatter_v(Comm comm, Dense data, std::span<const std::int64_t> counts,
                            ReduceScatterOptions options = {});

struct AllGatherOptions {
  // affects speed only
  std::string_view algorithm = "auto";
  std::size_t micro_op_bytes = 0;
  int node_size = 0;
};
// At entry the own block (block_of) of `data` is valid; at the end every rank has all blocks. n (P-1)/P
// bytes, n being all of `data`.
Task<void> all_gather(Comm comm, Dense data, AllGatherOptions options = {});
// The same with blocks of counts[rank] elements; the counts as in reduce_scatter_v.
Task<void> all_gather_v(Comm comm, Dense data, std::span<const std::int64_t> counts,
                        AllGatherOptions options = {});

struct BroadcastOptions {
  // affects results
  int root = 0;
  // affects speed only
  std::string_view algorithm = "auto";
  std::size_t micro_op_bytes = 0;
};
// The root's data, on every rank. Short: log2 P hops of n; long: about 2 n bytes at the root.
Task<void> broadcast(Comm comm, Dense data, BroadcastOptions options = {});

// Ends when all ranks have entered. ceil(log2 P) hops of empty messages.
Task<void> barrier(Comm comm);

struct AllToAllOptions {
  // affects speed only
  std::string_view algorithm = "auto";
  std::size_t micro_op_bytes = 0;
  int node_size = 0;
  // Elements that a rank sends in about, equal on all ranks: what "auto" goes by where counts are any (-v);
  // 0: messages count as long.
  std::int64_t expected_count = 0;
};
// Block r of `send` goes to rank r; block r of `recv` comes from rank r. Both have the same count, a multiple
// of the size, and do not overlap. Long: P-1 hops and n (P-1)/P bytes; short: log2 P hops and about n/2 log2
// P bytes.
Task<void> all_to_all(Comm comm, Dense send, Dense recv, AllToAllOptions options = {});

// Where the parts of an all-to-all lie: `counts` elements for (or from) each rank, one after the other, which
// stay until the task is done. What is sent without counts goes whole to every rank.
struct Parts {
  Dense data;
  std::span<const std::int64_t> counts;
};
// The same with any counts: send.counts[r] here equals recv.counts[me] on rank r, and both sides know it.
Task<void> all_to_all_v(Comm comm, Parts send, Parts recv, AllToAllOptions options = {});

// A message between two ranks of the group, cut into micro-ops. send may end only when its receiver has
// posted.
struct MessageOptions {
  // affects speed only
  std::size_t micro_op_bytes = 0;
};
Task<void> send(Comm comm, int peer, Dense data, MessageOptions options = {});
Task<void> recv(Comm comm, int peer, Dense data, MessageOptions options = {});

// Groups of the ranks with equal color (>= 0), ordered by key, then by rank; a rank with a negative color is
// in none and gets a Comm that is not valid(). The Comm given back names the new group and belongs to no
// operation. One all-gather.
Task<Comm> split(Comm comm, int color, int key);

}  // namespace weft
