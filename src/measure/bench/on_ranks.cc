#include <cstdio>
#include <fstream>
#include <memory>

#include "measure/bench/run.h"
#include "weft/error.h"
#include "weft/trace.h"
#include "world/placement.h"

namespace weft {

namespace {

constexpr int kWarmUp = 3;
constexpr double kSecondsPerCase = 1.0;
constexpr int kFewest = 10, kMost = 1000;
// Longer results are checked at the first and the last iteration.
constexpr std::size_t kAlwaysChecked = 256 << 10;

void write_trace(const std::string& path, std::span<const Trace> traces) {
  std::vector<const Trace*> of_rank;
  for (const Trace& trace : traces) of_rank.push_back(&trace);
  std::ofstream file(path);
  file << chrome_trace(of_rank);
  if (!file.flush()) throw UsageError("--trace " + path + ": cannot be written");
}

// One rank's part of one case.
class CaseRun {
 public:
  CaseRun(const BenchCase& c, const BenchRank& rank, bool spoil)
      : case_(c), rank_(rank), work_(c, rank.world.rank()), spoil_(spoil) {}

  Measured measure(int wanted) {
    for (int i = 0; i < kWarmUp; ++i) iterate(i == 0);
    std::vector<double> last(1, seconds_.back());
    largest_of_ranks(rank_.world, last);
    const int fits = static_cast<int>(std::min<double>(kMost, kSecondsPerCase / std::max(last[0], 1e-9)));
    const int iterations = wanted > 0 ? wanted : std::max(kFewest, fits);
    seconds_.clear();
    for (int i = 0; i < iterations; ++i) iterate(i + 1 == iterations);
    return agree();
  }

 private:
  void iterate(bool check) {
    work_.refill();
    rank_.world.barrier();
    SubmitOptions options;
    options.name = name_of(case_.family);
    options.traffic = case_.family == Family::all_to_all ? TrafficClass::blocking : TrafficClass::gradient;
    options.holds = case_.family == Family::all_to_all;
    options.slot = case_.slot;
    options.step = step_++;
    const Time start = clock_.now();
    rank_.world.run(options, [this](Comm comm) { return work_.run(comm); });
    seconds_.push_back(seconds(clock_.now() - start));
    if (!check && case_.shape.bytes() > kAlwaysChecked) return;
    // Where ranks outnumber cores, the check of one that has ended would take a core from one that has not.
    rank_.world.barrier();
    if (spoil_ && rank_.world.rank() == 0) work_.spoil();
    correct_ = correct_ && work_.correct();
  }

  // What the engine's thread knows of the last operation; it alone may look.
  struct Seen {
    OperationTraffic traffic;
    LinkCost cost;
    std::size_t micro_op_bytes = 0;
    int node_size = 1;
  };
  Seen look() {
    Seen seen;
    SubmitOptions options;
    options.name = "look";
    options.local = true;
    const auto read = [](Comm comm, const CaseRun& run, Seen& out) -> Task<void> {
      out.traffic = run.rank_.recorder.traffic(run.case_.slot, run.step_ - 1);
      out.cost = comm.cost();
      out.micro_op_bytes = comm.micro_op_bytes();
      out.node_size = comm.node_size();
      run.rank_.recorder.forget();
      co_return;
    };
    rank_.world.run(options, [&](Comm comm) { return read(comm, *this, seen); });
    return seen;
  }

  Measured agree() {
    const Seen seen = look();
    std::vector<double> values = seconds_;
    values.push_back(static_cast<double>(seen.traffic.payload_bytes_sent));
    values.push_back(static_cast<double>(seen.traffic.hops.size()));
    values.push_back(correct_ ? 0 : 1);
    largest_of_ranks(rank_.world, values);

    Measured m;
    m.correct = values.back() == 0;
    m.rounds = static_cast<int>(values[seconds_.size() + 1]);
    m.payload_bytes = static_cast<std::uint64_t>(values[seconds_.size()]);
    values.resize(seconds_.size());
    m.seconds = std::move(values);
    m.micro_op_bytes = seen.micro_op_bytes;
    Shape shape = case_.shape;
    shape.micro_op_bytes = seen.micro_op_bytes;
    m.node_size = shape.node_size = seen.node_size;
    const Algorithm& taken = choose(case_.family, shape, seen.cost);
    m.algorithm = case_.algorithm != nullptr ? case_.algorithm : &taken;
    m.chosen_by_auto = m.algorithm == &taken;
    return m;
  }

