// What the algorithms of the family share: the call, the state of a vector, the result in blocks.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "base/entries.h"
#include "base/large_vector.h"
#include "kernels/select.h"
#include "patterns/deal.h"
#include "weft/kernel_costs.h"
#include "weft/sparse.h"
#include "wire/codec.h"

namespace weft {

// How many entries an owner of B-SAG keeps before the teams' lists are added, so that their union comes close
// to the quota. One per block position; equal in a SAG group because all its members see the same unions.
struct TeamQuota {
  std::int64_t entries = 0;  // 0: not started
  std::int64_t step = 0;
  bool inertia = false;
  friend bool operator==(const TeamQuota&, const TeamQuota&) = default;
};

struct TeamChoice {
  int teams = 1;  // 0: not chosen
  bool recursive = false;
  friend bool operator==(const TeamChoice&, const TeamChoice&) = default;
};

// The teams of a vector whose operations choose them, and what they were chosen by. They stay for a period;
// then the ranks tell each other what they measured in its second half, when B-SAG's controllers have settled,
// and choose again, as they do where k has become another one. All but `lists` is the same on all ranks.
struct TeamFigures {
  static constexpr std::int64_t kPeriod = 64;  // operations
  std::int64_t operations = 0;                 // since they were chosen
  TeamChoice choice{.teams = 0};
  std::int64_t k = 0;      // that it was chosen for
  double entry_bytes = 0;  // on the wire; 0: not measured, by the codec's formula
  // Of the lists that B-SAG adds: of a union as large as the quota each is quota d^(overlap - 1) long. 0: no
  // index is in two of them; 1: all are in all, B-SAG's bound. Once measured it only rises, so that no choice
  // is made for ever in turns.
  double overlap = 1;
  bool has_overlap = false;
  double lists = 0;  // of this rank: overlaps of the operations that count, added up
  friend bool operator==(const TeamFigures&, const TeamFigures&) = default;
};

// Ok-Topk's thresholds and regions.
struct Thresholds {
  float local = 0;                    // of this rank; 0: to be evaluated
  float global = 0;                   // the same on all ranks
  std::int64_t k = 0;                 // that they are for
  std::int64_t steps = 0;             // since the start
  std::vector<std::int64_t> regions;  // rank r owns [regions[r], regions[r+1])
};

struct SparseWork {
  explicit SparseWork(std::int64_t n) : length(n) {}
  std::int64_t length;
  LargeVector<float> residual;  // committed; empty: zeros
  LargeVector<float> staged;
  bool has_staged = false;
  TeamQuota team_quota, next_team_quota;
  Thresholds thresholds, next_thresholds;
  TeamFigures team_figures, next_team_figures;
  // Memory of a step, kept warm.
  Candidates candidates;
  // Of each block: what this rank cut out of it; and where something was added to it, with this rank's own
  // value there (residual_rules.h).
  std::vector<Entries> selected;
  std::vector<Entries> touched;
  Entries united;              // of touch()
  std::vector<float> before;   // of add_and_touch()
  std::vector<Entries> lists;  // of each rank: what came from it
  std::vector<float> errors;
  // Of lists that are joined: kept from step to step, because memory that is new costs more than what is done in it.
  Entries own_before, arrived, discards, share;
  double spent = 0;  // virtual seconds of what was computed since somebody took them (SparseCall::spent)

  // A commit leaves the controllers as they are, but for what an operation changes from here on.
  void stage_controllers() {
    next_team_quota = team_quota;
    next_thresholds = thresholds;
    next_team_figures = team_figures;
  }
};

struct SparseResult::Contents {
  Deal deal{Deal::Kind::contiguous, 1, 0};
  std::vector<Entries> blocks;
  // A result that is not sparse is this vector, and the blocks are empty. Its entries are what is not zero.
  bool is_dense = false;
  std::vector<float> dense;
  bool finite = true;
  double select_seconds = 0;
  std::uint64_t entries_sent = 0;
  std::uint64_t entry_bytes_sent = 0;
};

// A checked call.
struct SparseCall {
  std::span<const float> gradient;
  SparseWork* work = nullptr;
  SparseResult::Contents* result = nullptr;
  std::int64_t k = 0;
  wire::SparseCodec codec = wire::SparseCodec::packed;
  Deal::Kind blocks = Deal::Kind::dealt;
  ResidualRule residual = ResidualRule::gres;
  int teams = 1;
  bool recursive = false;                // R-SAG, else B-SAG
  std::string_view all_reduce = "auto";  // of the dense rows
  int threads = 1;

  StagedStep step() const { return {gradient, work->residual, work->staged}; }

