// One rank's part of a case of `weft bench sparse_allreduce`, on ranks that run.
#include <algorithm>
#include <cmath>

#include "bench_sparse.h"
#include "message_log.h"
#include "sizes.h"
#include "weft/collective.h"

namespace weft::cli {

namespace {

constexpr double kSecondsPerCase = 1.0;
constexpr int kFewest = 5, kMost = 200;
constexpr int kReplaysAtLeast = 5, kReplaysAtMost = 30;
constexpr Time kTimeout = 600s;
constexpr std::int64_t kChunk = 1 << 20;  // elements that are summed at a time for the check

class SparseRank {
 public:
  SparseRank(const BenchOptions& options, const SparseCase& c, const BenchRank& rank)
      : bench_(options.sparse),
        options_(options),
        case_(c),
        rank_(rank),
        call_(sparse_options(options.sparse, c)),
        gradient_(static_cast<std::size_t>(c.length)),
        state_(c.length) {}

  SparseMeasured measure() {
    for (int i = 0; i < bench_.steps_before; ++i) step(false);
    std::vector<double> last(1, seconds_.empty() ? kSecondsPerCase : seconds_.back());
    largest_of_ranks(rank_.world, last);
    const double fits = std::min<double>(kMost, kSecondsPerCase / std::max(last[0], 1e-9));
    const int iterations =
        options_.iterations > 0 ? options_.iterations : std::max(kFewest, static_cast<int>(fits));
    seconds_.clear();
    select_.clear();
    const std::uint32_t first = step_;
    for (int i = 0; i < iterations; ++i) step(bench_.check && i == 0);
    look(first);
    const MessageLog log = record();
    replay_all(log, std::clamp(iterations, kReplaysAtLeast, kReplaysAtMost));
    return agree();
  }

 private:
  // New data; ends when all ranks have theirs. Two barriers: on a busy machine a thread that has just
  // computed for long is late to wake up from the first, and its peers' clocks would run.
  void begin_step() {
    draw({.distribution = bench_.distribution,
          .seed = 1,
          .rank = static_cast<std::uint32_t>(rank_.world.rank()),
          .step = step_},
         gradient_);
    rank_.world.barrier();
    rank_.world.barrier();
  }
  SubmitOptions submission() {
    SubmitOptions options;
    options.name = "sparse_allreduce";
    options.slot = case_.slot;
    options.step = step_;
    options.timeout = kTimeout;
    return options;
  }
  void end_step() {
    ++step_;
    correct_ = correct_ && result_.finite();
    if (result_.finite())
      state_.commit();
    else
      state_.roll_back();
  }

  void step(bool weighed) {
    begin_step();
    const SubmitOptions options = submission();
    const Time start = clock_.now();
    rank_.world.run(options,
                    [this](Comm comm) { return sparse_all_reduce(comm, gradient_, state_, result_, call_); });
    seconds_.push_back(seconds(clock_.now() - start));
    select_.push_back(result_.select_seconds());
    if (options_.spoil && rank_.world.rank() == 0) spoil();
    hashes_.push_back(hash_of(result_));
    if (weighed && result_.finite()) weigh_step();
    end_step();
  }
  void spoil() {
    SparseResult::Contents& contents = result_.contents();
    if (contents.is_dense && !contents.dense.empty()) contents.dense[0] += 1;
    for (Entries& block : contents.blocks) {
      if (!block.values.empty()) block.values[0] += 1;
    }
  }

  OverRanks over_ranks() {
    World& world = rank_.world;
    return {.sum = [&world](std::vector<double>& v) { world.all_reduce(std::span(v)); },
            .max = [&world](std::vector<double>& v) { largest_of_ranks(world, v); }};
  }

