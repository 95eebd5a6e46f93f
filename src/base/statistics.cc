#include "base/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace weft {

namespace {

double middle_of(const std::vector<double>& sorted) {
  const std::size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  return middle_of(values);
}

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  const double position = std::ceil(share * static_cast<double>(values.size())) - 1;
  return values[static_cast<std::size_t>(std::max(0.0, position))];
}

Median median_with_interval(std::vector<double> values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  // The number of values below the true median is binomial(n, 1/2): `cut` values are left out at each end
  // where the tails of cut or fewer together stay within 5 %.
  double term = std::pow(0.5, static_cast<double>(n)), tail = term;
  std::size_t cut = 0;
  for (std::size_t next = 1; next < (n + 1) / 2; ++next) {
    term *= static_cast<double>(n - next + 1) / static_cast<double>(next);
    tail += term;
    if (2 * tail > 0.05) break;
    cut = next;
  }
  return {.value = middle_of(values), .low = values[cut], .high = values[n - 1 - cut]};
}

}  // namespace weft
