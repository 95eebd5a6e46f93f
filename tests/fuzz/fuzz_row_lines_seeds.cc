// Writes seeds for fuzz_row_lines into the folder it is given: a line of each rule, type and way of being
// held.
#include <fstream>
#include <string>
#include <vector>

#include "state/row_lines.h"

using namespace weft;  // NOLINT(google-build-using-namespace): a single-purpose program

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const std::vector<std::byte> values(24);
  const std::vector<RowLine> lines = {
      {{{"data_parallel", "residual", "wte"},
        DType::float32,
        LayoutRule::sum,
        Shard::whole({6}),
        {1, 4},
        2.5},
       RowLine::Held::here,
       checksums_of(values)},
      {{{"data_parallel", "residual", "a b"}, DType::float64, LayoutRule::sum, Shard::whole({3}), {1, 4}, 0},
       RowLine::Held::zeros,
       ""},
      {{{"optimizer", "step", "wte"}, DType::int64, LayoutRule::same, Shard::whole({3}), {}},
       RowLine::Held::told,
       checksums_of(values)},
      {{{"model", "value", "t"}, DType::float32, LayoutRule::moves, Shard::range({4, 6}, 1, 2, 2), {}},
       RowLine::Held::here,
       checksums_of(std::vector<std::byte>(32))},
      {{{"data_parallel", "regions", "x"}, DType::int64, LayoutRule::restart, Shard::whole({0}), {}},
       RowLine::Held::here,
       ""},
  };
  std::string all;
  for (std::size_t i = 0; i < lines.size(); ++i) {
    all += text_of(lines[i]) + "\n";
    std::ofstream(std::string(argv[1]) + "/line" + std::to_string(i), std::ios::binary) << text_of(lines[i]);
  }
  std::ofstream(std::string(argv[1]) + "/all", std::ios::binary) << all;
  return 0;
}
