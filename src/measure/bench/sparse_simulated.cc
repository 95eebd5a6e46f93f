// A case of `weft bench sparse_allreduce` in virtual time: the wire alone, because computation takes none.
#include <algorithm>
#include <cmath>
#include <deque>

#include "base/statistics.h"
#include "measure/bench/sparse.h"

namespace weft {

namespace {

// All ranks of a case. Its memory outlives the engines.
struct SparseJob {
  void draw_all(std::uint32_t step) {
    for (std::size_t r = 0; r < vectors.size(); ++r) vectors[r].draw(static_cast<int>(r), step);
  }
  bool finish() {
    bool committed = true;
    for (SparseVector& vector : vectors) committed = vector.finish() && committed;
    return committed;
  }
  bool same() const {
    const double first = vectors.front().hash();
    return std::all_of(vectors.begin(), vectors.end(),
                       [&](const SparseVector& v) { return v.hash() == first; });
  }
  void weigh_step(const std::vector<std::vector<float>>& put_in, SparseMeasured& m) const;

  const BenchOptions& options;
  const SparseCase& which;
  std::deque<SparseVector> vectors;  // stay where they are: operations name them
};

// After the commit; `put_in` is of each rank, from before it.
void SparseJob::weigh_step(const std::vector<std::vector<float>>& put_in, SparseMeasured& m) const {
  const auto n = static_cast<std::size_t>(which.length);
  SparsePart part{std::vector<double>(n), std::vector<double>(n), std::vector<float>(n)};
  double largest = 0;
  for (std::size_t r = 0; r < vectors.size(); ++r) {
    const std::vector<float> left = vectors[r].residual();
    double mine = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const auto x = static_cast<double>(put_in[r][i]);
      mine = std::max(mine, std::abs(x));
      part.put_in[i] += x;
      part.left[i] += static_cast<double>(left[i]);
    }
    largest += mine;
  }
  vectors[0].for_each([&part](std::int64_t i, float v) { part.result[static_cast<std::size_t>(i)] = v; });
  const auto alone = [](std::vector<double>&) {};
  m.worth = weigh(part, which.k, {.sum = alone, .max = alone});
  if (conserves(options.sparse, *which.row)) {
    m.correct = m.correct && m.worth->mass_error <= mass_tolerance(options.ranks, largest, *m.worth);
  }
  if (checks_sum(options, which)) m.correct = m.correct && is_sum_of_selections(put_in, which.k, part.result);
}

// Of the busiest rank.
void count_step(const SparseJob& job, const std::vector<RecordingTransport*>& recorders, SparseMeasured& m,
                std::vector<double>& rounds) {
  double bytes = 0;
  std::size_t hops = 0;
  for (const RecordingTransport* recorder : recorders) {
    double mine = 0;
    for (const SparseVector::Part& part : job.vectors[0].parts()) {
      const OperationTraffic traffic = recorder->traffic(part.slot, part.step);
      mine += static_cast<double>(traffic.payload_bytes_sent);
      hops = std::max(hops, traffic.hops.size());
    }
    bytes = std::max(bytes, mine);
  }
  m.bytes.push_back(bytes);
  rounds.push_back(static_cast<double>(hops));
}

}  // namespace

SparseMeasured simulate_sparse(const BenchOptions& options, const SparseCase& c) {
  SparseJob job{options, c, {}};
  std::vector<RecordingTransport*> recorders;
  SimRanksOptions sim = sim_options(options);
  sim.decorate = [&recorders](Transport& inner) {
    auto recorder = std::make_unique<RecordingTransport>(inner);
    recorders.push_back(recorder.get());
    return recorder;
  };
  SimRanks ranks(sim);
  for (int r = 0; r < options.ranks; ++r) job.vectors.emplace_back(options.sparse, c, ranks.engine(r));
  const Comm world = ranks.engine(0).world();
  SparseMeasured m;
  SubmitOptions submit;
  submit.name = "sparse_allreduce";
  submit.slot = c.slot;
  const int before = options.sparse.steps_before;
  const int iterations = options.iterations > 0 ? options.iterations : 1;
  std::vector<double> rounds;
  for (int i = -before; i < iterations; ++i) {
    submit.step = static_cast<std::uint32_t>(i + before);
    job.draw_all(submit.step);
    std::vector<std::vector<float>> put_in;
    if (i == iterations - 1 && options.sparse.check) {
      for (const SparseVector& vector : job.vectors) put_in.push_back(vector.put_in());
    }
    const Time took = ranks.run(submit, [&](const Comm& comm, int r) {
      return job.vectors[static_cast<std::size_t>(r)].run(comm, submit.step);
    });
    if (options.spoil) job.vectors[0].spoil();
    if (i >= 0) {
      m.seconds.push_back(seconds(took));
      count_step(job, recorders, m, rounds);
      m.formula = formula_of(job.vectors[0], options.ranks, world.cost(), world.micro_op_bytes());
      m.formula_bytes.push_back(m.formula.bytes());
      m.correct = m.correct && job.same();
    }
    const bool committed = job.finish();
    m.correct = m.correct && committed;
    if (committed && !put_in.empty()) job.weigh_step(put_in, m);
  }
  m.wire = m.seconds;
  m.rounds = static_cast<int>(median(rounds));
  m.entries_out = static_cast<double>(job.vectors[0].num_entries());
  double entries = 0, bytes = 0;
  for (const SparseVector& vector : job.vectors) {
    for (const SparseVector::Part& part : vector.parts()) {
      entries += static_cast<double>(part.result->entries_sent());
      bytes += static_cast<double>(part.result->entry_bytes_sent());
    }
  }
  m.bytes_per_entry = entries > 0 ? bytes / entries : 0;
  return m;
}

}  // namespace weft
