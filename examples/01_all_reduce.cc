// A sum over ranks, twice: by the simplest call, and as an operation that runs while the program computes.
//
//   build/release/examples/01_all_reduce 4                              four ranks, threads of one process
//   build/release/weft launch -n 4 -- build/release/examples/01_all_reduce    four processes, over tcp
//   mpirun -n 4 build/release/examples/01_all_reduce                    four processes, over MPI
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <vector>

#include "weft/weft.h"

namespace {

void run(weft::World& world) {
  // All ranks call with vectors of one length; everybody ends with the sum.
  std::vector<float> values(1000, static_cast<float>(world.rank()));
  world.all_reduce(std::span<float>(values));

  // The same as an operation of the engine: submit() returns at once with a ticket, and its thread moves the
  // bytes. The memory must stay until the ticket is done.
  std::vector<float> gradient(1'000'000, 1.0F);
  const weft::Dense data(std::span<float>{gradient});
  const weft::Ticket ticket = world.engine().submit(
      world.comm(), {.name = "gradient"}, [data](weft::Comm comm) { return weft::all_reduce(comm, data); });
  const double meanwhile = std::accumulate(values.begin(), values.end(), 0.0);
  ticket.wait();  // rethrows what went wrong, for example that a rank has died

  std::printf("rank %d of %d over %s: %g from each, %g in all; gradient %g\n", world.rank(), world.size(),
              std::string(world.transport()).c_str(), values[0], meanwhile, gradient[0]);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (argc > 1) {
      weft::run_ranks(std::atoi(argv[1]), run);
    } else {
      run(*weft::join_world());  // this process's place comes from its launcher; alone it is rank 0 of 1
    }
    return 0;
  } catch (const std::exception& e) {  // one sentence, which names ranks and operations
    std::fprintf(stderr, "01_all_reduce: %s\n", e.what());
    return 1;
  }
}
