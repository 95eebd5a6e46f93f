#include "data_parallel/quotas.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <string>

#include "base/names.h"
#include "base/tail.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr std::string_view kKinds[] = {"adaptive", "proportional"};
constexpr std::int64_t kFloorPart = 16;

struct Bounds {
  std::vector<std::int64_t> least;
  std::vector<std::int64_t> most;
  std::int64_t k = 0;  // between the sums of both
};

Bounds bounds_of(std::span<const std::int64_t> lengths, std::int64_t k) {
  Bounds bounds;
  bounds.most.assign(lengths.begin(), lengths.end());
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  std::int64_t ones = 0;
  for (const std::int64_t n : lengths) ones += n > 0 ? 1 : 0;
  bounds.k = std::min(std::max(k, ones), total);
  std::int64_t sum = 0;
  for (const std::int64_t n : lengths) {
    const double share =
        total == 0 ? 0
                   : static_cast<double>(bounds.k) * (static_cast<double>(n) / static_cast<double>(total));
    const std::int64_t least = std::max<std::int64_t>(1, static_cast<std::int64_t>(share / kFloorPart));
    bounds.least.push_back(std::min(n, least));
    sum += bounds.least.back();
  }
  if (sum > bounds.k) {
    for (std::size_t b = 0; b < lengths.size(); ++b) bounds.least[b] = std::min<std::int64_t>(1, lengths[b]);
  }
  return bounds;
}

// Whole numbers near `wanted`, inside the bounds, that sum to k. Largest remainders are raised first; ties go
// to the lower bucket.
std::vector<std::int64_t> round_to_sum(std::span<const double> wanted, const Bounds& bounds) {
  const std::size_t count = wanted.size();
  std::vector<std::int64_t> quotas(count);
  std::vector<double> rest(count);
  std::int64_t left = bounds.k;
  for (std::size_t b = 0; b < count; ++b) {
    const double inside =
        std::clamp(wanted[b], static_cast<double>(bounds.least[b]), static_cast<double>(bounds.most[b]));
    quotas[b] = static_cast<std::int64_t>(inside);
    rest[b] = inside - static_cast<double>(quotas[b]);
    left -= quotas[b];
  }
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return rest[a] != rest[b] ? rest[a] > rest[b] : a < b; });
  for (const std::size_t b : order) {
    if (left > 0 && quotas[b] < bounds.most[b] && rest[b] > 0) ++quotas[b], --left;
  }
  // Only where the wanted sum is not k (the bounds hold most of it, or nothing is known).
  for (const std::size_t b : order) {
    const std::int64_t change = std::clamp(left, bounds.least[b] - quotas[b], bounds.most[b] - quotas[b]);
    quotas[b] += change;
    left -= change;
  }
  return quotas;
}

std::vector<double> wanted_at(double threshold, std::span<const QuotaPart> parts, const Bounds& bounds,
                              double density) {
  std::vector<double> wanted(bounds.most.size());
  for (const QuotaPart& part : parts) {
    const auto n = static_cast<double>(part.count);
    double& mine = wanted[static_cast<std::size_t>(part.bucket)];
    if (part.scale < 0)
      mine += n * density;
    else if (part.scale > 0)
      mine += n * tail(threshold / part.scale);
  }
  for (std::size_t b = 0; b < wanted.size(); ++b) {
    wanted[b] =
        std::clamp(wanted[b], static_cast<double>(bounds.least[b]), static_cast<double>(bounds.most[b]));
  }
  return wanted;
}

}  // namespace

std::string_view name_of(QuotaKind kind) { return kKinds[static_cast<std::size_t>(kind)]; }

QuotaKind quota_kind_of(std::string_view name) {
  for (std::size_t i = 0; i < std::size(kKinds); ++i) {
    if (kKinds[i] == name) return static_cast<QuotaKind>(i);
  }
  throw UsageError(unknown_name("quotas", name, kKinds));
}

std::vector<std::int64_t> proportional_quotas(std::span<const std::int64_t> lengths, std::int64_t k) {
  const Bounds bounds = bounds_of(lengths, k);
  // The density that sums to k when every bucket has its floor.
  const auto wanted_for = [&](double density) {
    std::vector<double> wanted(lengths.size());
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      wanted[b] = std::max(density * static_cast<double>(lengths[b]), static_cast<double>(bounds.least[b]));
    }
    return wanted;
  };
  double low = 0;
  double high = 1;
  for (int i = 0; i < 64; ++i) {
    const double middle = (low + high) / 2;
    const std::vector<double> wanted = wanted_for(middle);
    const double sum = std::accumulate(wanted.begin(), wanted.end(), 0.0);
    (sum <= static_cast<double>(bounds.k) ? low : high) = middle;
  }
  return round_to_sum(wanted_for(low), bounds);
}

std::vector<std::int64_t> adaptive_quotas(std::span<const std::int64_t> lengths,
                                          std::span<const QuotaPart> parts, std::int64_t k) {
  double largest = 0;
  for (const QuotaPart& part : parts) largest = std::max(largest, part.scale);
  if (largest == 0) return proportional_quotas(lengths, k);  // nothing measured, or nothing but zeros
  const Bounds bounds = bounds_of(lengths, k);
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  const double density = static_cast<double>(bounds.k) / static_cast<double>(total);
  const auto sum_at = [&](double threshold) {
    const std::vector<double> wanted = wanted_at(threshold, parts, bounds, density);
    return std::accumulate(wanted.begin(), wanted.end(), 0.0);
  };
  double low = 0;               // selects k or more, as far as any threshold does
  double high = 100 * largest;  // selects the floors only: tail(100) is about 1e-37
  for (int i = 0; i < 64; ++i) {
    const double middle = (low + high) / 2;
    (sum_at(middle) >= static_cast<double>(bounds.k) ? low : high) = middle;
  }
  return round_to_sum(wanted_at(high, parts, bounds, density), bounds);
}

double scale_of(std::span<float> magnitudes, std::int64_t length) {
  if (magnitudes.empty()) return 0;
  const std::size_t reached = (3 * magnitudes.size() + 3) / 4;
  const auto at = magnitudes.begin() + static_cast<std::ptrdiff_t>(reached - 1);
  std::nth_element(magnitudes.begin(), at, magnitudes.end(), std::greater<>());
  // (A bucket that is selected whole tells little about its tail.)
  const double part = std::min(0.8, static_cast<double>(reached) / static_cast<double>(length));
  return static_cast<double>(*at) / tail_inverse(part);
}

double blend_scales(double old_scale, double measured) {
  return old_scale < 0 ? measured : (old_scale + measured) / 2;
}

}  // namespace weft
