#include "workload/job_steps.h"

#include <algorithm>

namespace weft {

std::vector<double> job_steps(std::span<const std::vector<double>> ranks,
                              std::span<const std::int64_t> pauses) {
  std::vector<double> out;
  std::vector<double> ends(ranks.size(), 0.0);  // of each rank, since they began together
  double before = 0;
  for (std::size_t step = 0; step < ranks.front().size(); ++step) {
    if (std::find(pauses.begin(), pauses.end(), static_cast<std::int64_t>(step)) != pauses.end()) {
      std::fill(ends.begin(), ends.end(), 0.0);
      before = 0;
    }
    for (std::size_t r = 0; r < ranks.size(); ++r) ends[r] += ranks[r][step];
    const double last = *std::max_element(ends.begin(), ends.end());
    out.push_back(last - before);
    before = last;
  }
  return out;
}

}  // namespace weft
