// gTopk: a tree in which every node keeps the k largest entries.
//   Step 1  the k largest of gradient + residual
//   Step 2  for gap = 1, 2, 4 ..: rank r, an odd multiple of gap, sends its list to r - gap and is done; that
//           rank adds it to its own (own value first) and keeps the k largest of the union
//   Step 3  rank 0's list goes down the same tree: it is the result
//   Step 4  the residual rule
// Rounds: 2 L, L = ceil(log2 P). Entries sent by the busiest rank (0): k L. Any size: a partner that does not
// exist is left out.
//
// Residuals: pres is the published rule (own entries that are not in the result come back) and loses what was
// dropped on the way at coordinates that are in the result; lres loses more. With gres and drop a drop stays,
// whole, at the rank that dropped it: both conserve exactly.
//
// Shi et al., ICDCS 2019 (powers of two).
#include <algorithm>

#include "collectives/pieces.h"
#include "collectives/sparse_allreduce/messages.h"
#include "collectives/sparse_allreduce/whole_operation.h"
#include "kernels/sparse.h"
#include "patterns/bruck.h"
#include "patterns/tree.h"

namespace weft {

namespace {

struct TreeOperation : WholeOperation {
  using WholeOperation::WholeOperation;

  void code() {
    const Stopwatch watch(call.result->select_seconds);
    round(list);
    outgoing.clear();
    wire::encode(call.codec, non_finite ? EntriesView{} : list.view(), length(), non_finite, outgoing);
    call.spend_encoding(list.size());
  }
  void count_sent() {
    call.result->entries_sent += non_finite ? 0 : list.size();
    call.result->entry_bytes_sent += outgoing.size();
  }
  void decode(int peer, Entries& into) {
    BagReader bag(call.codec, incoming, peer);
    bag.next(length(), call.k, into, non_finite);
    bag.end();
    call.spend_decoding(into.size());
  }
  void add(int peer) {
    const Stopwatch watch(call.result->select_seconds);
    decode(peer, theirs);
    merge_add(list, theirs, sum);
    call.spend(call.kernels->merge_entry, list.size() + theirs.size());
    call.spend(call.kernels->keep_entry, sum.size());
    std::swap(list, sum);
    Entries discards;
    keep_largest(list, call.k, discards);
    non_finite |= std::any_of(list.values.begin(), list.values.end(),
                              [](float v) { return magnitude_key(v) >= kInfinityKey; });
    if (!non_finite) keep(discards);
  }

  Entries list;  // of this node
  Entries theirs, sum;
  std::vector<std::byte> outgoing, incoming;
};

// Step 2
Task<void> climb(Comm comm, TreeOperation& op, std::size_t limit) {
  std::uint32_t hop = 0;
  for (int gap = 1; gap < comm.size(); gap *= 2, ++hop) {
    if (scatter_receives(comm.rank(), gap)) {
      auto code = [&op] {
        op.code();
        return op.call.spent();
      };
      co_await comm.compute(code);
      op.count_sent();
      co_await send_message(comm, comm.rank() - gap, hop, op.outgoing);
      co_return;
    }
    if (!scatter_sends(comm.rank(), gap, comm.size())) continue;
    const int child = comm.rank() + gap;
    co_await recv_message(comm, child, hop, op.incoming, limit);
    auto add = [&op, child] {
      op.add(child);
      return op.call.spent();
    };
    co_await comm.compute(add);
  }
}

// Step 3
Task<void> descend(Comm comm, TreeOperation& op, std::size_t limit) {
  TransferQueue sends(comm);
  const int levels = log2_ceil(comm.size());
  if (comm.rank() == 0) {
    auto code = [&op] {
      op.code();
      return op.call.spent();
    };
    co_await comm.compute(code);
  }
  for (int level = levels - 1; level >= 0; --level) {
    const int gap = 1 << level;
    const auto hop = static_cast<std::uint32_t>(levels - 1 - level);
    if (scatter_receives(comm.rank(), gap)) {
      const int parent = comm.rank() - gap;
      co_await recv_message(comm, parent, hop, op.incoming, limit);
      auto decode = [&op, parent] {
        op.decode(parent, op.list);
        return op.call.spent();
      };
      co_await comm.compute(decode);
      op.outgoing.swap(op.incoming);  // passed on as it came
    } else if (scatter_sends(comm.rank(), gap, comm.size())) {
      op.count_sent();
      post_message(comm, comm.rank() + gap, hop, op.outgoing, sends);
    }
  }
  while (!sends.empty()) co_await sends.next();
}

}  // namespace

Task<void> gtopk(Comm comm, SparseCall call) {
  TreeOperation op(call);
  // Step 1
  auto select = [&op] {
    op.select();
    op.round_selected();
    op.list = op.selected();
    op.call.spend(op.call.kernels->move_entry, op.list.size());
    return op.call.spent();
  };
  co_await comm.compute(select);
  const std::size_t limit = wire::max_encoded_bytes(call.codec, call.k, op.length());
  co_await climb(comm, op, limit);
  co_await descend(comm.hops_from(static_cast<std::uint32_t>(log2_ceil(comm.size()))), op, limit);
  // Step 4
  call.result->finite = !op.non_finite;
  if (op.non_finite) co_return;
  auto settle = [&op] {
    op.result() = op.list;
    op.call.spend(op.call.kernels->move_entry, op.list.size());
    op.settle();
    return op.call.spent();
  };
  co_await comm.compute(settle);
}

}  // namespace weft
