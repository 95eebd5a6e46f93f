#include "collectives/sparse_allreduce/whole_operation.h"

#include "collectives/sparse_allreduce/residual_rules.h"

namespace weft {

WholeOperation::WholeOperation(const SparseCall& c)
    : call(c), whole(Deal::Kind::contiguous, 1, c.work->length) {
  call.work->selected.resize(1);
  call.work->touched.resize(1);
  call.work->selected[0].clear();
  call.work->touched[0].clear();
  call.result->deal = whole;
  call.result->blocks.resize(1);
}

void WholeOperation::select() {
  const Stopwatch watch(call.result->select_seconds);
  SparseWork& work = *call.work;
  const std::int64_t quota[] = {call.k};
  const std::int64_t readings = call.readings(0);
  non_finite = !select_topk(call.step(), whole, quota, work.candidates, std::span(work.selected).first(1),
                            call.threads)
                    .finite;
  call.spend_selection();
  if (non_finite) return selected().clear();
  call.spend_cut(0, length(), readings);
}

void WholeOperation::round(Entries& entries) {
  if (call.codec != wire::SparseCodec::packed_bf16) return;
  std::vector<float>& errors = call.work->errors;
  wire::round_to_bfloat16(entries.values, errors);
  call.spend(call.kernels->round_element, entries.size());
  keep({entries.indices, errors});
}

void WholeOperation::round_selected() {
  if (call.codec == wire::SparseCodec::packed_bf16) touch(call, 0, selected());
  round(selected());
}

void WholeOperation::keep(EntriesView entries) { add_and_touch(call, whole, 0, entries, selected()); }

void WholeOperation::settle() {
  apply_residual_rule(call, whole, 0, selected(), call.work->touched[0], result());
}

}  // namespace weft
