// Three ranks keep the two largest entries of the sum of their gradients; the rest waits for the next step.
#include <weft/sparse.h>
#include <weft/weft.h>

#include <cmath>
#include <cstdio>
#include <vector>

int main() {
  bool right = true;
  weft::run_ranks(3, [&right](weft::World& world) {
    std::vector<float> gradient(1000, 0.25F);
    gradient[7] = 5.0F;
    gradient[900] = -4.0F;
    weft::SparseState state(1000);
    weft::SparseResult result;
    weft::SparseOptions options;
    options.k = 3;  // an entry a block
    world.run({.name = "gradient"}, [&](weft::Comm comm) {
      return weft::sparse_all_reduce(comm, gradient, state, result, options);
    });
    state.commit();
    std::vector<float> sum(1000);
    result.add_to(sum);
    if (world.rank() != 0) return;
    right = result.finite() && sum[7] == 15.0F && sum[900] == -12.0F;
    std::printf("%lld entries: %g at 7, %g at 900\n", static_cast<long long>(result.num_entries()), sum[7],
                sum[900]);
  });
  return right ? 0 : 1;
}
