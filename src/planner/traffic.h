// What travels in a step, by whose it is, in words.
#pragma once

#include <array>
#include <cstddef>
#include <string_view>

#include "step/strategies.h"
#include "world/mesh.h"

namespace weft {

struct Traffic {
  std::string_view strategy;  // Strategy::name(), or that and a number ("tables-2")
  std::string_view name;
  Axis axis;
};
inline constexpr std::array kTraffic{
    Traffic{"tensor", "tensor-parallel sums", Axis::tp},
    Traffic{"pipeline", "activations and gradients between stages", Axis::pp},
    Traffic{"tied", "sums of what stages share", Axis::pp},
    Traffic{"experts", "rows of experts", Axis::ep},
    Traffic{"router", "counts of gates", Axis::dp},
    Traffic{"embedding", "rows of tables", Axis::dp},
    Traffic{Strategies::kOwnExchanges, "tokens and verdicts", Axis::dp},
    Traffic{"", "sums of gradients", Axis::dp}};  // all others

// Its place there.
inline std::size_t traffic_of(std::string_view strategy) {
  const std::string_view kind = strategy.substr(0, strategy.find('-'));
  std::size_t i = 0;
  while (i + 1 < kTraffic.size() && kTraffic[i].strategy != kind) ++i;
  return i;
}

}  // namespace weft
