// Data parallelism as a strategy of the step: its exchanges, its moves, its plan rows.
#include <algorithm>

#include "base/identity.h"
#include "data_parallel/data_parallel.h"
#include "data_parallel/formula.h"

namespace weft {

namespace {

// Exchanges: the comparison of plans, then the buckets in their order, then the question who used what.
constexpr int kComparison = 0, kFirstBucket = 1;

}  // namespace

std::string DataParallel::name_of_bucket(int b) const {
  return "gradients of bucket " + std::to_string(b) + " from " +
         plan_.parameter(plan_.bucket(b).pieces.front().parameter).name;
}

// Empty where nothing is selected: entries alone are coded, and factors that are rounded.
std::string DataParallel::codec_of(int b) const {
  if (rounds_factors(scheme_, options_.scheme)) return "bf16";
  return find_scheme(call(b).algorithm).selects ? options_.scheme.codec : "";
}

std::vector<std::string> DataParallel::gradients() const {
  std::vector<std::string> out;
  for (const ParameterInfo& p : plan_.parameters()) out.push_back(p.name);
  return out;
}

std::string DataParallel::why_updates_wait() const {
  return options_.find_unused ? "find-unused asks all ranks" : "";
}

std::vector<Exchange> DataParallel::exchanges() const {
  std::vector<Exchange> out;
  out.push_back({.name = "plan of buckets",
                 .group = comm_.group_id(),
                 .slot = options_.first_slot,
                 .at_installation = true});
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    Exchange bucket{.name = name_of_bucket(b),
                    .group = comm_.group_id(),
                    .slot = options_.first_slot + 1 + static_cast<std::uint32_t>(b),
                    .codec = codec_of(b)};
    for (const BucketPiece& piece : plan_.bucket(b).pieces)
      bucket.reads.push_back({TensorName::Of::gradient, plan_.parameter(piece.parameter).name});
    bucket.writes = bucket.reads;
    out.push_back(std::move(bucket));
  }
  if (options_.find_unused) {
    out.push_back({.name = "which parameters were used", .group = comm_.group_id(), .slot = unused_slot()});
  }
  return out;
}

// A bucket starts inside the backward that completes it, and is awaited before the first update of one of its
// blocks. With clipping of local gradients all of them start when the last gradient is here.
void DataParallel::weave(Weaver& weaver) const {
  const ModelShape& shape = weaver.shape();
  if (weaver.phase() == Phase::first) weaver.at_begin(wait_of(kComparison, 0));
  const auto place_of = [&](const std::string& name) {
    for (std::size_t p = 0; p < shape.parameters.size(); ++p) {
      if (shape.parameters[p].name == name) return static_cast<int>(p);
    }
    return -1;
  };
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    std::vector<int> used;
    int first_block = shape.num_blocks();
    for (const BucketPiece& piece : plan_.bucket(b).pieces) {
      const int p = place_of(plan_.parameter(piece.parameter).name);
      used.push_back(p);
      first_block = std::min(first_block, shape.block_of(p));
    }
    const Piece last = options_.clip_local > 0 ? weaver.completes_all() : weaver.completes(used);
    weaver.after(last, start_inside(kFirstBucket + b));
    weaver.before({Work::update, first_block, 0, 0}, wait_of(kFirstBucket + b, weaver.last()));
  }
  if (!options_.find_unused) return;
  const int unused = kFirstBucket + plan_.num_buckets();
  weaver.after(weaver.completes_all(), start_inside(unused));
  weaver.before({Work::update, 0, 0, 0}, wait_of(unused, weaver.last()));
}

// One step is under way at a time.
Ticket DataParallel::ticket(int exchange, const When&) const {
  if (exchange == kComparison) return comparison_;
  const int b = exchange - kFirstBucket;
  if (b == plan_.num_buckets()) return unused_;
  const bool submitted = at_ == At::ended || (at_ == At::open && is_submitted(b));
  return submitted ? tickets_[runs_[static_cast<std::size_t>(b)]->ticket] : Ticket();
}

