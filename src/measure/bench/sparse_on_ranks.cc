// One rank's part of a case of `weft bench sparse_allreduce`, on ranks that run.
#include <algorithm>
#include <cmath>

#include "base/statistics.h"
#include "measure/bench/message_log.h"
#include "measure/bench/sparse.h"
#include "weft/collective.h"

namespace weft {

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
        vector_(options.sparse, c, rank.world.engine()) {}

  SparseMeasured measure() {
    Took last{.seconds = kSecondsPerCase};
    for (int i = 0; i < bench_.steps_before; ++i) last = step(false);
    std::vector<double> slowest(1, last.seconds);
    largest_of_ranks(rank_.world, slowest);
    const double fits = std::min<double>(kMost, kSecondsPerCase / std::max(slowest[0], 1e-9));
    const int iterations =
        options_.iterations > 0 ? options_.iterations : std::max(kFewest, static_cast<int>(fits));
    for (int i = 0; i < iterations; ++i) {
      const Took took = step(bench_.check && i == iterations - 1);
      seconds_.push_back(took.seconds);
      select_.push_back(took.select);
      look();
    }
    replay_all(record(), std::clamp(iterations, kReplaysAtLeast, kReplaysAtMost));
    return agree();
  }

 private:
  struct Took {
    double seconds = 0, select = 0;  // of this rank
  };

