// What a user would pick instead: MPI's own collective, on this machine, with every algorithm that Open MPI
// can be tuned to.
#include "bench/mpi_peer.h"

#include <filesystem>
#include <map>
#include <sstream>

#include "process.h"
#include "weft/error.h"

namespace weft::cli {

namespace {

struct Tuned {
  int number;  // of --mca coll_tuned_<collective>_algorithm
  const char* name;
};
struct Collective {
  const char* name;
  std::vector<Tuned> algorithms;
};

// Open MPI 4.1. Those for two processes only are left out.
const std::map<std::string, Collective>& collectives() {
  static const std::map<std::string, Collective> table = {
      {"allreduce",
       {"allreduce",
        {{1, "linear"},
         {2, "nonoverlapping"},
         {3, "recursive_doubling"},
         {4, "ring"},
         {5, "segmented_ring"},
         {6, "rabenseifner"}}}},
      {"reducescatter",
       {"reduce_scatter_block",
        {{1, "linear"}, {2, "recursive_doubling"}, {3, "recursive_halving"}, {4, "butterfly"}}}},
      {"allgather",
       {"allgather", {{1, "linear"}, {2, "bruck"}, {3, "recursive_doubling"}, {4, "ring"}, {5, "neighbor"}}}},
      {"broadcast",
       {"bcast",
        {{1, "linear"},
         {2, "chain"},
         {3, "pipeline"},
         {4, "split_binary"},
         {5, "binary"},
         {6, "binomial"},
         {7, "knomial"},
         {8, "scatter_allgather"},
         {9, "scatter_allgather_ring"}}}},
      {"alltoall", {"alltoall", {{1, "linear"}, {2, "pairwise"}, {3, "bruck"}, {4, "linear_sync"}}}},
  };
  return table;
}

std::string peer_program(const std::string& weft) {
  const std::filesystem::path path = std::filesystem::path(weft).parent_path() / "bench" / "mpi_peer";
  if (!std::filesystem::exists(path)) {
    throw UsageError("--against mpi needs " + path.string() +
                     ", which is built where MPI and Google Benchmark are installed");
  }
  if (find_program("mpirun").empty())
    throw UsageError("--against mpi needs mpirun (apt-get install openmpi-bin)");
  return path.string();
}

void keep_best(std::vector<MpiBest>& best, const std::string& output, const std::string& algorithm) {
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);) {
    const Json row = Json::parse(line);
    MpiBest found;
    found.bytes = row.at("bytes");
    found.algorithm = algorithm;
    found.seconds_median = row.at("seconds_median");
    found.seconds_p99 = row.at("seconds_p99");
    found.correct = row.at("correct");
    bool known = false;
    for (MpiBest& other : best) {
      if (other.bytes != found.bytes) continue;
      known = true;
      if (found.seconds_median < other.seconds_median) other = found;
    }
    if (!known) best.push_back(found);
  }
}

}  // namespace

std::vector<MpiBest> best_of_mpi(const BenchOptions& options, const std::string& program,
                                 BenchReport& report) {
  const std::string peer = peer_program(program);
  const Collective& collective = collectives().at(options.family);
  std::vector<Tuned> tuned = collective.algorithms;
  tuned.insert(tuned.begin(), {0, "default"});
  std::vector<MpiBest> best;
  std::string last_error;
  for (const Tuned& algorithm : tuned) {
    report.progress(std::string("Open MPI, ") + algorithm.name + " ...");
    std::vector<std::string> command = mpirun(options.ranks);
    if (algorithm.number > 0) {
      const std::string key = std::string("coll_tuned_") + collective.name + "_algorithm";
      command.insert(command.end(), {"--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", key,
                                     std::to_string(algorithm.number)});
    }
    command.insert(command.end(), {peer, options.family, "--dtype", std::string(name_of(options.dtype)),
                                   "--json", "--iterations", std::to_string(options.iterations)});
    for (const std::size_t bytes : options.sizes)
      command.insert(command.end(), {"--bytes", std::to_string(bytes)});
    const Finished run = run_program(command, 120s);
    if (run.status == 0)
      keep_best(best, run.output, algorithm.name);
    else
      last_error = run.errors.substr(0, 500);
  }
  if (best.empty()) throw Error("Open MPI ran with none of its algorithms: " + last_error);
  return best;
}

}  // namespace weft::cli
