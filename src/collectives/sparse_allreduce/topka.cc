// TopkA: everybody's k largest entries to everybody.
//   Step 1  the k largest of gradient + residual; the rest is the residual
//   Step 2  Bruck all-gather of the P lists, as coded by their ranks
//   Step 3  every rank adds them, in rank order
// Rounds: ceil(log2 P). Entries sent by a rank: k (P-1). Result: up to k P entries.
//
// Residuals: nothing is dropped after the selection, so every rule conserves. (Where entries of ranks add up
// to zero there is no entry: gres and pres take the values back, lres and drop let them go; either is right.)
// With packed-bf16 the rounding errors stay at their sender by gres and drop; pres and lres lose them.
//
// All-gather of sparse gradients as in Aji and Heafield, EMNLP 2017; named in Shi et al. (gTopk), ICDCS 2019.
#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/whole_operation.h"

namespace weft {

Task<void> topka(Comm comm, SparseCall call) {
  WholeOperation op(call);
  call.work->lists.resize(static_cast<std::size_t>(comm.size()));
  ListGather gather{.lists = call.work->lists};
  gather.bounds.assign(static_cast<std::size_t>(comm.size()), {.length = op.length(), .max_count = call.k});
  // Step 1
  auto select = [&] {
    op.select();
    const Stopwatch watch(call.result->select_seconds);
    op.round_selected();
    gather.non_finite = op.non_finite;
    gather.lists[static_cast<std::size_t>(comm.rank())] = op.selected();
    call.spend(call.kernels->move_entry, op.selected().size());
    return call.spent();
  };
  co_await comm.compute(select);
  // Step 2
  co_await gather_lists(comm, call, gather);
  // Step 3
  auto add = [&] {
    call.result->finite = !gather.non_finite && sum_lists(gather.lists, op.length(), op.result());
    spend_sum(call, gather.lists);
    if (call.result->finite) op.settle();
    return call.spent();
  };
  co_await comm.compute(add);
}

}  // namespace weft