  const BenchCase& case_;
  const BenchRank& rank_;
  CaseBuffers work_;
  bool spoil_;
  SteadyClock clock_;
  std::uint32_t step_ = 0;
  std::vector<double> seconds_;
  bool correct_ = true;
};

void on_threads(const BenchOptions& options, const BenchWorld& how, BenchReport* report,
                const BenchBody& body) {
  std::vector<RecordingTransport*> recorders(static_cast<std::size_t>(options.ranks));
  std::vector<Trace> traces;
  RunOptions run;
  run.config = Config::from_environment();
  run.priority = how.priority;
  if (!options.trace.empty()) run.traces = &traces;
  if (options.link) {
    run.link = EmulatedLink{options.link->bytes_per_second, options.link->latency_seconds, options.nodes,
                            options.scale_up_bytes_per_second};
  }
  run.decorate = [&recorders](Transport& inner) {
    auto recorder = std::make_unique<RecordingTransport>(inner);
    recorders[static_cast<std::size_t>(inner.rank())] = recorder.get();
    return recorder;
  };
  run_ranks(options.ranks, run, [&](World& world) {
    const int rank = world.rank();
    body({world, *recorders[static_cast<std::size_t>(rank)], rank == 0 ? report : nullptr});
  });
  if (!options.trace.empty()) write_trace(options.trace, traces);
}

void as_launched(const BenchOptions& options, const BenchWorld& how, BenchReport* report,
                 const BenchBody& body) {
  RecordingTransport* recorder = nullptr;
  Trace trace;
  JoinOptions join;
  join.config = Config::from_environment();
  join.config.transport = options.transport;
  if (!how.priority) join.config.job += "-fifo";  // it must not meet the other world's ranks
  join.priority = how.priority;
  if (!options.trace.empty()) join.trace = &trace;
  join.decorate = [&recorder](Transport& inner) {
    auto made = std::make_unique<RecordingTransport>(inner);
    recorder = made.get();
    return made;
  };
  int rank = 0;
  {
    const std::unique_ptr<World> world = join_world(join);
    rank = world->rank();
    try {
      body({*world, *recorder, report});
      world->barrier();  // nobody leaves while others still work
    } catch (...) {
      world->engine().abandon(std::current_exception());
      throw;
    }
  }
  if (!options.trace.empty()) write_trace(options.trace + ".rank" + std::to_string(rank), {&trace, 1});
}

}  // namespace

void largest_of_ranks(World& world, std::vector<double>& values) {
  world.all_reduce(std::span(values), {.reduction = Reduction::max});
}

// The largest of each is also the least.
bool same_on_ranks(World& world, const std::vector<double>& values) {
  std::vector<double> signs = values;
  for (const double value : values) signs.push_back(-value);
  largest_of_ranks(world, signs);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (signs[i] != -signs[values.size() + i]) return false;
  }
  return true;
}

void on_ranks(const BenchOptions& options, const BenchWorld& how, BenchReport* report,
              const BenchBody& body) {
  if (how.launched)
    as_launched(options, how, report, body);
  else
    on_threads(options, how, report, body);
}

void bench_cases(const BenchOptions& options, const std::vector<BenchCase>& cases, const BenchRank& rank) {
  for (const BenchCase& c : cases) {
    if (rank.report != nullptr) {
      const std::string name(c.algorithm != nullptr ? c.algorithm->name : "auto");
      rank.report->progress(options.family + " " + name + " " + size_text(static_cast<double>(c.bytes)) +
                            " ...");
    }
    CaseRun run(c, rank, options.spoil);
    const Measured m = run.measure(options.iterations);
    if (rank.report != nullptr) rank.report->add(c, m);
  }
}

}  // namespace weft
