// Virtual time: every rank of the case in this thread, nothing measured, the same result on every machine.
#include <fstream>

#include "measure/bench/run.h"
#include "weft/error.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

SimRanksOptions recorded(const BenchOptions& options, std::vector<RecordingTransport*>& recorders) {
  SimRanksOptions sim = sim_options(options);
  sim.decorate = [&recorders](Transport& inner) {
    auto recorder = std::make_unique<RecordingTransport>(inner);
    recorders.push_back(recorder.get());
    return recorder;
  };
  return sim;
}

Measured measure(const BenchOptions& options, const BenchCase& c, std::vector<Trace>* traces) {
  std::vector<RecordingTransport*> recorders;
  SimRanksOptions sim = recorded(options, recorders);
  sim.traces = traces;
  std::vector<CaseBuffers> work;  // outlives the engines
  work.reserve(static_cast<std::size_t>(options.ranks));
  for (int r = 0; r < options.ranks; ++r) work.emplace_back(c, r);
  SimRanks ranks(sim);

  Measured m;
  m.correct = true;
  SubmitOptions submit;
  submit.name = name_of(c.family);
  submit.traffic = c.family == Family::all_to_all ? TrafficClass::blocking : TrafficClass::gradient;
  submit.holds = c.family == Family::all_to_all;
  submit.slot = c.slot;
  const int iterations = options.iterations > 0 ? options.iterations : 1;
  for (int i = 0; i < iterations; ++i) {
    for (CaseBuffers& w : work) w.refill();
    submit.step = static_cast<std::uint32_t>(i);
    const Time took =
        ranks.run(submit, [&work](Comm comm, int r) { return work[static_cast<std::size_t>(r)].run(comm); });
    m.seconds.push_back(seconds(took));
    if (options.spoil) work.front().spoil();
    for (const CaseBuffers& w : work) m.correct = m.correct && w.correct();
  }
  for (const RecordingTransport* recorder : recorders) {
    const OperationTraffic traffic = recorder->traffic(c.slot, submit.step);
    m.payload_bytes = std::max(m.payload_bytes, traffic.payload_bytes_sent);
    m.rounds = std::max(m.rounds, static_cast<int>(traffic.hops.size()));
  }
  const Comm world = ranks.engine(0).world();
  m.micro_op_bytes = world.micro_op_bytes();
  Shape shape = c.shape;
  shape.micro_op_bytes = m.micro_op_bytes;
  m.node_size = shape.node_size = world.node_size();
  const Algorithm& taken = choose(c.family, shape, world.cost());
  m.algorithm = c.algorithm != nullptr ? c.algorithm : &taken;
  m.chosen_by_auto = m.algorithm == &taken;
  return m;
}

}  // namespace

SimRanksOptions sim_options(const BenchOptions& options) {
  SimRanksOptions sim;
  LinkOptions& link = sim.sim.link;
  link.ranks = options.ranks;
  link.bytes_per_second = options.link->bytes_per_second;
  link.latency_seconds = options.link->latency_seconds;
  link.nodes = options.nodes;
  if (options.scale_up_bytes_per_second > 0)
    link.scale_up_bytes_per_second = options.scale_up_bytes_per_second;
  link.byte_scale = options.byte_scale;
  sim.config = Config::from_environment();
  return sim;
}

void bench_sim(const BenchOptions& options, const std::vector<BenchCase>& cases, BenchReport& report) {
  std::vector<Trace> traces;
  for (const BenchCase& c : cases) {
    report.progress(options.family + " " + size_text(static_cast<double>(c.bytes)) + ", simulated ...");
    report.add(c, measure(options, c, options.trace.empty() ? nullptr : &traces));
  }
  if (options.trace.empty()) return;
  std::vector<const Trace*> of_rank;
  of_rank.reserve(traces.size());
  for (const Trace& trace : traces) of_rank.push_back(&trace);
  std::ofstream file(options.trace);
  file << chrome_trace(of_rank);
  if (!file.flush()) throw UsageError("--trace " + options.trace + ": cannot be written");
}

}  // namespace weft
