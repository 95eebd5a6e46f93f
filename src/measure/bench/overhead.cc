// What the engine costs: 4-byte all-reduces of two ranks on threads, 64 in flight, once through engines
// (submit, ticket, wait, from the program's thread) and once as bare coroutines on the same transport, each
// rank driven by its own thread.
#include <exception>
#include <memory>
#include <thread>

#include "base/statistics.h"
#include "measure/bench/run.h"
#include "transports/bare_rank.h"
#include "transports/threads.h"

namespace weft {

namespace {

constexpr int kRanks = 2;
constexpr int kInFlight = 64;
constexpr int kWarmUp = 5;
constexpr std::string_view kAlgorithm = "recursive_doubling";

using Values = std::vector<float>;

// Seconds of a rank for each batch of kInFlight operations.
std::vector<double> through_engine(World& world, int batches, bool& correct) {
  SteadyClock clock;
  std::vector<double> times;
  Values values(kInFlight, 1.0F);
  std::vector<Ticket> tickets(kInFlight);
  const Comm comm = world.comm();
  SubmitOptions options;
  options.name = "overhead";
  AllReduceOptions call;
  call.algorithm = kAlgorithm;
  for (int batch = -kWarmUp; batch < batches; ++batch) {
    if (batch <= 0) world.barrier();
    const Time start = clock.now();
    for (std::size_t i = 0; i < kInFlight; ++i) {
      const Dense data{std::span(&values[i], 1)};
      tickets[i] =
          world.engine().submit(comm, options, [data, call](Comm c) { return all_reduce(c, data, call); });
    }
    for (const Ticket& ticket : tickets) ticket.wait();
    if (batch >= 0) times.push_back(seconds(clock.now() - start));
    for (float& value : values) correct = correct && std::exchange(value, 1.0F) == kRanks;
  }
  return times;
}

// The same without an engine: one coroutine starts the 64 and awaits them all.
Task<void> bare(Comm comm, int batches, Values& values, std::vector<double>& times) {
  AllReduceOptions call;
  call.algorithm = kAlgorithm;
  constexpr std::uint32_t kHops = 64;  // more than one all-reduce takes
  for (int batch = -kWarmUp; batch < batches; ++batch) {
    const Time start = comm.now();
    std::vector<Task<void>> tasks;
    for (std::size_t i = 0; i < kInFlight; ++i) {
      const auto base =
          static_cast<std::uint32_t>((batch + kWarmUp) * kInFlight) + static_cast<std::uint32_t>(i);
      const Dense data{std::span(&values[i], 1)};
      tasks.push_back(all_reduce(comm.hops_from(base * kHops), data, call));
    }
    co_await when_all(tasks);
    if (batch >= 0) times.push_back(seconds(comm.now() - start));
    for (float& value : values) value = 1.0F;
  }
}

std::vector<std::vector<double>> run_bare(int batches) {
  ThreadsOptions options;
  options.ranks = kRanks;
  ThreadsWorld world(std::move(options));
  std::vector<std::vector<double>> times(kRanks);
  std::vector<std::exception_ptr> errors(kRanks);
  std::vector<std::thread> threads;
  threads.reserve(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const auto me = static_cast<std::size_t>(r);
      try {
        Values values(kInFlight, 1.0F);
        BareRank rank(world.transport(r));
        rank.start([&](Comm comm) { return bare(comm, batches, values, times[me]); });
        rank.run();
      } catch (...) {
        errors[me] = std::current_exception();
        world.transport(r).close("the benchmark failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
  return times;
}

// Median over batches of the slower rank, per operation.
double per_operation(const std::vector<std::vector<double>>& times) {
  std::vector<double> slower;
  slower.reserve(times[0].size());
  for (std::size_t i = 0; i < times[0].size(); ++i) slower.push_back(std::max(times[0][i], times[1][i]));
  return median(slower) / kInFlight;
}

}  // namespace

void bench_overhead(const BenchOptions& options, BenchReport& report) {
  const int batches = options.iterations > 0 ? options.iterations : 200;
  report.progress("overhead: bare coroutines ...");
  const double bare_seconds = per_operation(run_bare(batches));
  report.progress("overhead: engine ...");
  std::vector<std::vector<double>> times(kRanks);
  std::vector<char> correct(kRanks, 1);
  RunOptions run;
  run.config = Config::from_environment();
  run_ranks(kRanks, run, [&](World& world) {
    const auto me = static_cast<std::size_t>(world.rank());
    bool right = true;
    times[me] = through_engine(world, batches, right);
    correct[me] = right ? 1 : 0;
  });
  const double engine_seconds = per_operation(times);
  const Json row = {{"family", "overhead"},
                    {"algorithm", kAlgorithm},
                    {"transport", "threads"},
                    {"ranks", kRanks},
                    {"bytes", sizeof(float)},
                    {"in_flight", kInFlight},
                    {"iterations", batches},
                    {"engine_seconds", engine_seconds},
                    {"bare_seconds", bare_seconds},
                    {"added_seconds", engine_seconds - bare_seconds},
                    {"correct", correct[0] != 0 && correct[1] != 0}};
  report.add_object(row, {"4-byte all-reduce, 64 in flight, per operation (median of " +
                              std::to_string(batches) + " batches):",
                          "  through the engine   " + seconds_text(engine_seconds),
                          "  as a bare coroutine  " + seconds_text(bare_seconds),
                          "  the engine adds      " + seconds_text(engine_seconds - bare_seconds)});
}

}  // namespace weft
