#include "collectives/sparse_allreduce/whole_step.h"

#include <algorithm>

#include "collectives/sparse_allreduce/residual_rules.h"
#include "kernels/sparse.h"

namespace weft {

WholeStep::WholeStep(const SparseCall& c) : call(c), whole(Deal::Kind::contiguous, 1, c.work->length) {
  call.work->selected.resize(1);
  call.work->touched.resize(1);
  call.work->selected[0].clear();
  call.work->touched[0].clear();
  call.result->deal = whole;
  call.result->blocks.resize(1);
}

void WholeStep::select() {
  const Stopwatch watch(call.result->select_seconds);
  SparseWork& work = *call.work;
  const std::int64_t quota[] = {call.k};
  non_finite = !select_topk(call.step(), whole, quota, work.candidates, std::span(work.selected).first(1),
                            call.threads)
                    .finite;
  call.spend_selection();
  if (non_finite) return selected().clear();
  call.spend_cut(0, length());
}

void WholeStep::round(Entries& entries) {
  if (call.codec != wire::SparseCodec::packed_bf16) return;
  std::vector<float>& errors = call.work->errors;
  wire::round_to_bfloat16(entries.values, errors);
  call.spend(call.kernels->round_element, entries.size());
  keep({entries.indices, errors});
}

void WholeStep::keep(EntriesView entries) {
  scatter_add(entries, whole, 0, call.work->staged);
  std::vector<std::uint32_t>& touched = call.work->touched[0];
  call.spend(call.kernels->scatter_entry, entries.size());
  call.spend(call.kernels->unite_index, touched.size() + entries.size());
  std::vector<std::uint32_t> all(touched.size() + entries.size());
  const auto end = std::set_union(touched.begin(), touched.end(), entries.indices.begin(),
                                  entries.indices.end(), all.begin());
  all.erase(end, all.end());
  touched.swap(all);
}

void WholeStep::settle() { apply_residual_rule(call, whole, 0, selected(), call.work->touched[0], result()); }

}  // namespace weft
