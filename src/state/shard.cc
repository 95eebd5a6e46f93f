#include "state/shard.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

namespace weft {

namespace {

// Of elements: the sum or product of two with a small number does not overflow.
constexpr std::int64_t kMostElements = std::int64_t{1} << 53;

std::int64_t product(const std::vector<std::int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), std::int64_t{1}, std::multiplies<>());
}

std::string joined(const std::vector<std::int64_t>& numbers) {
  std::string out = "[";
  for (std::size_t i = 0; i < numbers.size(); ++i) out += (i == 0 ? "" : ",") + std::to_string(numbers[i]);
  return out + "]";
}

struct Interval {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};
Interval common(const Shard& a, const Shard& b, std::size_t dimension) {
  return {std::max(a.first[dimension], b.first[dimension]),
          std::min(a.first[dimension] + a.extent[dimension], b.first[dimension] + b.extent[dimension])};
}

}  // namespace

Shard Shard::whole(std::vector<std::int64_t> shape) {
  Shard out{.shape = shape, .first = std::vector<std::int64_t>(shape.size()), .extent = {}};
  out.extent = std::move(shape);
  return out;
}

Shard Shard::range(std::vector<std::int64_t> shape, std::size_t dimension, std::int64_t first,
                   std::int64_t count) {
  Shard out = whole(std::move(shape));
  out.first[dimension] = first;
  out.extent[dimension] = count;
  return out;
}

std::int64_t Shard::num_elements() const { return product(extent); }
std::int64_t Shard::tensor_elements() const { return product(shape); }

std::string trouble_with(const Shard& s) {
  if (s.first.size() != s.shape.size() || s.extent.size() != s.shape.size()) {
    return "a box of " + std::to_string(s.extent.size()) + " dimensions in a tensor of " +
           std::to_string(s.shape.size());
  }
  std::int64_t elements = 1;
  for (std::size_t d = 0; d < s.shape.size(); ++d) {
    if (s.shape[d] < 0 || s.first[d] < 0 || s.extent[d] < 0 || s.first[d] > s.shape[d] ||
        s.extent[d] > s.shape[d] - s.first[d]) {
      return "a box of " + joined(s.extent) + " at " + joined(s.first) + " is not inside of " +
             joined(s.shape);
    }
    // (A dimension of 0 counts as 1, so that the others are checked too.)
    if (std::max<std::int64_t>(s.shape[d], 1) > kMostElements / elements)
      return joined(s.shape) + " is too large";
    elements *= std::max<std::int64_t>(s.shape[d], 1);
  }
  return "";
}

std::int64_t common_elements(const Shard& a, const Shard& b) {
  std::int64_t out = 1;
  for (std::size_t d = 0; d < a.shape.size(); ++d) {
    const Interval both = common(a, b, d);
    out *= std::max<std::int64_t>(both.end - both.begin, 0);
  }
  return out;
}

void for_each_run(const Shard& from, const Shard& to,
                  FunctionRef<void(std::int64_t from_at, std::int64_t to_at, std::int64_t count)> f) {
  if (common_elements(from, to) == 0) return;
  // The last dimensions that both have as a whole belong to one run, and what the one before them shares.
  std::size_t outer = from.shape.size();
  std::int64_t run = 1;
  while (outer > 0) {
    --outer;
    const Interval both = common(from, to, outer);
    run *= both.end - both.begin;
    if (from.extent[outer] != from.shape[outer] || to.extent[outer] != to.shape[outer]) break;
  }
  std::vector<std::int64_t> at(from.shape.size());
  for (std::size_t d = 0; d < at.size(); ++d) at[d] = common(from, to, d).begin;
  const auto place = [&at](const Shard& in) {
    std::int64_t out = 0;
    for (std::size_t d = 0; d < at.size(); ++d) out = out * in.extent[d] + at[d] - in.first[d];
    return out;
  };
  for (;;) {
    f(place(from), place(to), run);
    std::size_t d = outer;
    while (d > 0 && ++at[d - 1] == common(from, to, d - 1).end) {
      at[d - 1] = common(from, to, d - 1).begin;
      --d;
    }
    if (d == 0) return;
  }
}

std::string text_of(const Shard& s) {
  if (s.is_whole()) return joined(s.shape);
  std::string out = "[";
  for (std::size_t d = 0; d < s.shape.size(); ++d) {
    out += (d == 0 ? "" : ",") + std::to_string(s.first[d]) + ":" + std::to_string(s.first[d] + s.extent[d]);
  }
  return out + "] of " + joined(s.shape);
}

std::string name_of_part(const std::string& name, const Shard& shard) {
  return shard.is_whole() ? name : name + " " + text_of(shard);
}

}  // namespace weft
