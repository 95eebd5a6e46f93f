// A case of `weft bench sparse_allreduce` in virtual time: the wire alone, because computation takes none.
#include <algorithm>
#include <cmath>

#include "bench_sparse.h"
#include "sizes.h"

namespace weft::cli {

namespace {

// All ranks of a case. Its memory outlives the engines.
struct SparseJob {
  SparseJob(const BenchOptions& o, const SparseCase& c)
      : options(o), which(c), call(sparse_options(o.sparse, c)) {
    for (int r = 0; r < o.ranks; ++r) {
      gradients.emplace_back(static_cast<std::size_t>(c.length));
      states.emplace_back(c.length);
    }
    results.resize(static_cast<std::size_t>(o.ranks));
  }

  void draw_all(std::uint32_t step) {
    for (std::size_t r = 0; r < gradients.size(); ++r) {
      draw({.distribution = options.sparse.distribution,
            .seed = 1,
            .rank = static_cast<std::uint32_t>(r),
            .step = step},
           gradients[r]);
    }
  }
  Task<void> run(const Comm& comm, int rank) {
    const auto r = static_cast<std::size_t>(rank);
    return sparse_all_reduce(comm, gradients[r], states[r], results[r], call);
  }
  bool commit() {
    bool finite = true;
    for (std::size_t r = 0; r < states.size(); ++r) {
      finite = finite && results[r].finite();
      if (results[r].finite())
        states[r].commit();
      else
        states[r].roll_back();
    }
    return finite;
  }
  bool same() const {
    const double first = hash_of(results.front());
    return std::all_of(results.begin(), results.end(),
                       [&](const SparseResult& r) { return hash_of(r) == first; });
  }
  void weigh_step(SparseMeasured& m);

  const BenchOptions& options;
  const SparseCase& which;
  SparseOptions call;
  std::vector<std::vector<float>> gradients;
  std::vector<SparseState> states;
  std::vector<SparseResult> results;
};

// Before the commit.
void SparseJob::weigh_step(SparseMeasured& m) {
  const auto n = static_cast<std::size_t>(which.length);
  SparsePart part{std::vector<double>(n), std::vector<double>(n), std::vector<float>(n)};
  double largest = 0;
  std::vector<std::vector<float>> of_rank;
  const bool topka = which.row->name == "topka" && which.length * options.ranks <= kTopkaChecked &&
                     options.sparse.codec != "packed-bf16";
  for (std::size_t r = 0; r < states.size(); ++r) {
    double mine = 0;
    if (topka) of_rank.emplace_back(n);
    for (std::size_t i = 0; i < n; ++i) {
      const float x = put_in(gradients[r], states[r].residual(), i);
      mine = std::max(mine, std::abs(static_cast<double>(x)));
      part.put_in[i] += static_cast<double>(x);
      part.left[i] += static_cast<double>(states[r].work().staged[i]);
      if (topka) of_rank.back()[i] = x;
    }
    largest += mine;
  }
  results[0].for_each([&part](std::int64_t i, float v) { part.result[static_cast<std::size_t>(i)] = v; });
  const auto alone = [](std::vector<double>&) {};
  m.worth = weigh(part, which.k, {.sum = alone, .max = alone});
  if (conserves(options.sparse, *which.row)) {
    m.correct = m.correct && m.worth->mass_error <= mass_tolerance(options.ranks, largest, *m.worth);
  }
  if (topka) m.correct = m.correct && is_topka(of_rank, which.k, results[0]);
}

}  // namespace

SparseMeasured simulate_sparse(const BenchOptions& options, const SparseCase& c) {
  SparseJob job(options, c);
  std::vector<RecordingTransport*> recorders;
  SimRanksOptions sim = sim_options(options);
  sim.decorate = [&recorders](Transport& inner) {
    auto recorder = std::make_unique<RecordingTransport>(inner);
    recorders.push_back(recorder.get());
    return recorder;
  };
  SimRanks ranks(sim);
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
    const Time took = ranks.run(submit, [&job](const Comm& comm, int r) { return job.run(comm, r); });
    if (options.spoil) {
      for (Entries& block : job.results[0].contents().blocks) {
        if (!block.values.empty()) block.values[0] += 1;
      }
      if (job.results[0].contents().is_dense) job.results[0].contents().dense[0] += 1;
    }
    if (i >= 0) {
      OperationTraffic most;
      for (const RecordingTransport* recorder : recorders) {
        const OperationTraffic traffic = recorder->traffic(c.slot, submit.step);
        most.payload_bytes_sent = std::max(most.payload_bytes_sent, traffic.payload_bytes_sent);
        if (traffic.hops.size() > most.hops.size()) most.hops = traffic.hops;
      }
      m.seconds.push_back(seconds(took));
      m.bytes.push_back(static_cast<double>(most.payload_bytes_sent));
      rounds.push_back(static_cast<double>(most.hops.size()));
      m.correct = m.correct && job.same();
      if (i == 0 && options.sparse.check && job.results[0].finite()) job.weigh_step(m);
    }
    m.correct = job.commit() && m.correct;
  }
  m.wire = m.seconds;
  m.rounds = static_cast<int>(median_of(rounds));
  m.entries_out = static_cast<double>(job.results[0].num_entries());
  double entries = 0, bytes = 0;
  for (const SparseResult& result : job.results) {
    entries += static_cast<double>(result.entries_sent());
    bytes += static_cast<double>(result.entry_bytes_sent());
  }
  m.bytes_per_entry = entries > 0 ? bytes / entries : 0;
  const Endpoint& endpoint = ranks.engine(0).endpoint();
  m.shape = sparse_shape(options, c, endpoint.cost(), endpoint.micro_op_bytes());
  return m;
}

}  // namespace weft::cli
