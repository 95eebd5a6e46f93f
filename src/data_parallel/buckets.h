// Which parameters travel together.
//
//   Order   Buckets follow the order in which the next forward uses their parameters; the index of a bucket
//           is its priority and, after the plan's first slot, its slot.
//   Size    A bucket is closed before a parameter that would take it above `bucket_bytes`. A parameter larger
//           than that is a bucket of its own, never cut.
//   Dense   A parameter of fewer than `dense_below` elements (biases, norms) is not worth selecting from: few
//           bytes, and a large part of what the model needs of them. Such parameters share dense buckets,
//           filled in the same order and to the same size.
//
// The same parameters and options give the same plan on all ranks; hash() is what they compare.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "state/shard.h"
#include "weft/train/scheme_options.h"

namespace weft {

struct ParameterInfo {
  std::string name;        // unique: state is kept by it
  std::int64_t count = 0;  // float32 elements
  int use = 0;             // place in the next forward; equal ones keep the order of the list
  std::int64_t rows = 0;   // of a matrix, row-major, rows x count / rows; 0: a vector. For low rank only
  // The part of a tensor that its ranks hold, of `count` elements; without a shape: a vector of its own.
  // Groups that hold other parts give the parameter the same name.
  Shard shard = {};
  bool tied = false;  // a table that is a matrix elsewhere as well: said in the plan
  Shard part() const { return shard.shape.empty() ? Shard::whole({count}) : shard; }
};

// A parameter inside its bucket: elements [first, first + count of the parameter).
struct BucketPiece {
  int parameter = 0;  // index in the plan's list
  std::int64_t first = 0;
};

struct Bucket {
  bool dense = false;
  std::int64_t count = 0;
  std::vector<BucketPiece> pieces;  // in order of use, laid end to end
};

class BucketPlan {
 public:
  BucketPlan() = default;
  // Throws UsageError for a name that is empty or there twice, a negative count, rows that do not divide it,
  // a shard of another count, a bucket_bytes below 4.
  BucketPlan(std::vector<ParameterInfo> parameters, const BucketOptions& options);

  int num_parameters() const { return static_cast<int>(parameters_.size()); }
  int num_buckets() const { return static_cast<int>(buckets_.size()); }
  const ParameterInfo& parameter(int p) const { return parameters_[static_cast<std::size_t>(p)]; }
  const Bucket& bucket(int b) const { return buckets_[static_cast<std::size_t>(b)]; }
  std::span<const ParameterInfo> parameters() const { return parameters_; }
  std::span<const Bucket> buckets() const { return buckets_; }
  int bucket_of(int parameter) const { return places_[static_cast<std::size_t>(parameter)].bucket; }
  std::int64_t first_of(int parameter) const { return places_[static_cast<std::size_t>(parameter)].first; }
  int find(const std::string& name) const;  // -1: there is none
  std::int64_t sparse_count() const;        // elements in buckets that are not dense
  std::uint64_t hash() const;               // of names, counts, rows, shards and buckets

 private:
  struct Place {
    int bucket = 0;
    std::int64_t first = 0;
  };
  void fill(std::span<const int> order, const BucketOptions& options);

  std::vector<ParameterInfo> parameters_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;        // of each parameter
  std::vector<int> names_in_order_;  // parameters, sorted by name
};

}  // namespace weft