  // Whoever calls a kernel notes what it costs in virtual time, by the sizes that it met; the computation in
  // which that happens, or the next one, takes it all with it: `return call.spent();`.
  const KernelCosts* kernels = nullptr;
  void spend(double cost, std::size_t count) const { work->spent += cost * static_cast<double>(count); }
  void spend_encoding(std::size_t entries) const {
    spend(kernels->encode_entry[static_cast<std::size_t>(codec)], entries);
  }
  void spend_decoding(std::size_t entries) const {
    spend(kernels->decode_entry[static_cast<std::size_t>(codec)], entries);
  }
  void spend_selection() const {  // of an estimate of thresholds, and of the pass
    spend(kernels->sample_element, static_cast<std::size_t>(work->candidates.sampled));
    spend_pass();
  }
  void spend_pass() const { spend(kernels->scan_element / threads, gradient.size()); }
  // How often a block has been read again because its candidates were not enough.
  std::int64_t readings(int block) const {
    const std::vector<BlockCandidates>& all = work->candidates.blocks;
    const auto at = static_cast<std::size_t>(block);
    return at < all.size() ? all[at].read_again : 0;
  }
  // Of a cut that was made; `before`: its readings before it.
  void spend_cut(int block, std::int64_t length, std::int64_t before) const {
    const BlockCandidates& found = work->candidates.blocks[static_cast<std::size_t>(block)];
    if (found.complete) spend(kernels->cut_candidate, found.count);
    if (found.read_again > before) spend(kernels->read_element, static_cast<std::size_t>(length));
  }
  double spent() const { return std::exchange(work->spent, 0.0); }
};

// Adds the wall time of its life to a total: selection is reported apart from the wire.
class Stopwatch {
 public:
  explicit Stopwatch(double& total) : total_(total) {}
  ~Stopwatch() { total_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double& total_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

using SparseRun = Task<void>(Comm comm, SparseCall call);

// A call as far as its cost goes.
struct SparseShape {
  int size = 1;
  std::int64_t length = 0;
  std::int64_t k = 0;
  int teams = 1;
  bool recursive = false;
  Deal::Kind blocks = Deal::Kind::dealt;
  wire::SparseCodec codec = wire::SparseCodec::coo;
  double entry_bytes = 0;  // measured; 0: by the codec's formula
  double overlap = 1;      // of B-SAG's lists (TeamFigures); 1: its bound
  // By which the dense rows choose their algorithm, unless it is named.
  LinkCost link{};
  std::string_view all_reduce = "auto";
  int node_size = 1;  // of the group (Comm::node_size)
  std::size_t micro_op_bytes = std::size_t{1} << 20;
};

// Bounds hold for every data, except oktopk's: for a step that evaluates no threshold, with k entries
// selected by every rank and k in the result (it keeps to about that many). The dense rows send no entries;
// their words are counted as heads.
struct SparseAlgorithm {
  std::string_view name;
  std::string_view summary;
  std::int64_t (*entries)(const SparseShape& shape);  // that the busiest rank sends: exact or a bound
  std::int64_t (*heads)(const SparseShape& shape);    // 4-byte words beside them: heads of blocks, counts
  int (*rounds)(const SparseShape& shape);
  SparseRun* run;
  bool exact;  // entries() is what is sent where every block has enough values (spardl: not with B-SAG)
  bool lossless = false;         // leaves no residual
  bool selects = true;           // k entries are chosen; else every element is sent
  bool teams = false;            // takes teams and gather
  bool sums_selections = false;  // the result is each rank's k largest, added in rank order
  // Entries may stand for pairs of dense values, so that no codec makes them shorter. None: never.
  bool (*may_go_dense)(const SparseShape& shape) = nullptr;
  // On the wire, where ranks share nodes; none: by rounds and bytes alone.
  double (*level_seconds)(const SparseShape& shape, const LinkCost& link) = nullptr;
};
std::span<const SparseAlgorithm> sparse_algorithms();
// Throws UsageError that lists the names.
const SparseAlgorithm& find_sparse_algorithm(std::string_view name);
// Payload of the busiest rank in the shape's codec: as exact as entries() in the paper's, a bound in the
// others.
std::int64_t payload_bytes(const SparseAlgorithm& row, const SparseShape& shape);
// Predicted seconds on the wire.
double sparse_wire_seconds(const SparseAlgorithm& row, const SparseShape& shape, const LinkCost& link);
// The number of teams with the least predicted time, and whether they gather by R-SAG: by what was measured,
// else by the codec's formula and B-SAG's bound. Of those that gather as asked for (auto, r-sag, b-sag), with
// at least two teams where that is said. One team where no number of them can.
TeamChoice choose_teams(int size, std::int64_t length, std::int64_t k, const LinkCost& link,
                        wire::SparseCodec codec = wire::SparseCodec::packed, std::string_view gather = "auto",
                        const TeamFigures& measured = {});

}  // namespace weft
