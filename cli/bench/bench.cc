// weft bench: checks what was asked for, finds or starts the ranks, and runs the family.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "bench/embedding_flags.h"
#include "bench/moe_flags.h"
#include "bench/mpi_peer.h"
#include "bench/sparse_flags.h"
#include "launcher.h"
#include "measure/bench/run.h"
#include "process.h"
#include "sizes.h"
#include "verbs.h"
#include "weft/error.h"
#include "world/open.h"
#include "world/placement.h"

namespace weft::cli {

namespace {

constexpr const char* kNames[] = {"allreduce",        "reducescatter", "allgather", "broadcast", "alltoall",
                                  "sparse_allreduce", "embedding",     "moe",       "priority",  "overhead"};
constexpr int kMostThreads = 512, kMostSimulated = 65536;

// As typed.
struct Typed {
  std::string family, transport, link, ideal, scale_up, dtype = "float32", against, trace;
  std::vector<std::string> algorithms, bytes;
  int ranks = 0, nodes = 0, iterations = 0;
  double byte_scale = 1;
  bool json = false, spoil = false;
  TypedSparse sparse;
  TypedEmbedding embedding;
  TypedMoe moe;
};

Family family_of(const std::string& name) {
  for (const Family family : kFamilies) {
    if (name_of(family) == name) return family;
  }
  return Family::message;
}

void check_family(const std::string& name) {
  std::string list;
  for (const char* known : kNames) {
    if (name == known) return;
    list += (list.empty() ? "" : ", ") + std::string(known);
  }
  throw UsageError("bench: there is no family '" + name + "'; there are: " + list);
}

DType parse_dtype(const std::string& text) {
  std::string list;
  for (int i = 0; i <= static_cast<int>(DType::int64); ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name_of(dtype) == text) return dtype;
    list += (list.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  throw UsageError("--dtype '" + text + "' is none of: " + list);
}

std::vector<std::size_t> sizes_of(const Typed& typed) {
  std::vector<std::size_t> sizes;
  for (const std::string& text : typed.bytes) {
    const std::vector<std::size_t> more = parse_sizes(text);
    sizes.insert(sizes.end(), more.begin(), more.end());
  }
  if (!sizes.empty()) return sizes;
  constexpr std::size_t kKiB = 1024, kMiB = 1024 * kKiB;
  if (typed.family == "priority") return {kMiB};
  if (typed.family == "allgather" || typed.family == "alltoall") return {kKiB, 32 * kKiB, kMiB};
  return {kKiB, 32 * kKiB, kMiB, 16 * kMiB};
}

// "auto" becomes what the launcher means; nothing, threads.
std::string transport_of(const Typed& typed, const Placement& place) {
  const std::string known = typed.transport.empty() ? "auto" : typed.transport;
  if (known != "auto" && known != "threads" && known != "tcp" && known != "mpi" && known != "sim") {
    throw UsageError("--transport '" + known + "' is none of: threads, tcp, mpi, sim");
  }
  return known != "auto" ? known : chosen_transport(Config::from_environment(), place);
}

void check_built(const std::string& transport) {
  if ((transport == "tcp" && WEFT_HAVE_TCP == 0) || (transport == "mpi" && WEFT_HAVE_MPI == 0)) {
    throw UsageError("this weft was built without the " + transport +
                     " transport (weft info lists what it has)");
  }
}

void check_ranks(const Typed& typed, const BenchOptions& options, const Placement& place) {
  const bool launched = place.launcher != Placement::Launcher::none;
  const int most = options.transport == "sim" ? kMostSimulated : kMostThreads;
  if (options.ranks < 1 || options.ranks > most) {
    throw UsageError("--ranks must be between 1 and " + std::to_string(most) + " on " + options.transport);
  }
  if (launched && typed.ranks != 0 && typed.ranks != place.size) {
    throw UsageError("--ranks " + std::to_string(typed.ranks) + ", but the launcher (" +
                     std::string(name_of(place.launcher)) + ") started " + std::to_string(place.size) +
                     "; leave --ranks out");
  }
  if (launched && (options.transport == "threads" || options.transport == "sim")) {
    throw UsageError("--transport " + options.transport +
                     " has its ranks in one process; run it without a launcher");
  }
  if (options.nodes < 0 || options.nodes > options.ranks) {
    throw UsageError("--nodes " + std::to_string(options.nodes) + ": there are only " +
                     std::to_string(options.ranks) + " ranks to share them");
  }
}

void check_link(const Typed& typed, BenchOptions& options) {
  const bool emulated = options.transport == "threads" || options.transport == "sim";
  if (!typed.link.empty()) {
    if (!emulated) {
      throw UsageError("--link shapes threads and sim only; for a slow network under " + options.transport +
                       " see tools/netlab, and name its rate with --ideal");
    }
    options.link = parse_link(typed.link);
  } else if (options.transport == "sim" || (options.family == "priority" && emulated)) {
    options.link = parse_link("1gbit,50us");
  }
  if (!typed.ideal.empty()) {
    if (options.link) throw UsageError("--ideal names the rate of a real link; --link has one already");
    options.ideal = parse_link(typed.ideal);
  }
  if (!typed.scale_up.empty()) {
    if (options.nodes == 0 || !options.link)
      throw UsageError("--scale-up is the network inside --nodes, beside --link");
    options.scale_up_bytes_per_second = parse_scale_up(typed.scale_up, *options.link);
  }
  if (!std::isfinite(typed.byte_scale) || typed.byte_scale < 1)
    throw UsageError("--byte-scale must be a number from 1 on");
  if (typed.byte_scale != 1 && options.transport != "sim")
    throw UsageError("--byte-scale is for --transport sim");
  // The simulator's clock counts parts of a nanosecond.
  constexpr double kLongest = 1e6;  // seconds, of the slowest algorithm's busiest port
  const double largest =
      options.sizes.empty() ? 0.0 : static_cast<double>(*std::ranges::max_element(options.sizes));
  if (options.transport == "sim" &&
      2.0 * options.ranks * largest > kLongest * options.link->bytes_per_second) {
    throw UsageError("this would take more than " + std::to_string(static_cast<int>(kLongest)) +
                     " simulated seconds: take fewer bytes, ranks or a faster --link");
  }
}

void check_family_options(const Typed& typed, const BenchOptions& options, bool launched) {
  if (!typed.against.empty()) {
    if (typed.against != "mpi") throw UsageError("--against knows mpi only");
    if (options.link || launched || family_of(options.family) == Family::message) {
      throw UsageError(
          "--against mpi compares collectives on this machine without a link; under netlab run "
          "bench/mpi_peer beside it");
    }
    const DType d = options.dtype;
    if (d != DType::float32 && d != DType::float64 && d != DType::int32 && d != DType::int64) {
      throw UsageError("--against mpi compares float32, float64, int32 and int64: MPI has no " +
                       std::string(name_of(d)) + " sums");
    }
  }
  if (options.family == "overhead" &&
      (options.transport != "threads" || (typed.ranks != 0 && typed.ranks != 2))) {
    throw UsageError("bench overhead is defined for 2 ranks on threads");
  }
  if (options.family == "priority" && (options.ranks < 2 || options.byte_scale != 1)) {
    throw UsageError("bench priority needs at least 2 ranks, and counts every byte as one");
  }
  if (typed.iterations < 0) throw UsageError("--iterations must be 1 or more");
}

void check_sparse_options(const Typed& typed, BenchOptions& options) {
  if (options.family != "sparse_allreduce") return refuse_sparse_options(typed.sparse);
  if (!typed.bytes.empty() || options.dtype != DType::float32) {
    throw UsageError("bench sparse_allreduce counts float32 elements: --length, without --bytes and --dtype");
  }
  options.sparse = checked(typed.sparse, options.ranks);
  if (options.sparse.crossover && options.transport != "sim")
    throw UsageError("--crossover is for --transport sim");
  if (options.transport == "sim" && !options.trace.empty()) {
    throw UsageError("bench sparse_allreduce writes no --trace in virtual time");
  }
  check_sparse(options);
}

void check_embedding_options(const Typed& typed, BenchOptions& options) {
  if (options.family == "moe") return refuse_embedding_options(typed.embedding, {"--tokens", "--zipf"});
  if (options.family != "embedding") return refuse_embedding_options(typed.embedding);
  if (!typed.bytes.empty() || !typed.algorithms.empty() || options.dtype != DType::float32) {
    throw UsageError(
        "bench embedding has a float32 table of --rows and --columns, and --ways: without --bytes, --dtype "
        "and "
        "--algorithm");
  }
  options.embedding = checked(typed.embedding);
  options.algorithms = typed.embedding.ways;
  check_embedding(options);
}

void check_moe_options(const Typed& typed, BenchOptions& options) {
  if (options.family != "moe") return refuse_moe_options(typed.moe);
  if (!typed.bytes.empty() || options.dtype != DType::float32)
    throw UsageError("bench moe has float32 rows of --tokens and --width: without --bytes and --dtype");
  options.moe = checked(typed.moe, typed.embedding.bench, was_given(typed.embedding, "--tokens"));
  check_moe(options);
}

// Before the run, not after it; without a trace of its own: ranks that are processes write to names beside
// it.
void check_writable(const std::string& path) {
  const std::filesystem::path file(path);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  const bool there = std::filesystem::exists(file);
  if (::access((there ? file : folder).c_str(), W_OK) != 0 || std::filesystem::is_directory(file))
    throw UsageError("--trace " + path + ": cannot be written");
}

BenchOptions checked(const Typed& typed, const Placement& place) {
  check_family(typed.family);
  const bool launched = place.launcher != Placement::Launcher::none;
  BenchOptions options;
  options.family = typed.family;
  options.algorithms = typed.algorithms;
  options.sizes = sizes_of(typed);
  options.dtype = parse_dtype(typed.dtype);
  options.transport = transport_of(typed, place);
  check_built(options.transport);
  options.ranks = launched ? place.size : typed.family == "overhead" ? 2 : typed.ranks != 0 ? typed.ranks : 4;
  options.ranks_given = launched || typed.ranks != 0;
  options.nodes = typed.nodes;
  options.byte_scale = typed.byte_scale;
  options.iterations = typed.iterations;
  options.json = typed.json;
  options.against_mpi = !typed.against.empty();
  options.spoil = typed.spoil;
  options.trace = typed.trace;
  if (!typed.trace.empty()) check_writable(typed.trace);
  check_ranks(typed, options, place);
  check_link(typed, options);
  check_family_options(typed, options, launched);
  check_sparse_options(typed, options);
  check_embedding_options(typed, options);
  check_moe_options(typed, options);
  return options;
}

// The same command again, as ranks that a launcher starts.
int start_ranks(const BenchOptions& options, const Invocation& call) {
  std::vector<std::string> command = {call.program};
  command.insert(command.end(), call.arguments.begin(), call.arguments.end());
  if (options.transport == "tcp") {
    LaunchOptions launch_options;
    launch_options.ranks = options.ranks;
    launch_options.prefix = false;
    launch_options.command = command;
    return launch(launch_options);
  }
  if (find_program("mpirun").empty())
    throw UsageError("--transport mpi needs mpirun (apt-get install openmpi-bin)");
  std::vector<std::string> whole = mpirun(options.ranks);
  whole.insert(whole.end(), command.begin(), command.end());
  std::vector<char*> argv;
  for (std::string& argument : whole) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execvp(argv[0], argv.data());
  throw Error("mpirun could not be started: " + std::string(std::strerror(errno)));
}

int bench(const Typed& typed, const Invocation& call) {
  const Placement place = detect_placement();
  const BenchOptions options = checked(typed, place);
  const bool launched = place.launcher != Placement::Launcher::none;
  const Family family = family_of(options.family);
  const bool collective = family != Family::message;
  const std::vector<BenchCase> cases = collective ? make_cases(options, family) : std::vector<BenchCase>{};
  if (!launched && (options.transport == "tcp" || options.transport == "mpi")) {
    if (options.against_mpi) throw UsageError("--against mpi goes with --transport threads");
    return start_ranks(options, call);
  }

  std::unique_ptr<BenchReport> report;
  if (place.rank == 0) report = std::make_unique<BenchReport>(options, options.transport);
  if (options.against_mpi) report->add_mpi(best_of_mpi(options, call.program, *report), family);
  if (options.family == "overhead") {
    bench_overhead(options, *report);
  } else if (options.family == "priority") {
    bench_priority(options, launched, report.get());
  } else if (options.family == "sparse_allreduce") {
    bench_sparse(options, launched, report.get());
  } else if (options.family == "embedding") {
    bench_embedding(options, launched, report.get());
  } else if (options.family == "moe") {
    bench_moe(options, launched, report.get());
  } else if (options.transport == "sim") {
    bench_sim(options, cases, *report);
  } else {
    on_ranks(options, {.launched = launched}, report.get(),
             [&](const BenchRank& rank) { bench_cases(options, cases, rank); });
  }
  if (report == nullptr) return kOk;
  report->finish();
  return report->all_correct() ? kOk : kFailed;
}

void add_options(CLI::App& verb, Typed& typed) {
  verb.add_option(
          "family", typed.family,
          "allreduce, reducescatter, allgather, broadcast, alltoall, sparse_allreduce, embedding, moe, "
          "priority, overhead")
      ->required();
  verb.add_option("--algorithm", typed.algorithms,
                  "names, with commas; auto: what the cost model takes (default: each that can run)")
      ->delimiter(',');
  verb.add_option("--ranks", typed.ranks, "default 4; under a launcher: its number")
      ->check(CLI::Range(1, kMostSimulated));
  verb.add_option("--transport", typed.transport,
                  "threads (default), tcp, mpi, sim; under a launcher: its own");
  verb.add_option("--link", typed.link,
                  "RATE[,LATENCY], e.g. 1gbit,50us: emulated on threads, simulated on sim");
  verb.add_option("--ideal", typed.ideal,
                  "RATE of the real link (tcp, mpi), for ideal_seconds; shapes nothing");
  verb.add_option("--nodes", typed.nodes, "the ranks share this many nodes, and a node's ranks its port");
  verb.add_option("--scale-up", typed.scale_up, "RATE inside a node, or 10x: ten times --link's");
  verb.add_option("--byte-scale", typed.byte_scale, "sim: each real byte counts as S");
  verb.add_option("--bytes", typed.bytes,
                  "N or FROM..TO (doubling): a rank's vector (allreduce, reducescatter, broadcast), its "
                  "block (allgather), what "
                  "it sends to each peer (alltoall, priority)")
      ->delimiter(',');
  verb.add_option("--iterations", typed.iterations,
                  "measured operations (default: about a second of them, at least 10)");
  verb.add_option("--dtype", typed.dtype,
                  "float32 (default), float64, bfloat16, float16, int32, int64, bytes");
  verb.add_flag("--json", typed.json, "one object a line on stdout, and nothing else");
  verb.add_option("--against", typed.against, "mpi: Open MPI's best beside it");
  verb.add_option("--trace", typed.trace, "write a Chrome/Perfetto trace there (processes: FILE.rank<r>)");
  add_sparse_options(verb, typed.sparse);
  add_embedding_options(verb, typed.embedding);
  add_moe_options(verb, typed.moe);
  verb.add_flag("--spoil-result", typed.spoil)->group("");  // tests
}

}  // namespace

Run add_bench(CLI::App& app) {
  CLI::App* verb = app.add_subcommand("bench", "measure collectives, priority and the engine's own cost");
  const auto typed = std::make_shared<Typed>();
  add_options(*verb, *typed);
  verb->footer(
      "Examples:\n"
      "  weft bench allreduce --ranks 4 --link 1gbit,50us --bytes 1MiB..16MiB\n"
      "  weft bench allreduce --bytes 64MiB --against mpi\n"
      "  weft bench alltoall --ranks 8 --nodes 2 --link 100mbit,50us --scale-up 1gbit --bytes 64KiB\n"
      "  weft bench allgather --transport sim --ranks 1024 --bytes 1KiB --algorithm bruck --json\n"
      "  weft bench sparse_allreduce --length 25000000 --density 0.01 --link 1gbit,50us\n"
      "  weft bench embedding --rows 793471 --tokens 2560 --negatives 8192 --ways allgather,embrace --link "
      "1gbit,50us\n"
      "  weft bench moe --tokens 1024 --width 256 --experts 16 --routing zipf --ranks 8 --link 1gbit,50us\n"
      "  mpirun -n 4 weft bench allreduce          tools/netlab run -- weft bench priority\n"
      "docs/measuring.md defines every field.");
  return [typed](const Invocation& call) { return bench(*typed, call); };
}

}  // namespace weft::cli
