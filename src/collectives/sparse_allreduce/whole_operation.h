// One operation, on one rank, of a method that selects from the whole vector: what its phases hand on to each
// other.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/sparse_allreduce/call.h"

namespace weft {

struct WholeOperation {
  explicit WholeOperation(const SparseCall& c);

  // staged = gradient + residual, and its k largest entries go over into selected(). Takes time: on the pool.
  void select();
  // Rounds to the codec's values; what that loses stays in `staged`.
  void round(Entries& entries);
  void round_selected();  // the same of what was selected, whose own values are noted before
  // Adds to `staged`: these entries stay here.
  void keep(EntriesView entries);
  // The result is one list of the vector: the residual rule.
  void settle();

  Entries& selected() const { return call.work->selected[0]; }
  Entries& result() const { return call.result->blocks[0]; }
  std::int64_t length() const { return whole.total(); }

  SparseCall call;
  Deal whole;  // one block
  bool non_finite = false;
};

}  // namespace weft
