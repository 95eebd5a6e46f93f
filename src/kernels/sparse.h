// Sums and cuts of sorted entries, and their way in and out of dense vectors. One pass each, no allocation
// once the outputs are warm. kernels/scalar_sparse.h is the definition.
#pragma once

#include <cstdint>
#include <span>

#include "base/entries.h"
#include "patterns/deal.h"

namespace weft {

// out = a + b: every index of either, once; where both have it the value is a's + b's, in this order. (A sum
// that is zero stays an entry.) `out` is neither a's nor b's memory.
void merge_add(EntriesView a, EntriesView b, Entries& out);
// The same, but where both have an index the value is that of `a`.
void merge_first(EntriesView a, EntriesView b, Entries& out);

// Cuts `entries` to its largest k (|value| descending, then lower index; zeros never) in place. What is cut
// goes to `discards`, sorted, zeros left out; it is cleared first.
void keep_largest(Entries& entries, std::int64_t k, Entries& discards);

// dense[deal.global(block, index)] += value; before[i] is what was there, if asked for. REQUIRES: indices
// below deal.count(block), dense of the deal's length; as many places in `before`, or none.
void scatter_add(EntriesView entries, const Deal& deal, int block, std::span<float> dense,
                 std::span<float> before = {});

// out[i] = dense[deal.global(block, indices[i])]. REQUIRES: as above; out.size() == indices.size().
void gather(std::span<const float> dense, const Deal& deal, int block, std::span<const std::uint32_t> indices,
            std::span<float> out);

}  // namespace weft
