#include "data_parallel/buckets.h"

#include <algorithm>
#include <numeric>

#include "base/identity.h"
#include "weft/error.h"

namespace weft {

namespace {

std::uint64_t mix_in(std::uint64_t hash, std::uint64_t value) { return mix(hash ^ value); }

// The two kinds are filled side by side; each has at most one bucket that still takes parameters.
struct Open {
  int bucket = -1;
};

}  // namespace

BucketPlan::BucketPlan(std::vector<ParameterInfo> parameters, const BucketOptions& options)
    : parameters_(std::move(parameters)), places_(parameters_.size()), names_in_order_(parameters_.size()) {
  if (options.bucket_bytes < sizeof(float)) {
    throw UsageError("buckets: bucket_bytes must hold an element, not " +
                     std::to_string(options.bucket_bytes));
  }
  for (const std::string& name : options.stay_dense) {
    if (std::ranges::find(parameters_, name, &ParameterInfo::name) == parameters_.end())
      throw UsageError("buckets: '" + name + "' is to stay dense, and there is no such parameter");
  }
  for (const ParameterInfo& p : parameters_) {
    if (p.name.empty()) throw UsageError("buckets: a parameter has no name");
    if (p.count < 0) throw UsageError("buckets: parameter '" + p.name + "' has a negative count");
    if (p.rows < 0 || (p.rows > 0 && p.count % p.rows != 0)) {
      throw UsageError("buckets: parameter '" + p.name + "' of " + std::to_string(p.count) +
                       " elements has no " + std::to_string(p.rows) + " rows");
    }
    std::string why = trouble_with(p.part());
    if (why.empty() && p.part().num_elements() != p.count)
      why = text_of(p.shard) + " is not of its " + std::to_string(p.count) + " elements";
    if (!why.empty()) throw UsageError("buckets: parameter '" + p.name + "': " + why);
  }
  std::iota(names_in_order_.begin(), names_in_order_.end(), 0);
  std::vector<int> order = names_in_order_;
  const auto by_name = [this](int a, int b) { return parameter(a).name < parameter(b).name; };
  std::sort(names_in_order_.begin(), names_in_order_.end(), by_name);
  for (std::size_t i = 1; i < names_in_order_.size(); ++i) {
    if (!by_name(names_in_order_[i - 1], names_in_order_[i])) {
      throw UsageError("buckets: parameter '" + parameter(names_in_order_[i]).name + "' is there twice");
    }
  }
  std::sort(order.begin(), order.end(), [this](int a, int b) {
    return parameter(a).use != parameter(b).use ? parameter(a).use < parameter(b).use : a < b;
  });
  fill(order, options);
}

void BucketPlan::fill(std::span<const int> order, const BucketOptions& options) {
  const auto most = static_cast<std::int64_t>(options.bucket_bytes / sizeof(float));
  Open open[2];
  for (const int p : order) {
    const std::int64_t count = parameter(p).count;
    const bool dense = count < options.dense_below ||
                       std::ranges::find(options.stay_dense, parameter(p).name) != options.stay_dense.end();
    Open& mine = open[dense ? 1 : 0];
    // (A bucket that holds a larger parameter is above `most` already, and takes no other.)
    if (mine.bucket < 0 || bucket(mine.bucket).count + count > most) {
      mine.bucket = num_buckets();
      buckets_.push_back({.dense = dense, .count = 0, .pieces = {}});
    }
    Bucket& into = buckets_[static_cast<std::size_t>(mine.bucket)];
    places_[static_cast<std::size_t>(p)] = {mine.bucket, into.count};
    into.pieces.push_back({p, into.count});
    into.count += count;
  }
}

int BucketPlan::find(const std::string& name) const {
  const auto at =
      std::lower_bound(names_in_order_.begin(), names_in_order_.end(), name,
                       [this](int p, const std::string& wanted) { return parameter(p).name < wanted; });
  return at != names_in_order_.end() && parameter(*at).name == name ? *at : -1;
}

std::int64_t BucketPlan::sparse_count() const {
  std::int64_t sum = 0;
  for (const Bucket& b : buckets_) sum += b.dense ? 0 : b.count;
  return sum;
}

std::uint64_t BucketPlan::hash() const {
  std::uint64_t hash = mix(buckets_.size());
  for (const Bucket& b : buckets_) {
    hash = mix_in(hash, b.dense ? 1 : 0);
    hash = mix_in(hash, b.pieces.size());
    for (const BucketPiece& piece : b.pieces) {
      const ParameterInfo& p = parameter(piece.parameter);
      hash = mix_in(hash, static_cast<std::uint64_t>(p.count));
      hash = mix_in(hash, static_cast<std::uint64_t>(p.rows));
      for (const char c : name_of_part(p.name, p.part())) hash = mix_in(hash, static_cast<unsigned char>(c));
    }
  }
  return hash;
}

}  // namespace weft