  // Two barriers: on a busy machine a thread that has just computed for long is late to wake up from the
  // first, and its peers' clocks would run.
  void wait_for_all() {
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

  Took step(bool weighed) {
    vector_.draw(rank_.world.rank(), step_);
    const std::vector<float> put_in = weighed ? vector_.put_in() : std::vector<float>();
    wait_for_all();
    const SubmitOptions options = submission();
    const Time start = clock_.now();
    rank_.world.run(options, [this](Comm comm) { return vector_.run(comm, step_); });
    Took took{.seconds = seconds(clock_.now() - start)};
    for (const SparseVector::Part& part : vector_.parts()) took.select += part.result->select_seconds();
    if (options_.spoil && rank_.world.rank() == 0) vector_.spoil();
    hashes_.push_back(vector_.hash());
    ++step_;
    const bool committed = vector_.finish();
    correct_ = correct_ && committed;
    if (weighed && committed) weigh_step(put_in);
    return took;
  }

  OverRanks over_ranks() {
    World& world = rank_.world;
    return {.sum = [&world](std::vector<double>& v) { world.all_reduce(std::span(v)); },
            .max = [&world](std::vector<double>& v) { largest_of_ranks(world, v); }};
  }

  void weigh_step(const std::vector<float>& put_in) {
    const std::vector<float> left = vector_.residual();
    SparsePart part;
    std::vector<double> largest(1);
    for (const float x : put_in) largest[0] = std::max(largest[0], std::abs(static_cast<double>(x)));
    for (std::int64_t first = 0; first < case_.length; first += kChunk) {
      const std::int64_t count = std::min(kChunk, case_.length - first);
      const auto chunk = [&](const std::vector<float>& v) {
        return std::span(v).subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(count));
      };
      sum_chunk(chunk(put_in), part.put_in);
      sum_chunk(chunk(left), part.left);
    }
    part.result.resize(part.put_in.size());
    place_result(part.result);
    const OverRanks over = over_ranks();
    over.sum(largest);
    worth_ = weigh(part, case_.k, over);
    if (conserves(bench_, *case_.row)) {
      correct_ = correct_ && worth_->mass_error <= mass_tolerance(rank_.world.size(), largest[0], *worth_);
    }
    if (checks_sum(options_, case_)) correct_ = correct_ && compare_sum(put_in);
  }
  // Appends this rank's block of the sum.
  void sum_chunk(std::span<const float> values, std::vector<double>& out) {
    chunk_.assign(values.begin(), values.end());
    SubmitOptions options;
    options.name = "check";
    options.timeout = kTimeout;
    rank_.world.run(options, [this](Comm comm) { return reduce_scatter(comm, Dense(std::span(chunk_))); });
    const BlockRange own =
        block_of(static_cast<std::int64_t>(values.size()), rank_.world.size(), rank_.world.rank());
    const auto begin = chunk_.begin() + own.first;
    out.insert(out.end(), begin, begin + own.count);
  }
  // Where the blocks of the chunks have it.
  void place_result(std::vector<float>& out) {
    const int size = rank_.world.size(), me = rank_.world.rank();
    const BlockRange whole = block_of(std::min(kChunk, case_.length), size, me);
    const std::int64_t last = case_.length / kChunk;  // chunk that may be shorter
    const BlockRange rest = block_of(case_.length % kChunk, size, me);
    vector_.for_each([&](std::int64_t index, float value) {
      const std::int64_t chunk = index / kChunk, local = index % kChunk;
      const BlockRange& own = chunk == last ? rest : whole;
      if (local < own.first || local >= own.first + own.count) return;
      out[static_cast<std::size_t>(chunk * whole.count + local - own.first)] = value;
    });
  }
  bool compare_sum(const std::vector<float>& put_in) {
    const std::size_t n = put_in.size();
    const auto size = static_cast<std::size_t>(rank_.world.size());
    std::vector<float> all(n * size);
    std::copy(put_in.begin(), put_in.end(),
              all.begin() + static_cast<std::ptrdiff_t>(n) * rank_.world.rank());
    SubmitOptions options;
    options.name = "check";
    rank_.world.run(options, [&all](Comm comm) { return all_gather(comm, Dense(std::span(all))); });
    std::vector<std::vector<float>> of_rank;
    for (std::size_t r = 0; r < size; ++r) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * n);
      of_rank.emplace_back(begin, begin + static_cast<std::ptrdiff_t>(n));
    }
    std::vector<float> result(n);
    vector_.for_each([&](std::int64_t i, float value) { result[static_cast<std::size_t>(i)] = value; });
    return is_sum_of_selections(of_rank, case_.k, result);
  }

  // What the engine's thread knows of the last step; it alone may look.
  void look() {
    SubmitOptions options;
    options.name = "look";
    options.local = true;
    const auto read = [](Comm comm, SparseRank& run) -> Task<void> {
      double bytes = 0;
      std::size_t rounds = 0;
      for (const SparseVector::Part& part : run.vector_.parts()) {
        const OperationTraffic traffic = run.rank_.recorder.traffic(part.slot, part.step);
        bytes += static_cast<double>(traffic.payload_bytes_sent);
        rounds = std::max(rounds, traffic.hops.size());
      }
      run.bytes_.push_back(bytes);
      run.rounds_.push_back(static_cast<double>(rounds));
      run.rank_.recorder.forget();
      run.formula_ = formula_of(run.vector_, comm.size(), comm.cost(), comm.micro_op_bytes());
      co_return;
    };
    rank_.world.run(options, [&](Comm comm) { return read(comm, *this); });
    formula_bytes_.push_back(formula_.bytes());
    entries_out_ = static_cast<double>(vector_.num_entries());
    sent_.assign(2, 0);
    for (const SparseVector::Part& part : vector_.parts()) {
      sent_[0] += static_cast<double>(part.result->entries_sent());
      sent_[1] += static_cast<double>(part.result->entry_bytes_sent());
    }
  }

  // Of two steps the one with fewer bytes: oktopk's steps are of two kinds, and the one that evaluates
  // thresholds is rare.
  std::vector<MessageLog> record() {
    std::vector<MessageLog> logs[2];
    std::vector<double> bytes(2);
    for (std::size_t i = 0; i < 2; ++i) {
      vector_.draw(rank_.world.rank(), step_);
      wait_for_all();
      rank_.world.run(submission(), [this, &log = logs[i]](Comm comm) { return vector_.record(comm, log); });
      for (const MessageLog& log : logs[i]) {
        for (const MessageLog::Posted& p : log.posted())
          bytes[i] += p.send ? static_cast<double>(p.bytes) : 0;
      }
      ++step_;
      step(false);
    }
    largest_of_ranks(rank_.world, bytes);
    return std::move(logs[bytes[1] < bytes[0] ? 1 : 0]);
  }
  void replay_all(const std::vector<MessageLog>& logs, int times) {
    std::size_t longest = 0;
    for (const MessageLog& log : logs) longest = std::max(longest, log.longest());
    const std::vector<std::byte> payload(longest);
    const std::function<Task<void>(Comm, std::size_t)> one = [&](Comm comm, std::size_t i) {
      return replay(comm, logs[i], payload);
    };
    SubmitOptions options;
    options.name = "wire";
    options.timeout = kTimeout;
    for (int i = -1; i < times; ++i) {
      rank_.world.barrier();
      const Time start = clock_.now();
      rank_.world.run(options,
                      [&](Comm comm) { return together(comm, rank_.world.engine(), logs.size(), one); });
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
    m.formula_bytes = formula_bytes_;
    for (std::vector<double>* values : {&m.seconds, &m.select, &m.wire, &m.bytes, &rounds_})
      largest_of_ranks(world, *values);
    world.all_reduce(std::span(sent_));
    std::vector<double> wrong{correct_ ? 0.0 : 1.0};
    largest_of_ranks(world, wrong);
    const bool same = same_on_ranks(world, hashes_);
    m.correct = same && wrong[0] == 0;
    m.rounds = static_cast<int>(median(rounds_));
    m.entries_out = entries_out_;
    m.bytes_per_entry = sent_[0] > 0 ? sent_[1] / sent_[0] : 0;
    m.worth = worth_;
    m.formula = formula_;
    return m;
  }

  const SparseBench& bench_;
  const BenchOptions& options_;
  const SparseCase& case_;
  const BenchRank& rank_;
  SteadyClock clock_;
  SparseVector vector_;
  std::uint32_t step_ = 0;
  std::vector<double> seconds_, select_, wire_, bytes_, formula_bytes_, rounds_, hashes_;
  double entries_out_ = 0;
  std::vector<double> sent_;  // entries and their bytes, last step
  std::optional<SparseWorth> worth_;
  SparseFormula formula_;
  std::vector<double> chunk_;
  bool correct_ = true;
};

}  // namespace

SparseMeasured measure_sparse(const BenchOptions& options, const SparseCase& c, const BenchRank& rank) {
  return SparseRank(options, c, rank).measure();
}

}  // namespace weft