  // Before the commit: the old residual is still there, the new one is staged.
  void weigh_step() {
    const std::span<const float> residual = state_.residual();
    const std::span<const float> staged = state_.work().staged;
    SparsePart part;
    std::vector<double> largest(1);
    for (std::int64_t first = 0; first < case_.length; first += kChunk) {
      const std::int64_t count = std::min(kChunk, case_.length - first);
      const auto at = [first](std::int64_t i) { return static_cast<std::size_t>(first + i); };
      const auto in = [&](std::int64_t i) { return static_cast<double>(put_in(gradient_, residual, at(i))); };
      for (std::int64_t i = 0; i < count; ++i) largest[0] = std::max(largest[0], std::abs(in(i)));
      sum_chunk(count, in, part.put_in);
      sum_chunk(count, [&](std::int64_t i) { return static_cast<double>(staged[at(i)]); }, part.left);
    }
    part.result.resize(part.put_in.size());
    place_result(part.result);
    const OverRanks over = over_ranks();
    over.sum(largest);
    worth_ = weigh(part, case_.k, over);
    const int size = rank_.world.size();
    if (conserves(bench_, *case_.row)) {
      correct_ = correct_ && worth_->mass_error <= mass_tolerance(size, largest[0], *worth_);
    }
    if (case_.row->name == "topka" && case_.length * size <= kTopkaChecked && bench_.codec != "packed-bf16") {
      correct_ = correct_ && compare_topka();
    }
  }
  // Appends this rank's block of the sum.
  template <class Value>
  void sum_chunk(std::int64_t count, const Value& value, std::vector<double>& out) {
    chunk_.resize(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) chunk_[static_cast<std::size_t>(i)] = value(i);
    SubmitOptions options;
    options.name = "check";
    options.timeout = kTimeout;
    rank_.world.run(options, [this](Comm comm) { return reduce_scatter(comm, Dense(std::span(chunk_))); });
    const BlockRange own = block_of(count, rank_.world.size(), rank_.world.rank());
    const auto begin = chunk_.begin() + own.first;
    out.insert(out.end(), begin, begin + own.count);
  }
  // Where the blocks of the chunks have it.
  void place_result(std::vector<float>& out) {
    const int size = rank_.world.size(), me = rank_.world.rank();
    const BlockRange whole = block_of(std::min(kChunk, case_.length), size, me);
    const std::int64_t last = case_.length / kChunk;  // chunk that may be shorter
    const BlockRange rest = block_of(case_.length % kChunk, size, me);
    result_.for_each([&](std::int64_t index, float value) {
      const std::int64_t chunk = index / kChunk, local = index % kChunk;
      const BlockRange& own = chunk == last ? rest : whole;
      if (local < own.first || local >= own.first + own.count) return;
      out[static_cast<std::size_t>(chunk * whole.count + local - own.first)] = value;
    });
  }
  bool compare_topka() {
    const auto n = static_cast<std::size_t>(case_.length);
    const auto size = static_cast<std::size_t>(rank_.world.size());
    std::vector<float> all(n * size);
    for (std::size_t i = 0; i < n; ++i) {
      all[static_cast<std::size_t>(rank_.world.rank()) * n + i] = put_in(gradient_, state_.residual(), i);
    }
    SubmitOptions options;
    options.name = "check";
    rank_.world.run(options, [&all](Comm comm) { return all_gather(comm, Dense(std::span(all))); });
    std::vector<std::vector<float>> of_rank;
    for (std::size_t r = 0; r < size; ++r) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * n);
      of_rank.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(n));
    }
    return is_topka(of_rank, case_.k, result_);
  }

  // What the engine's thread knows of the measured steps; it alone may look.
  void look(std::uint32_t first) {
    SubmitOptions options;
    options.name = "look";
    options.slot = 0;  // it sends nothing, so any will do
    const auto read = [](Comm comm, SparseRank& run, std::uint32_t from) -> Task<void> {
      for (std::uint32_t s = from; s < run.step_; ++s) {
        const OperationTraffic traffic = run.rank_.recorder.traffic(run.case_.slot, s);
        run.bytes_.push_back(static_cast<double>(traffic.payload_bytes_sent));
        run.rounds_.push_back(static_cast<double>(traffic.hops.size()));
      }
      run.rank_.recorder.forget();
      run.shape_ = sparse_shape(run.options_, run.case_, comm.cost(), comm.micro_op_bytes());
      co_return;
    };
    rank_.world.run(options, [&](Comm comm) { return read(comm, *this, first); });
    entries_out_ = static_cast<double>(result_.num_entries());
    sent_ = {static_cast<double>(result_.entries_sent()), static_cast<double>(result_.entry_bytes_sent())};
  }

  // Two steps, of which the one with fewer bytes is kept: oktopk's steps are of two kinds, and the one that
  // evaluates thresholds is rare.
  MessageLog record() {
    MessageLog logs[2];
    std::vector<double> bytes(2);
    for (int i = 0; i < 2; ++i) {
      MessageLog& log = logs[i];
      begin_step();
      rank_.world.run(submission(), [this, &log](Comm comm) {
        return log.record(
            comm, [this](Comm inner) { return sparse_all_reduce(inner, gradient_, state_, result_, call_); });
      });
      for (const MessageLog::Posted& p : log.posted())
        bytes[static_cast<std::size_t>(i)] += p.send ? static_cast<double>(p.bytes) : 0;
      end_step();
    }
    largest_of_ranks(rank_.world, bytes);
    return std::move(logs[bytes[1] < bytes[0] ? 1 : 0]);
  }
  void replay_all(const MessageLog& log, int times) {
    const std::vector<std::byte> payload(log.longest());
    SubmitOptions options;
    options.name = "wire";
    options.timeout = kTimeout;
    for (int i = -1; i < times; ++i) {
      rank_.world.barrier();
      const Time start = clock_.now();
      rank_.world.run(options, [&](Comm comm) { return replay(comm, log, payload); });
      if (i >= 0) wire_.push_back(seconds(clock_.now() - start));
    }
  }

  SparseMeasured agree() {
    SparseMeasured m;
    World& world = rank_.world;
    m.seconds = seconds_;
    m.select = select_;
    m.wire = wire_;
    m.bytes = bytes_;
    for (std::vector<double>* values : {&m.seconds, &m.select, &m.wire, &m.bytes, &rounds_})
      largest_of_ranks(world, *values);
    world.all_reduce(std::span(sent_));
    std::vector<double> signs = hashes_;  // equal on all ranks if the largest is also the least
    for (const double h : hashes_) signs.push_back(-h);
    signs.push_back(correct_ ? 0 : 1);
    largest_of_ranks(world, signs);
    m.correct = signs.back() == 0;
    for (std::size_t i = 0; i < hashes_.size(); ++i)
      m.correct = m.correct && signs[i] == -signs[hashes_.size() + i];
    m.rounds = static_cast<int>(median_of(rounds_));
    m.entries_out = entries_out_;
    m.bytes_per_entry = sent_[0] > 0 ? sent_[1] / sent_[0] : 0;
    m.worth = worth_;
    m.shape = shape_;
    return m;
  }

  const SparseBench& bench_;
  const BenchOptions& options_;
  const SparseCase& case_;
  const BenchRank& rank_;
  SparseOptions call_;
  SteadyClock clock_;
  std::vector<float> gradient_;
  SparseState state_;
  SparseResult result_;
  std::uint32_t step_ = 0;
  std::vector<double> seconds_, select_, wire_, bytes_, rounds_, hashes_;
  double entries_out_ = 0;
  std::vector<double> sent_;  // entries and their bytes, last step
  std::optional<SparseWorth> worth_;
  SparseShape shape_;
  std::vector<double> chunk_;
  bool correct_ = true;
};

}  // namespace

SparseMeasured measure_sparse(const BenchOptions& options, const SparseCase& c, const BenchRank& rank) {
  return SparseRank(options, c, rank).measure();
}

}  // namespace weft::cli
