// What a user would pick instead of weft: MPI's own collectives, timed as `weft bench` times (a barrier
// before each iteration, the slowest rank, median and p99), on the same data, in place. One JSON object a
// line, or one line of text.
//
//   mpirun -n 4 mpi_peer allreduce --bytes 1MiB..64MiB [--iterations I] [--dtype float32|float64|int32|int64]
//       [--json]
#include <mpi.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/statistics.h"
#include "base/units.h"
#include "cli/sizes.h"

namespace {

struct Type {
  const char* name;
  MPI_Datatype mpi;
  std::size_t bytes;
};
struct Arguments {
  std::string family;
  std::vector<std::size_t> sizes;
  int iterations = 0;
  Type type{"float32", MPI_FLOAT, 4};
  bool json = false;
};

Type type_of(const std::string& name) {
  const Type types[] = {{"float32", MPI_FLOAT, 4},
                        {"float64", MPI_DOUBLE, 8},
                        {"int32", MPI_INT32_T, 4},
                        {"int64", MPI_INT64_T, 8}};
  for (const Type& type : types) {
    if (name == type.name) return type;
  }
  throw weft::UsageError("--dtype '" + name + "' is none of: float32, float64, int32, int64");
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&]() -> std::string {
      if (++i >= argc) throw weft::UsageError(word + " needs a value");
      return argv[i];
    };
    if (word == "--json")
      arguments.json = true;
    else if (word == "--iterations")
      arguments.iterations = static_cast<int>(weft::parse_integer(value(), 0, 1'000'000));
    else if (word == "--dtype")
      arguments.type = type_of(value());
    else if (word == "--bytes") {
      for (const std::size_t bytes : weft::parse_sizes(value())) arguments.sizes.push_back(bytes);
    } else if (word.rfind("--", 0) != 0 && arguments.family.empty())
      arguments.family = word;
    else
      throw weft::UsageError("'" + word + "' is not understood");
  }
  if (arguments.sizes.empty()) arguments.sizes = {std::size_t{1} << 20};
  for (const char* known : {"allreduce", "reducescatter", "allgather", "broadcast", "alltoall"}) {
    if (arguments.family == known) return arguments;
  }
  throw weft::UsageError("the family is one of: allreduce, reducescatter, allgather, broadcast, alltoall");
}

// One rank's buffers. Inputs are ones (reductions) or the sender's rank, so that every result is known.
class Peer {
 public:
  Peer(const Arguments& arguments, std::size_t bytes) : arguments_(arguments) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    if (bytes % arguments.type.bytes != 0) throw weft::UsageError("--bytes is no whole number of elements");
    by_block_ = arguments.family == "allgather" || arguments.family == "alltoall";
    count_ = static_cast<int>(bytes / arguments.type.bytes);
    const std::size_t whole = bytes * static_cast<std::size_t>(by_block_ ? size_ : 1);
    input_.resize(whole);
    data_.resize(whole);
    const bool reduces = arguments.family == "allreduce" || arguments.family == "reducescatter";
    if (arguments.family == "reducescatter" && count_ % size_ != 0) {
      throw weft::UsageError("reducescatter: MPI_Reduce_scatter_block needs equal blocks");
    }
    fill(input_, reduces ? 1 : rank_ + 1);
  }

  void refill() { std::memcpy(data_.data(), input_.data(), data_.size()); }

  void run() {
    const MPI_Datatype type = arguments_.type.mpi;
    const std::string& family = arguments_.family;
    if (family == "allreduce")
      MPI_Allreduce(MPI_IN_PLACE, data_.data(), count_, type, MPI_SUM, MPI_COMM_WORLD);
    else if (family == "reducescatter")
      MPI_Reduce_scatter_block(MPI_IN_PLACE, data_.data(), count_ / size_, type, MPI_SUM, MPI_COMM_WORLD);
    else if (family == "allgather")
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, data_.data(), count_, type, MPI_COMM_WORLD);
    else if (family == "broadcast")
      MPI_Bcast(data_.data(), count_, type, 0, MPI_COMM_WORLD);
    else
      MPI_Alltoall(input_.data(), count_, type, data_.data(), count_, type, MPI_COMM_WORLD);
  }

  bool correct() {
    std::vector<char> expected(data_.size());
    std::size_t compared = data_.size();
    const std::string& family = arguments_.family;
    if (family == "allreduce" || family == "reducescatter") {
      fill(expected, size_);
      if (family == "reducescatter") compared /= static_cast<std::size_t>(size_);
    } else if (family == "broadcast") {
      fill(expected, 1);
    } else {
      const std::size_t block = data_.size() / static_cast<std::size_t>(size_);
      for (int r = 0; r < size_; ++r) {
        std::vector<char> part(block);
        fill(part, r + 1);
        std::copy(part.begin(), part.end(), expected.begin() + static_cast<std::ptrdiff_t>(block) * r);
      }
    }
    return std::memcmp(expected.data(), data_.data(), compared) == 0;
  }

 private:
  template <class T>
  static void fill_with(std::vector<char>& memory, T value) {
    for (std::size_t i = 0; i + sizeof(T) <= memory.size(); i += sizeof(T))
      std::memcpy(&memory[i], &value, sizeof(T));
  }
  void fill(std::vector<char>& memory, int value) const {
    const std::string name = arguments_.type.name;
    if (name == "float32")
      fill_with(memory, static_cast<float>(value));
    else if (name == "float64")
      fill_with(memory, static_cast<double>(value));
    else if (name == "int32")
      fill_with(memory, static_cast<std::int32_t>(value));
    else
      fill_with(memory, static_cast<std::int64_t>(value));
  }

  const Arguments& arguments_;
  int rank_ = 0, size_ = 1, count_ = 0;
  bool by_block_ = false;
  std::vector<char> input_, data_;
};

