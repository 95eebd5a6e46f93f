// The front door of the family: checks the call, picks the row, declares the operation, stages the residual.
#include "weft/sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

#include "base/identity.h"
#include "base/names.h"
#include "collectives/registry.h"
#include "collectives/sparse_allreduce/call.h"
#include "kernels/sparse.h"
#include "weft/collective.h"
#include "weft/error.h"
#include "wire/frame.h"

namespace weft {

namespace {

constexpr std::string_view kRules[] = {"gres", "pres", "lres", "drop"};

[[noreturn]] void refuse(const std::string& what) { throw UsageError("sparse_all_reduce: " + what); }

Deal::Kind blocks_of(std::string_view name) {
  if (name == "dealt") return Deal::Kind::dealt;
  if (name == "contiguous") return Deal::Kind::contiguous;
  refuse("blocks '" + std::string(name) + "' are none of: dealt, contiguous");
}

bool is_near(std::int64_t k, std::int64_t other) { return k <= 2 * other && other <= 2 * k; }

bool gathers_as_asked(const TeamChoice& choice, std::string_view gather) {
  return gather == "auto" || (choice.teams > 1 && choice.recursive == (gather == "r-sag"));
}

// REQUIRES: the controllers are staged.
void choose_teams(const Comm& comm, const SparseOptions& options, SparseCall& call) {
  TeamFigures& figures = call.work->next_team_figures;
  const int before = figures.choice.teams;
  const bool stays = before > 0 && comm.size() % before == 0 && is_near(call.k, figures.k) &&
                     gathers_as_asked(figures.choice, options.gather) &&
                     figures.operations < TeamFigures::kPeriod;
  if (!stays) {
    const TeamChoice choice = choose_teams(comm.size(), call.work->length, call.k, comm.cost(), call.codec,
                                           options.gather, figures);
    if (choice != figures.choice) call.work->next_team_quota = {};  // of other groups of ranks
    figures.choice = choice;
    figures.k = call.k;
    figures.operations = 0;
    figures.lists = 0;
  }
  if (options.gather == "r-sag" && comm.size() > 1 && figures.choice.teams == 1)
    refuse("r-sag needs a power of two of teams, and " + std::to_string(comm.size()) + " ranks have none");
  call.teams = figures.choice.teams;
  call.recursive = figures.choice.recursive;
}

void choose_gather(const Comm& comm, const SparseOptions& options, SparseCall& call) {
  if (options.gather != "auto" && options.gather != "r-sag" && options.gather != "b-sag") {
    refuse("gather '" + std::string(options.gather) + "' is none of: auto, r-sag, b-sag");
  }
  if (options.teams == 0) return choose_teams(comm, options, call);
  if (options.teams < 0 || comm.size() % options.teams != 0) {
    refuse(std::to_string(options.teams) + " teams do not divide " + std::to_string(comm.size()) + " ranks");
  }
  call.teams = options.teams;
  const bool power = std::has_single_bit(static_cast<unsigned>(call.teams));
  if (options.gather == "r-sag" && !power)
    refuse("r-sag needs a power of two of teams, not " + std::to_string(call.teams));
  call.recursive = options.gather == "r-sag" || (options.gather == "auto" && power);
}

SparseCall checked(const Comm& comm, std::span<const float> gradient, SparseState& state,
                   SparseResult& result, const SparseOptions& options) {
  SparseCall call;
  call.gradient = gradient;
  call.work = &state.work();
  call.result = &result.contents();
  const std::int64_t n = state.length();
  if (static_cast<std::int64_t>(gradient.size()) != n) {
    refuse("a vector of " + std::to_string(gradient.size()) + " elements for a state of " +
           std::to_string(n));
  }
  if (options.k < 1 && n > 0) refuse("k must be at least 1, not " + std::to_string(options.k));
  if (options.threads < 1) refuse("threads must be at least 1, not " + std::to_string(options.threads));
  call.k = std::min(options.k, n);
  call.codec = wire::sparse_codec_of(options.codec);
  call.blocks = blocks_of(options.blocks);
  call.residual = options.residual;
  call.all_reduce = options.all_reduce;
  call.threads = options.threads;
  call.kernels = &comm.kernels();
  call.work->stage_controllers();
  choose_gather(comm, options, call);
  return call;
}

// Of the list that this rank sent with those of the other teams (TeamFigures).
double overlap_of(const Comm& comm, const SparseCall& call) {
  const int members = comm.size() / call.teams;
  const auto quota =
      static_cast<double>(Deal(call.blocks, members, call.work->length).quota(comm.rank() % members, call.k));
  const auto list = static_cast<double>(call.work->next_team_quota.entries);
  if (quota == 0 || list == 0) return 1;
  return std::clamp(1 + std::log(list / quota) / std::log(call.teams), 0.0, 1.0);
}

// Everything that must be equal on all ranks goes into the fingerprint.
void declare(const Comm& comm, const SparseAlgorithm& row, const SparseCall& call) {
  std::uint64_t agreed = mix(static_cast<std::uint64_t>(call.work->length));
  for (const std::uint64_t part :
       {static_cast<std::uint64_t>(call.k), static_cast<std::uint64_t>(call.codec),
        static_cast<std::uint64_t>(call.blocks), static_cast<std::uint64_t>(call.residual),
        static_cast<std::uint64_t>(call.teams), static_cast<std::uint64_t>(call.recursive),
        static_cast<std::uint64_t>(call.work->thresholds.steps),
        static_cast<std::uint64_t>(call.work->team_figures.operations)}) {
    agreed = mix(agreed ^ part);
  }
  for (const char c : call.all_reduce) agreed = mix(agreed ^ static_cast<unsigned char>(c));
  const auto place = static_cast<std::uint8_t>(&row - sparse_algorithms().data());
  const wire::Fingerprint fingerprint{.family = static_cast<std::uint8_t>(Family::sparse_all_reduce),
                                      .algorithm = place,
                                      .dtype = static_cast<std::uint8_t>(DType::float32),
                                      .count = wire::count_hash(agreed)};
  comm.declare(wire::pack(fingerprint));
}

// Above SparDL's 3 ceil(log2 P).
constexpr std::uint32_t kFiguresHop = 128;

// Everybody tells what it sent and how long its lists had to be; what all go by is the mean.
Task<void> measure_teams(Comm comm, SparseCall call) {
  struct Told {
    double entries = 0, bytes = 0, lists = 0;
  };
  TeamFigures& figures = call.work->next_team_figures;
  std::vector<Told> told(static_cast<std::size_t>(comm.size()));
  told[static_cast<std::size_t>(comm.rank())] = {static_cast<double>(call.result->entries_sent),
                                                 static_cast<double>(call.result->entry_bytes_sent),
                                                 figures.lists};
  const Dense data(std::as_writable_bytes(std::span(told)));
  co_await all_gather(comm, data);
  Told sum;
  for (const Told& one : told) {
    sum.entries += one.entries;
    sum.bytes += one.bytes;
    sum.lists += one.lists;
  }
  if (sum.entries > 0) figures.entry_bytes = sum.bytes / sum.entries;
  if (call.teams == 1 || call.recursive) co_return;
  const double overlap = sum.lists / comm.size() / (TeamFigures::kPeriod / 2.0);
  figures.overlap = figures.has_overlap ? std::max(figures.overlap, overlap) : overlap;
  figures.has_overlap = true;
}

// Counts the operation; at the end of a period the ranks measure.
Task<void> count_for_teams(Comm comm, SparseCall call) {
  TeamFigures& figures = call.work->next_team_figures;
  const bool counts = ++figures.operations > TeamFigures::kPeriod / 2;
  if (counts && call.teams > 1 && !call.recursive) figures.lists += overlap_of(comm, call);
  if (figures.operations == TeamFigures::kPeriod) co_await measure_teams(comm, call);
}

}  // namespace

std::string_view name_of(ResidualRule rule) { return kRules[static_cast<std::size_t>(rule)]; }

ResidualRule residual_rule_of(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kRules); ++i) {
    if (kRules[i] == name) return static_cast<ResidualRule>(i);
  }
  throw UsageError(unknown_name("residual rule", name, kRules));
}

