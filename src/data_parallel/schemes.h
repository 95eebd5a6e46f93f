// The table of schemes: what may be done to a bucket of gradients, and how its knobs are said. Commands, help
// texts, Python, tests and plans walk it; nobody compares names.
//
// A scheme is a row of the sparse all-reduces (dense ones among them), or low rank factors whose two sums are
// dense all-reduces (compressors/low_rank.h). What a bucket in fact takes is scheme_of_bucket(): dense ones,
// and those whose quota is their length, have no use for a selection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "collectives/sparse_allreduce/call.h"
#include "data_parallel/buckets.h"
#include "data_parallel/quotas.h"
#include "weft/comm.h"
#include "weft/sparse.h"
#include "weft/train/scheme_options.h"

namespace weft {

struct Scheme {
  std::string_view name;
  std::string_view summary;
  bool selects = false;    // sends `density` of the elements; what it does not send stays as residual
  bool teams = false;      // takes teams and gather
  bool low_rank = false;   // sends factors; no bucket of it is dense, because what is short travels with them
  bool lossless = false;   // sends everything in full precision
  bool wide = false;       // sums float64, too
  bool automatic = false;  // `--scheme auto` may take it; the others are there to be compared with
  const SparseAlgorithm* all_reduce = nullptr;  // none: low rank

  bool dense() const { return !selects && !low_rank; }  // sends every element, perhaps rounded
};

std::span<const Scheme> schemes();
const Scheme& find_scheme(std::string_view name);  // throws UsageError with the nearest name

// The one that sends everything as it is: what others are measured against, and what buckets take where a
// selection would be a waste.
const Scheme& lossless_scheme();
// The one that sends every element, rounded.
const Scheme& rounding_scheme();
// Whether what low rank sums is bfloat16.
bool rounds_factors(const Scheme& scheme, const SchemeOptions& options);
// What a bucket takes: `dense` as its plan says, `quota` its entries in this step.
const Scheme& scheme_of_bucket(const Scheme& scheme, bool dense, std::int64_t quota, std::int64_t count);
// Low rank sends short parameters along with its factors: they need no bucket of their own. Others keep
// theirs, also where nothing is selected: the order of additions, and so a result's bits, follow from a
// bucket's length.
BucketOptions bucket_options(const SchemeOptions& options);

// One knob as a flag, a key of a config file and an option of a variant have it.
struct SchemeKnob {
  std::string_view name;  // "bucket-mib"
  std::string_view help;
  bool (*applies)(const Scheme& scheme);
  void (*set)(SchemeOptions& options,
              std::string_view text);                 // throws UsageError; its range is check_scheme's
  std::string (*text)(const SchemeOptions& options);  // what set() takes
  bool is_text = false;                               // a word, else a number
};
std::span<const SchemeKnob> scheme_knobs();
const SchemeKnob& find_scheme_knob(std::string_view name);  // throws UsageError with the nearest name

// A bucket as far as its bytes go.
struct SchemeShape {
  int size = 1;                          // ranks
  std::int64_t quota = 0;                // entries, of a scheme that selects
  std::span<const ParameterInfo> parts;  // the bucket's parameters, end to end
  LinkCost link{};                       // by which algorithms are chosen
  TeamChoice teams{.teams = 0};          // of a scheme that chooses them; 0: those of a first operation
  std::size_t micro_op_bytes = std::size_t{1} << 20;
  int node_size = 1;  // of the group (Comm::node_size)
};
// Payload that the busiest rank sends for it, in the codec of `options`: exact for the lossless scheme, else
// a bound. REQUIRES: `scheme` is what the bucket takes.
std::int64_t payload_bytes(const Scheme& scheme, const SchemeOptions& options, const SchemeShape& shape);
// The same, and how long it takes on the wire alone.
struct SchemeCost {
  std::int64_t bytes = 0;
  double seconds = 0;
};
SchemeCost cost_of(const Scheme& scheme, const SchemeOptions& options, const SchemeShape& shape);

// A call of a sparse all-reduce as its formulas take it, of a vector with `length` elements.
SparseShape shape_of(const SparseOptions& call, std::int64_t length, const SchemeShape& shape);
// The call that a bucket makes. Its texts are those of `options`, which outlive it.
SparseOptions sparse_call(const Scheme& scheme, const SchemeOptions& options, std::int64_t quota);

}  // namespace weft
