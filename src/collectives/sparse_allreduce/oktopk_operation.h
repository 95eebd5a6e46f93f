// One operation of Ok-Topk on one rank: what its steps (oktopk.cc) hand on to each other, and their local
// work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "collectives/sparse_allreduce/lists.h"
#include "collectives/sparse_allreduce/whole_operation.h"

namespace weft {

// Lists end to end; list j counts from bases[j] on.
void append_lists(std::span<const Entries> lists, std::span<const std::int64_t> bases, Entries& out);

struct OkOperation : WholeOperation {
  OkOperation(const Comm& comm, const SparseCall& c);
  bool far_off(std::int64_t count) const { return 2 * count < call.k || count > 2 * call.k; }
  std::int64_t region_length(std::size_t r) const { return next.regions[r + 1] - next.regions[r]; }

  void select_local();     // step 1
  void propose_regions();  // step 2, before the all-reduce: where this rank would cut
  void split();            // step 3, before the exchange
  void add();              // and after it: the own region's sums, as they will be sent
  void filter();           // step 4, without evaluation
  void finish_evaluation(std::span<const Entries> sums);  // with it: the k largest of all ranks' sums
  void keep_what_was_dropped();  // step 7, before the rule: the owner's sums that are not in the result

  int size;
  std::size_t me;
  Thresholds& next;
  bool evaluate_local = false;
  bool evaluate_global = false;
  bool repartition = false;
  ListExchange exchange;
  Entries sums;  // of the own region, indices from its beginning
  Entries kept;  // what reaches the global threshold
};

// All ranks' kept entries end to end, in the order of the vector, and who shall have which of them.
struct Balance {
  Balance(const std::vector<std::int64_t>& counts, const Thresholds& thresholds);
  std::int64_t total() const { return held.back(); }
  // Which entries go from rank `from` to rank `to`: [first, second), none if that is empty.
  std::pair<std::int64_t, std::int64_t> moved(std::size_t from, std::size_t to) const {
    return {std::max(held[from], wanted[to]), std::min(held[from + 1], wanted[to + 1])};
  }
  // The part of the vector that the list of rank r can lie in: from the region of its first entry to that of
  // its last.
  std::pair<std::int64_t, std::int64_t> range(std::size_t r) const;

  const std::vector<std::int64_t>& regions;
  std::vector<std::int64_t> held{0};  // rank r has entries [held[r], held[r+1])
  std::vector<std::int64_t> wanted;   // and shall have these
};

// The lists of step 5: entries that go elsewhere, and what is known of those that come.
ListExchange balancing(const OkOperation& op, const Balance& balance);

}  // namespace weft
