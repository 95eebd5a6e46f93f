// Does blocking traffic overtake? An all-to-all alone (idle), and while gradients are all-reduced throughout:
// with the engine's priority, and first come, first served. Between two all-to-alls every rank lets the link
// run for a while, as a program that computes would, so that each of them finds the link full of gradients.
#include <chrono>
#include <thread>

#include "base/statistics.h"
#include "measure/bench/gradient_traffic.h"
#include "measure/bench/run.h"
#include "world/sim_ranks.h"

namespace weft {

namespace {

constexpr int kWarmUp = 2;
constexpr int kIterations = 50;
// First come, first served: in the class of the gradients, so that no transport tells them apart either.
constexpr TrafficClass kNoPriority = TrafficClass::gradient;

// Between two all-to-alls; not always the same, so that they meet the gradients at different points.
Time gap(int iteration) { return 20ms + 1ms * ((iteration + kWarmUp) * 7 % 10); }

// Seconds of each all-to-all, its slowest rank.
std::vector<double> all_to_alls(const BenchRank& rank, const BenchCase& c, int iterations,
                                TrafficClass traffic, bool& correct) {
  SteadyClock clock;
  CaseBuffers work(c, rank.world.rank());
  std::vector<double> times;
  SubmitOptions options;
  options.name = "tokens";
  options.traffic = traffic;
  options.holds = traffic == TrafficClass::blocking;
  for (int i = -kWarmUp; i < iterations; ++i) {
    work.refill();
    rank.world.barrier();
    std::this_thread::sleep_for(gap(i));
    const Time start = clock.now();
    rank.world.run(options, [&work](Comm comm) { return work.run(comm); });
    if (i >= 0) times.push_back(seconds(clock.now() - start));
    // Where ranks outnumber cores, the check of one that has ended would take a core from one that has not.
    rank.world.barrier();
    correct = correct && work.correct();
  }
  times.push_back(correct ? 0 : 1);
  largest_of_ranks(rank.world, times);
  correct = times.back() == 0;
  times.pop_back();
  return times;
}

struct Findings {
  std::vector<double> idle, priority, fifo;
  bool correct = true;
};

void with_gradients(const BenchRank& rank, const BenchCase& c, int iterations, TrafficClass traffic,
                    Findings& findings, std::vector<double>& times) {
  GradientTraffic gradients(rank.world.engine());
  bool correct = true;
  std::vector<double> measured = all_to_alls(rank, c, iterations, traffic, correct);
  gradients.stop(rank.world);
  if (rank.report == nullptr) return;
  times = std::move(measured);
  findings.correct = findings.correct && correct;
}

// The same in virtual time.
std::vector<double> simulated(const BenchOptions& options, const BenchCase& c, bool loaded, bool priority,
                              Findings& findings) {
  SimRanksOptions sim = sim_options(options);
  sim.priority = priority;
  std::vector<CaseBuffers> work;  // outlives the engines
  work.reserve(static_cast<std::size_t>(options.ranks));
  for (int r = 0; r < options.ranks; ++r) work.emplace_back(c, r);
  SimRanks ranks(sim);
  std::vector<GradientTraffic> gradients;
  for (int r = 0; loaded && r < ranks.size(); ++r) gradients.emplace_back(ranks.engine(r));
  const auto sleep = [](Comm comm, Time length) -> Task<void> {
    co_await comm.sleep_until(comm.now() + length);
  };
  std::vector<double> times;
  SubmitOptions options_of_sleep, tokens;
  options_of_sleep.name = "gap";
  tokens.name = "tokens";
  tokens.traffic = priority ? TrafficClass::blocking : kNoPriority;
  tokens.holds = priority;
  for (int i = -kWarmUp; i < (options.iterations > 0 ? options.iterations : kIterations); ++i) {
    for (CaseBuffers& w : work) w.refill();
    ranks.run(options_of_sleep, [&](Comm comm, int) { return sleep(comm, gap(i)); });
    const Time took =
        ranks.run(tokens, [&](Comm comm, int r) { return work[static_cast<std::size_t>(r)].run(comm); });
    if (i >= 0) times.push_back(seconds(took));
    for (const CaseBuffers& w : work) findings.correct = findings.correct && w.correct();
  }
  return times;
}

void print(const BenchOptions& options, const BenchCase& c, const Findings& f, int iterations,
           BenchReport& report) {
  const double idle = median(f.idle);
  const double priority = median(f.priority);
  const bool has_fifo = !f.fifo.empty();
  const double fifo = has_fifo ? median(f.fifo) : 0;
  const Json row = {
      {"family", "priority"},
      {"algorithm", c.algorithm->name},
      {"transport", options.transport},
      {"simulated", options.transport == "sim"},
      {"shaped", options.link && options.transport != "sim"},
      {"ranks", options.ranks},
      {"bytes", c.bytes},
      {"gradients_in_flight", kGradients},
      {"gradient_bytes", kGradientBytes},
      {"iterations", iterations},
      {"idle_seconds", idle},
      {"priority_seconds", priority},
      {"fifo_seconds", has_fifo ? Json(fifo) : Json(nullptr)},
      {"priority_ratio", priority / idle},
      {"fifo_ratio", has_fifo ? Json(fifo / idle) : Json(nullptr)},
      {"seconds_median", priority},
      {"seconds_p99", quantile(f.priority, 0.99)},
      {"payload_bytes_per_rank", nullptr},  // gradients are counted with it
      {"formula_bytes_per_rank", c.algorithm->bytes(c.shape)},
      {"rounds", nullptr},
      {"formula_rounds", c.algorithm->rounds(c.shape)},
      {"ideal_seconds", ideal_seconds(options, c) ? Json(*ideal_seconds(options, c)) : Json(nullptr)},
      {"efficiency", ideal_seconds(options, c) ? Json(*ideal_seconds(options, c) / priority) : Json(nullptr)},
      {"correct", f.correct}};
  const auto ratio = [idle](double t) { return std::to_string(t / idle).substr(0, 4) + " x idle"; };
  report.add_object(
      row, {"all-to-all of " + size_text(static_cast<double>(c.bytes)) + " to each peer, median of " +
                std::to_string(iterations) + ", beside " + std::to_string(kGradients) + " all-reduces of " +
                size_text(kGradientBytes) + ":",
            "  link idle                     " + seconds_text(idle),
            "  gradients, with priority      " + padded(seconds_text(priority), -10) + ratio(priority),
            "  gradients, first come first   " + (has_fifo ? padded(seconds_text(fifo), -10) + ratio(fifo)
                                                           : "not measured on this transport")});
}

}  // namespace

void bench_priority(const BenchOptions& options, bool launched, BenchReport* report) {
  const int iterations = options.iterations > 0 ? options.iterations : kIterations;
  BenchOptions call = options;
  if (call.algorithms.empty()) call.algorithms = {"pairwise"};
  const BenchCase c = make_cases(call, Family::all_to_all).front();
  Findings findings;
  if (options.transport == "sim") {
    findings.idle = simulated(options, c, false, true, findings);
    findings.priority = simulated(options, c, true, true, findings);
    findings.fifo = simulated(options, c, true, false, findings);
    return print(options, c, findings, iterations, *report);
  }
  on_ranks(options, {.launched = launched}, report, [&](const BenchRank& rank) {
    if (rank.report != nullptr) rank.report->progress("priority: idle, then with priority ...");
    bool correct = true;
    std::vector<double> idle = all_to_alls(rank, c, iterations, TrafficClass::blocking, correct);
    if (rank.report != nullptr) {
      findings.idle = std::move(idle);
      findings.correct = correct;
    }
    with_gradients(rank, c, iterations, TrafficClass::blocking, findings, findings.priority);
  });
  BenchOptions fifo = options;
  fifo.trace.clear();  // the trace is of what the engine does
  // MPI cannot be initialised a second time in a process.
  if (!(launched && options.transport == "mpi")) {
    on_ranks(fifo, {.launched = launched, .priority = false}, report, [&](const BenchRank& rank) {
      if (rank.report != nullptr) rank.report->progress("priority: first come, first served ...");
      with_gradients(rank, c, iterations, kNoPriority, findings, findings.fifo);
    });
  }
  if (report != nullptr) print(options, c, findings, iterations, *report);
}

}  // namespace weft
