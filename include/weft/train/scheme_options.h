// How gradients are summed over the ranks: by which scheme, in which buckets. `weft info` lists the schemes;
// docs/recipe.md says what to take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/dtype.h"
#include "weft/sparse.h"

namespace weft {

// How the entries of a step are dealt to the buckets: by what their gradients are like, or evenly.
enum class QuotaKind : std::uint8_t { adaptive, proportional };
std::string_view name_of(QuotaKind kind);
QuotaKind quota_kind_of(std::string_view name);  // throws UsageError that lists them

struct BucketOptions {
  // affects results
  std::size_t bucket_bytes = std::size_t{4} << 20;
  std::int64_t dense_below = 1024;  // 0: nothing stays dense for its size
  // Parameters that stay dense whatever their size: where compression cannot pay.
  std::vector<std::string> stay_dense;
};

struct SchemeOptions {
  // affects results; equal on all ranks
  std::string name = "spardl";  // one of scheme_names()
  // Of those that select:
  double density = 0.01;  // entries of the result over elements of the sparse buckets, in (0, 1]
  std::string codec = "packed";
  std::string blocks = "dealt";
  ResidualRule residual = ResidualRule::gres;
  QuotaKind quotas = QuotaKind::adaptive;
  int teams = 0;                // spardl: 0 = by the cost model; must divide the size
  std::string gather = "auto";  // spardl with teams
  // docs/recipe.md: momentum of each rank's own gradients, before the residual; in [0, 1). 0: none. Whoever
  // updates with the results then has no momentum of its own.
  double momentum_correction = 0;
  // Of low rank:
  int columns = 4;             // of the factors, at least 1
  double min_compression = 2;  // matrices that it shrinks by less are sent as they are
  // What the factors leave behind joins the next step's gradient; false: it is lost.
  bool error_feedback = true;
  // What its sums travel as: float32, bf16 (then what a rank rounds away is left behind, too), or auto: float32, but
  // bf16 in a job that has its sums of gradients so (StageOptions::bf16_sums).
  std::string wire = "auto";
  std::uint64_t seed = 0;  // of the first factors
  // Of low rank and of what is sent whole: the algorithm and so the order of additions, weft/collective.h.
  std::string all_reduce = "auto";
  // Of all:
  BucketOptions buckets;
  // affects speed only
  int threads = 1;  // of the selection
};

std::vector<std::string_view> scheme_names();
// Throws UsageError of one sentence: an unknown name (with the nearest), a value that cannot be meant.
// `ranks` 0: how many there are is not known.
void check_scheme(const SchemeOptions& options, int ranks = 0);

struct DataParallelOptions {
  // affects results; equal on all ranks
  std::string name = "data_parallel";  // of the strategy: its state is kept under it
  SchemeOptions scheme;                // of the buckets that are not dense
  DType dtype = DType::float32;        // of all gradients; float64: where the scheme sums them
  double divisor = 0;                  // 0: the size of the group
  // A rank's share of the averaged gradient (its gradient over the divisor) is clipped to clip_local /
  // sqrt(size) before it joins the residual; 0: not at all. Gradients then leave when the last one is here.
  double clip_local = 0;
  bool find_unused = false;  // ask all ranks which parameters got a gradient: one short operation more
  // Above 0: in two sums, over each run of so many consecutive ranks of the group, then over the ranks that have the
  // same place in theirs. Of the lossless scheme alone; divides the size.
  int rows_of = 0;
  // With find_unused: a parameter that no rank had a gradient for stays out of the step, with its residual
  // and its velocity as they were. For callers that throw its result away.
  bool unused_stay_out = false;
  // affects speed only
  // Groups with the same gradients, and so the same results: the first answers for the norm, and all their ranks,
  // the group of this id, are peers of the state.
  struct Copies {
    int count = 1;
    int place = 0;  // of this rank's
    std::uint64_t peers = 0;
  };
  Copies copies;
  std::uint32_t first_slot = 0;  // takes num_slots()
  std::uint32_t first_step = 0;  // of its operations: of one that takes another's place, the next of that one
  // All averages are awaited before anything goes on: buckets leave as they get ready, the last of the next
  // forward first. Else it waits for them one by one, and the first that it needs overtakes the others.
  bool awaited_together = false;
  // As on a stream: buckets are submitted in one order, the last of the next forward first, and an operation
  // begins when the one before it has ended.
  bool one_at_a_time = false;
  std::string why;  // that it is summed so, for its rows; empty: it was asked for
};

}  // namespace weft
