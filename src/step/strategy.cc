#include "step/strategy.h"

namespace weft {

namespace {

[[noreturn]] void refuse(const Strategy& strategy, const std::string& what) {
  throw UsageError(std::string(strategy.name()) + ": " + what);
}

}  // namespace

void Strategy::gradient_ready(int, std::span<const float>) { refuse(*this, "it takes no float32 gradients"); }
void Strategy::gradient_ready(int, std::span<const double>) {
  refuse(*this, "it takes no float64 gradients");
}
void Strategy::result_of(int, std::span<float>) const { refuse(*this, "it has no float32 results"); }
void Strategy::result_of(int, std::span<double>) const { refuse(*this, "it has no float64 results"); }
void Strategy::start(int, const When&, TensorSource&) {
  refuse(*this, "it has nothing that starts at a place of the table");
}

}  // namespace weft
