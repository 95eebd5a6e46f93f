// Sparse all-reduce: every rank ends with (about) the k largest entries of the sum of all ranks' vectors;
// what is not sent stays behind as residual and is added to the next step's vector. `algorithm` names a row
// of the table (`weft info`).
//
//   SparseState state(n);                       // one for each vector, kept between steps
//   SparseResult result;
//   co_await sparse_all_reduce(comm, gradient, state, result, options);
//   ... apply result, divided by what the plan says ...
//   state.commit();                             // or state.roll_back(): the step did not happen
//
// Results are the same bits on all ranks. Whether mass is conserved (sum of vectors + old residuals = result
// + sum of new residuals) depends on the residual rule and is said there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/comm.h"
#include "weft/task.h"

namespace weft {

// What happens to mass that is dropped on the way (docs/algorithms.md). gres and drop conserve it exactly.
enum class ResidualRule : std::uint8_t { gres, pres, lres, drop };
std::string_view name_of(ResidualRule rule);
ResidualRule residual_rule_of(std::string_view name);  // throws UsageError that lists them

struct SparseOptions {
  // affects results
  // Entries of the result, 1 .. length. (topka, topkdsa: of each rank's selection; oktopk: about; dense: not
  // used.)
  std::int64_t k = 0;
  std::string_view algorithm = "spardl";
  std::string_view codec = "packed";  // coo, packed, packed-bf16
  std::string_view blocks = "dealt";  // dealt, contiguous
  ResidualRule residual = ResidualRule::gres;
  int teams = 0;                         // spardl: 0 = by the cost model; must divide the size
  std::string_view gather = "auto";      // spardl with teams: r-sag (teams a power of two), b-sag; auto
  std::string_view all_reduce = "auto";  // dense: by which algorithm (weft/collective.h)
  // affects speed only
  int threads = 1;  // of the selection
};

struct SparseWork;  // what algorithms keep (src/collectives/sparse_allreduce/call.h)

// Residual and controllers of one vector. Changed by an operation only in staging; commit() makes it so.
class SparseState {
 public:
  explicit SparseState(std::int64_t length);
  SparseState(SparseState&&) noexcept;
  SparseState& operator=(SparseState&&) noexcept;
  ~SparseState();

  std::int64_t length() const;
  std::span<const float> residual() const;  // committed; empty: zeros
  void commit();                            // REQUIRES: the last operation on it has ended without an error
  void roll_back();                         // forgets what was staged
  // For checkpoints and for another number of ranks: the residual is a plain vector, so a rank that takes
  // over adds the others'. (Where sums are divided by the number of ranks, times the new over the old.)
  void add_residual(std::span<const float> residual);  // throws UsageError for another length

  SparseWork& work() { return *work_; }

 private:
  std::unique_ptr<SparseWork> work_;
};

// The sum, on every rank alike, not divided by anything.
class SparseResult {
 public:
  SparseResult();
  SparseResult(SparseResult&&) noexcept;
  SparseResult& operator=(SparseResult&&) noexcept;
  ~SparseResult();

  bool finite() const;  // false: some rank's vector held NaN or infinity; there are no entries, and the step
                        // must be rolled back
  std::int64_t num_entries() const;  // of a dense result (dense, topkdsa): what is not zero; counted
  void for_each(const std::function<void(std::int64_t index, float value)>& f) const;
  void add_to(std::span<float> dense, float scale = 1) const;  // dense[index] += scale * value
  // What this rank did.
  double select_seconds() const;           // choosing, cutting and coding
  std::uint64_t entries_sent() const;      // with what it passed on
  std::uint64_t entry_bytes_sent() const;  // payload

  struct Contents;
  Contents& contents() { return *contents_; }
  const Contents& contents() const { return *contents_; }

 private:
  std::unique_ptr<Contents> contents_;
};

// `gradient`, `state` and `result` live until the task is done; gradient.size() is the state's length. An
// empty vector is normal.
Task<void> sparse_all_reduce(Comm comm, std::span<const float> gradient, SparseState& state,
                             SparseResult& result, SparseOptions options);

}  // namespace weft
