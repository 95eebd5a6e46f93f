// The first program of the README: four ranks sum their gradients.
#include <weft/weft.h>

#include <cstdio>
#include <vector>

int main() {
  weft::run_ranks(4, [](weft::World& world) {
    std::vector<float> gradient(1 << 20, static_cast<float>(world.rank()));
    world.all_reduce(std::span(gradient));
    if (world.rank() == 0) std::printf("every element is %g on all %d ranks\n", gradient[0], world.size());
  });
}