SparseState::SparseState(std::int64_t length) {
  if (length < 0 || length > 0xffff'ffffll)
    throw UsageError("a sparse vector has 0 to 2^32 - 1 elements, not " + std::to_string(length));
  work_ = std::make_unique<SparseWork>(length);
}
SparseState::SparseState(SparseState&&) noexcept = default;
SparseState& SparseState::operator=(SparseState&&) noexcept = default;
SparseState::~SparseState() = default;

std::int64_t SparseState::length() const { return work_->length; }
std::span<const float> SparseState::residual() const { return work_->residual; }

void SparseState::commit() {
  if (!work_->has_staged) throw UsageError("SparseState::commit: no step is staged");
  work_->residual.swap(work_->staged);
  work_->team_quota = work_->next_team_quota;
  work_->team_figures = work_->next_team_figures;
  std::swap(work_->thresholds, work_->next_thresholds);
  work_->has_staged = false;
}

void SparseState::roll_back() { work_->has_staged = false; }

void SparseState::add_residual(std::span<const float> residual) {
  if (static_cast<std::int64_t>(residual.size()) != work_->length) {
    throw UsageError("a residual of " + std::to_string(residual.size()) + " elements for a state of " +
                     std::to_string(work_->length));
  }
  work_->residual.resize(residual.size());
  for (std::size_t i = 0; i < residual.size(); ++i) work_->residual[i] += residual[i];
}

SparseResult::SparseResult() : contents_(std::make_unique<Contents>()) {}
SparseResult::SparseResult(SparseResult&&) noexcept = default;
SparseResult& SparseResult::operator=(SparseResult&&) noexcept = default;
SparseResult::~SparseResult() = default;

bool SparseResult::finite() const { return contents_->finite; }
double SparseResult::select_seconds() const { return contents_->select_seconds; }
std::uint64_t SparseResult::entries_sent() const { return contents_->entries_sent; }
std::uint64_t SparseResult::entry_bytes_sent() const { return contents_->entry_bytes_sent; }

std::int64_t SparseResult::num_entries() const {
  std::int64_t count = 0;
  if (contents_->is_dense) {
    const std::vector<float>& dense = contents_->dense;
    return static_cast<std::int64_t>(dense.size()) - std::count(dense.begin(), dense.end(), 0.0F);
  }
  for (const Entries& block : contents_->blocks) count += static_cast<std::int64_t>(block.size());
  return count;
}

void SparseResult::for_each(const std::function<void(std::int64_t index, float value)>& f) const {
  if (contents_->is_dense) {
    for (std::size_t i = 0; i < contents_->dense.size(); ++i) {
      if (contents_->dense[i] != 0) f(static_cast<std::int64_t>(i), contents_->dense[i]);
    }
    return;
  }
  for (std::size_t b = 0; b < contents_->blocks.size(); ++b) {
    const Entries& block = contents_->blocks[b];
    for (std::size_t i = 0; i < block.size(); ++i) {
      f(contents_->deal.global(static_cast<int>(b), block.indices[i]), block.values[i]);
    }
  }
}

void SparseResult::add_to(std::span<float> dense, float scale) const {
  if (static_cast<std::int64_t>(dense.size()) != contents_->deal.total()) {
    throw UsageError("SparseResult::add_to: a vector of " + std::to_string(dense.size()) + " elements, not " +
                     std::to_string(contents_->deal.total()));
  }
  if (contents_->is_dense) {
    for (std::size_t i = 0; i < dense.size(); ++i) dense[i] += scale * contents_->dense[i];
    return;
  }
  for (std::size_t b = 0; b < contents_->blocks.size(); ++b) {
    const Entries& block = contents_->blocks[b];
    for (std::size_t i = 0; i < block.size(); ++i) {
      dense[static_cast<std::size_t>(contents_->deal.global(static_cast<int>(b), block.indices[i]))] +=
          scale * block.values[i];
    }
  }
}

Task<void> sparse_all_reduce(Comm comm, std::span<const float> gradient, SparseState& state,
                             SparseResult& result, SparseOptions options) {
  const SparseAlgorithm& row = find_sparse_algorithm(options.algorithm);
  const SparseCall call = checked(comm, gradient, state, result, options);
  declare(comm, row, call);
  call.work->has_staged = false;
  call.work->spent = 0;
  call.work->staged.resize(row.lossless ? 0 : gradient.size());
  *call.result = SparseResult::Contents{.deal = call.result->deal,
                                        .blocks = std::move(call.result->blocks),
                                        .dense = std::move(call.result->dense)};
  for (Entries& block : call.result->blocks) block.clear();
  co_await row.run(comm, call);
  if (!call.result->finite) {
    for (Entries& block : call.result->blocks) block.clear();
    call.result->is_dense = false;
    co_return;
  }
  if (row.teams && options.teams == 0) co_await count_for_teams(comm.hops_from(kFiguresHop), call);
  call.work->has_staged = true;
}

}  // namespace weft