std::vector<PlanRow> DataParallel::rows() const {
  std::vector<PlanRow> out;
  const LinkCost& link = comm_.cost();
  for (int b = 0; b < plan_.num_buckets(); ++b) {
    const Bucket& bucket = plan_.bucket(b);
    const BucketRun& run = *runs_[static_cast<std::size_t>(b)];
    const std::size_t others = bucket.pieces.size() - 1;
    const std::string& first = plan_.parameter(bucket.pieces.front().parameter).name;
    const SchemeCost cost = cost_of(*this, b, comm_.size(), link, comm_.micro_op_bytes());
    out.push_back({.tensor = others == 0 ? first : first + " and " + std::to_string(others) + " more",
                   .count = bucket.count,
                   .strategy = std::string(name()),
                   .group = comm_.group_id(),
                   .ranks = comm_.size(),
                   .divisor = options_.divisor,
                   .scheme = std::string(run.options.algorithm),
                   .codec = codec_of(b),
                   .traffic = TrafficClass::gradient,
                   .slot = options_.first_slot + 1 + static_cast<std::uint32_t>(b),
                   .bytes = static_cast<double>(cost.bytes),
                   .seconds = cost.seconds,
                   .why = why_of(b)});
  }
  return out;
}

std::string DataParallel::why_of(int b) const {
  std::string why = why_so(b);
  const auto tied = [&](const BucketPiece& piece) { return plan_.parameter(piece.parameter).tied; };
  if (std::ranges::none_of(plan_.bucket(b).pieces, tied)) return why;
  return why + "; a tied table stays on every rank: all of its rows get a gradient";
}

std::string DataParallel::why_so(int b) const {
  const Bucket& bucket = plan_.bucket(b);
  const Scheme& taken = find_scheme(runs_[static_cast<std::size_t>(b)]->options.algorithm);
  if (taken.name == scheme_.name) return options_.why.empty() ? "asked for" : options_.why;
  const std::vector<std::string>& stays = options_.scheme.buckets.stay_dense;
  const std::string& first = plan_.parameter(bucket.pieces.front().parameter).name;
  if (bucket.dense && std::ranges::find(stays, first) != stays.end())
    return "stays dense: compression cannot pay for it on this link";
  if (bucket.dense) {
    return "stays dense: parameters of fewer than " + std::to_string(options_.scheme.buckets.dense_below) +
           " elements are not worth selecting from";
  }
  return "stays dense: its quota is all of it";
}

// Names, lengths and buckets, and every option that affects results.
std::uint64_t DataParallel::hash() const {
  std::uint64_t hash = plan_.hash();
  const auto add = [&hash](std::uint64_t part) { hash = mix(hash ^ part); };
  const auto text = [&](std::string_view value) {
    add(value.size());
    for (const char c : value) add(static_cast<unsigned char>(c));
  };
  const SchemeOptions& scheme = options_.scheme;
  for (const std::string_view value :
       {std::string_view(scheme.name), std::string_view(scheme.codec), std::string_view(scheme.blocks),
        std::string_view(scheme.gather), std::string_view(scheme.all_reduce)}) {
    text(value);
  }
  for (const double value : {scheme.density, scheme.min_compression, options_.divisor,
                             scheme.momentum_correction, options_.clip_local}) {
    add(hash_part(value));
  }
  for (const std::uint64_t value :
       {static_cast<std::uint64_t>(options_.dtype), static_cast<std::uint64_t>(scheme.residual),
        static_cast<std::uint64_t>(scheme.teams), static_cast<std::uint64_t>(scheme.quotas),
        static_cast<std::uint64_t>(scheme.columns), scheme.seed,
        static_cast<std::uint64_t>(options_.find_unused), static_cast<std::uint64_t>(options_.rows_of),
        static_cast<std::uint64_t>(scheme.error_feedback),
        static_cast<std::uint64_t>(rounds_factors(scheme_, scheme)),
        static_cast<std::uint64_t>(options_.unused_stay_out)}) {
    add(value);
  }
  return hash;
}

}  // namespace weft