void largest_of_ranks(std::vector<double>& values) {
  MPI_Allreduce(MPI_IN_PLACE, values.data(), static_cast<int>(values.size()), MPI_DOUBLE, MPI_MAX,
                MPI_COMM_WORLD);
}

// The same rule as weft bench: about a second of iterations, at least 10, after 3 to warm up.
void measure(const Arguments& arguments, std::size_t bytes) {
  Peer peer(arguments, bytes);
  std::vector<double> times;
  bool correct = true;
  const auto iterate = [&](bool check) {
    peer.refill();
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    peer.run();
    times.push_back(MPI_Wtime() - start);
    if (check) correct = correct && peer.correct();
  };
  for (int i = 0; i < 3; ++i) iterate(i == 0);
  std::vector<double> last(1, times.back());
  largest_of_ranks(last);
  times.clear();
  const int fits = static_cast<int>(std::min(1000.0, 1.0 / std::max(last[0], 1e-9)));
  const int iterations = arguments.iterations > 0 ? arguments.iterations : std::max(10, fits);
  for (int i = 0; i < iterations; ++i) iterate(i + 1 == iterations);
  times.push_back(correct ? 0 : 1);
  largest_of_ranks(times);
  correct = times.back() == 0;
  times.pop_back();

  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != 0) return;
  const double middle = weft::median(times);
  const double p99 = weft::quantile(times, 0.99);
  if (arguments.json) {
    std::printf(
        "{\"family\":\"%s\",\"transport\":\"Open "
        "MPI\",\"ranks\":%d,\"dtype\":\"%s\",\"bytes\":%zu,\"iterations\":%d,"
        "\"seconds_median\":%.9g,\"seconds_p99\":%.9g,\"correct\":%s}\n",
        arguments.family.c_str(), size, arguments.type.name, bytes, iterations, middle, p99,
        correct ? "true" : "false");
  } else {
    std::printf("%s, %d ranks, %zu bytes: median %.6f s, p99 %.6f s over %d iterations, %s\n",
                arguments.family.c_str(), size, bytes, middle, p99, iterations,
                correct ? "correct" : "WRONG");
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    const Arguments arguments = parse(argc, argv);
    for (const std::size_t bytes : arguments.sizes) measure(arguments, bytes);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "mpi_peer: %s\n", e.what());
    status = 2;
  }
  MPI_Finalize();
  return status;
}
