// Three ranks sum the 30 largest entries of their gradients by SparDL; the rest stays behind as residual.
#include <weft/sparse.h>
#include <weft/weft.h>

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
    options.k = 30;
    options.teams = 1;
    world.run({.name = "gradient"}, [&](weft::Comm comm) {
      return weft::sparse_all_reduce(comm, gradient, state, result, options);
    });
    state.commit();
    std::vector<float> sum(1000);
    result.add_to(sum);
    if (world.rank() != 0) return;
    right = result.finite() && result.num_entries() == 30 && sum[7] == 15.0F && sum[900] == -12.0F;
    std::printf("%lld entries: %g at 7, %g at 900\n", static_cast<long long>(result.num_entries()), sum[7],
                sum[900]);
  });
  return right ? 0 : 1;
}
