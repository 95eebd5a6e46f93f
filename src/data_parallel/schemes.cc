#include "data_parallel/schemes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <system_error>

#include "base/names.h"
#include "collectives/registry.h"
#include "compressors/low_rank.h"
#include "weft/error.h"

namespace weft {

namespace {

constexpr double kMib = 1048576;

std::vector<Scheme> table() {
  std::vector<Scheme> rows;
  for (const SparseAlgorithm& row : sparse_algorithms()) {
    rows.push_back({.name = row.name,
                    .summary = row.summary,
                    .selects = row.selects,
                    .teams = row.teams,
                    .low_rank = false,
                    .lossless = row.lossless,
                    .wide = row.lossless,
                    .automatic = row.teams || !row.selects,
                    .all_reduce = &row});
  }
  rows.push_back({.name = "powersgd",
                  .summary = "matrices as two thin factors, summed one after the other (PowerSGD)",
                  .low_rank = true,
                  .automatic = true});
  return rows;
}

template <class T>
T number(std::string_view name, std::string_view text) {
  T value{};
  const std::string digits(text);
  const char* const end = digits.data() + digits.size();
  const auto [rest, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || rest != end || digits.empty()) {
    throw UsageError(std::string(name) + " takes a " + (std::is_integral_v<T> ? "whole " : "") +
                     "number, not '" + std::string(text) + "'");
  }
  return value;
}

template <class T>
std::string text_of(T value) {
  std::array<char, 64> digits{};
  return {digits.data(), std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr};
}

bool any(const Scheme&) { return true; }
bool selects(const Scheme& s) { return s.selects; }
bool takes_teams(const Scheme& s) { return s.teams; }
bool is_low_rank(const Scheme& s) { return s.low_rank; }
bool not_low_rank(const Scheme& s) { return !s.low_rank; }

constexpr SchemeKnob kKnobs[] = {
    {.name = "density",
     .help = "share of the gradient that sparse schemes send",
     .applies = selects,
     .set = [](SchemeOptions& o, std::string_view text) { o.density = number<double>("density", text); },
     .text = [](const SchemeOptions& o) { return text_of(o.density); }},
    {.name = "momentum-correction",
     .help = "sgd: momentum of each rank's gradients, before the residual; 0: none",
     .applies = any,  // (schemes that send everything take it as the optimizer's momentum)
     .set =
         [](SchemeOptions& o, std::string_view text) {
           o.momentum_correction = number<double>("momentum-correction", text);
         },
     .text = [](const SchemeOptions& o) { return text_of(o.momentum_correction); }},
    {.name = "codec",
     .help = "coo, packed (default), packed-bf16",
     .applies = selects,
     .set = [](SchemeOptions& o, std::string_view text) { o.codec = text; },
     .text = [](const SchemeOptions& o) { return o.codec; },
     .is_text = true},
    {.name = "residual",
     .help = "gres (default), pres, lres, drop",
     .applies = selects,
     .set = [](SchemeOptions& o, std::string_view text) { o.residual = residual_rule_of(text); },
     .text = [](const SchemeOptions& o) { return std::string(name_of(o.residual)); },
     .is_text = true},
    {.name = "quotas",
     .help = "of the buckets' entries: adaptive (default), proportional",
     .applies = selects,
     .set = [](SchemeOptions& o, std::string_view text) { o.quotas = quota_kind_of(text); },
     .text = [](const SchemeOptions& o) { return std::string(name_of(o.quotas)); },
     .is_text = true},
    {.name = "stay-dense",
     .help = "parameters that are never compressed, between commas; auto finds them",
     .applies = selects,
     .set =
         [](SchemeOptions& o, std::string_view text) {
           o.buckets.stay_dense.clear();
           while (!text.empty()) {
             const std::size_t comma = std::min(text.find(','), text.size());
             if (comma > 0) o.buckets.stay_dense.emplace_back(text.substr(0, comma));
             text.remove_prefix(std::min(comma + 1, text.size()));
           }
         },
     .text =
         [](const SchemeOptions& o) {
           std::string out;
           for (const std::string& name : o.buckets.stay_dense) out += (out.empty() ? "" : ",") + name;
           return out;
         },
     .is_text = true},
    {.name = "teams",
     .help = "spardl: a divisor of the ranks; 0: by the cost model",
     .applies = takes_teams,
     .set = [](SchemeOptions& o, std::string_view text) { o.teams = number<int>("teams", text); },
     .text = [](const SchemeOptions& o) { return text_of(o.teams); }},
    {.name = "gather",
     .help = "spardl with teams: auto (default), r-sag, b-sag",
     .applies = takes_teams,
     .set = [](SchemeOptions& o, std::string_view text) { o.gather = text; },
     .text = [](const SchemeOptions& o) { return o.gather; },
     .is_text = true},
    {.name = "powersgd-rank",
     .help = "powersgd: columns of its factors",
     .applies = is_low_rank,
     .set = [](SchemeOptions& o, std::string_view text) { o.columns = number<int>("powersgd-rank", text); },
     .text = [](const SchemeOptions& o) { return text_of(o.columns); }},
    {.name = "min-compression",
     .help = "powersgd: matrices that it shrinks by less are sent as they are",
     .applies = is_low_rank,
     .set = [](SchemeOptions& o,
               std::string_view text) { o.min_compression = number<double>("min-compression", text); },
     .text = [](const SchemeOptions& o) { return text_of(o.min_compression); }},
    {.name = "powersgd-wire",
     .help = "powersgd: its sums are in float32, bf16; auto (default): float32, with --stage-sums bf16 as "
             "that says",
     .applies = is_low_rank,
     .set = [](SchemeOptions& o, std::string_view text) { o.wire = text; },
     .text = [](const SchemeOptions& o) { return o.wire; },
     .is_text = true},
    {.name = "error-feedback",
     .help = "powersgd: on (default); off: what the factors leave behind is lost, for comparison",
     .applies = is_low_rank,
     .set =
         [](SchemeOptions& o, std::string_view text) {
           if (text != "on" && text != "off")
             throw UsageError("error-feedback is on or off, not '" + std::string(text) + "'");
           o.error_feedback = text == "on";
         },
     .text = [](const SchemeOptions& o) { return std::string(o.error_feedback ? "on" : "off"); },
     .is_text = true},
    {.name = "bucket-mib",
     .help = "of a bucket, in MiB",
     .applies = any,
     .set =
         [](SchemeOptions& o, std::string_view text) {
           const double mib = number<double>("bucket-mib", text);
           if (!(mib > 0 && mib <= 65536))
             throw UsageError("bucket-mib must be above 0 and at most 65536, not " + std::string(text));
           o.buckets.bucket_bytes = static_cast<std::size_t>(std::max(4.0, mib * kMib));
         },
     .text =
         [](const SchemeOptions& o) { return text_of(static_cast<double>(o.buckets.bucket_bytes) / kMib); }},
    {.name = "dense-below",
     .help = "parameters of fewer elements are summed dense",
     .applies = not_low_rank,
     .set = [](SchemeOptions& o,
               std::string_view text) { o.buckets.dense_below = number<std::int64_t>("dense-below", text); },
     .text = [](const SchemeOptions& o) { return text_of(o.buckets.dense_below); }},
};

void require(bool holds, std::string_view name, const std::string& rule, const std::string& value) {
  if (!holds) throw UsageError(std::string(name) + " must be " + rule + ", not " + value);
}

void require_known(std::string_view kind, const std::string& name, std::span<const std::string_view> known) {
  if (std::ranges::find(known, name) == known.end()) throw UsageError(unknown_name(kind, name, known));
}

// The two sums of low rank factors.
SchemeCost factor_cost(const Scheme& scheme, const SchemeOptions& options, const SchemeShape& shape) {
  LowRank factors({.rank = options.columns,
                   .min_compression = options.min_compression,
                   .bf16 = rounds_factors(scheme, options)});
  for (const ParameterInfo& part : shape.parts) factors.add(part.name, part.rows, part.count, nullptr);
  SchemeCost sum;
  for (const std::int64_t count : {factors.first_count(), factors.second_count()}) {
    const Shape call{.size = shape.size,
                     .count = count,
                     .element_bytes = size_of(factors.wire()),
                     .node_size = shape.node_size,
                     .micro_op_bytes = shape.micro_op_bytes};
    if (count == 0) continue;
    const auto& row = pick(Family::all_reduce, options.all_reduce, call, shape.link);
    sum.bytes += static_cast<std::int64_t>(row.bytes(call));
    sum.seconds += row.seconds(call, shape.link);
  }
  return sum;
}

}  // namespace

std::span<const Scheme> schemes() {
  static const std::vector<Scheme> rows = table();
  return rows;
}

std::vector<std::string_view> scheme_names() {
  std::vector<std::string_view> names;
  for (const Scheme& row : schemes()) names.push_back(row.name);
  return names;
}

const Scheme& find_scheme(std::string_view name) {
  for (const Scheme& row : schemes()) {
    if (row.name == name) return row;
  }
  throw UsageError(unknown_name("scheme", name, scheme_names()));
}

const Scheme& lossless_scheme() { return *std::ranges::find_if(schemes(), &Scheme::lossless); }

const Scheme& rounding_scheme() {
  return *std::ranges::find_if(schemes(), [](const Scheme& s) { return s.dense() && !s.lossless; });
}

bool rounds_factors(const Scheme& scheme, const SchemeOptions& options) {
  return scheme.low_rank && options.wire == "bf16";
}

const Scheme& scheme_of_bucket(const Scheme& scheme, bool dense, std::int64_t quota, std::int64_t count) {
  // (Where every entry would be sent, indices are a waste, and selection on the way may lose some.)
  const bool whole = dense || (scheme.selects && quota == count);
  return whole && !scheme.low_rank ? lossless_scheme() : find_scheme(scheme.name);
}

BucketOptions bucket_options(const SchemeOptions& options) {
  BucketOptions buckets = options.buckets;
  if (find_scheme(options.name).low_rank) buckets.dense_below = 0;
  return buckets;
}

void check_scheme(const SchemeOptions& o, int ranks) {
  static constexpr std::array<std::string_view, 3> kCodecs{"coo", "packed", "packed-bf16"};
  static constexpr std::array<std::string_view, 2> kBlocks{"dealt", "contiguous"};
  static constexpr std::array<std::string_view, 3> kGathers{"auto", "r-sag", "b-sag"};
  static constexpr std::array<std::string_view, 3> kWires{"auto", "float32", "bf16"};
  find_scheme(o.name);
  require_known("codec", o.codec, kCodecs);
  require_known("blocks", o.blocks, kBlocks);
  require_known("gather", o.gather, kGathers);
  require_known("powersgd-wire", o.wire, kWires);
  require(o.density > 0 && o.density <= 1, "density", "above 0 and at most 1", text_of(o.density));
  require(o.teams >= 0 && (o.teams == 0 || ranks == 0 || ranks % o.teams == 0), "teams",
          "a divisor of the " + std::to_string(ranks) + " ranks", text_of(o.teams));
  require(o.momentum_correction >= 0 && o.momentum_correction < 1, "momentum-correction",
          "at least 0 and below 1", text_of(o.momentum_correction));
  require(o.columns >= 1 && o.columns <= 1024, "powersgd-rank", "1 to 1024", text_of(o.columns));
  require(o.min_compression >= 0, "min-compression", "0 or more", text_of(o.min_compression));
  require(o.buckets.dense_below >= 0, "dense-below", "0 or more", text_of(o.buckets.dense_below));
  require(o.threads >= 1, "threads", "1 or more", text_of(o.threads));
  if (o.all_reduce != "auto") find_algorithm(Family::all_reduce, o.all_reduce);
}

std::span<const SchemeKnob> scheme_knobs() { return kKnobs; }

const SchemeKnob& find_scheme_knob(std::string_view name) {
  std::vector<std::string_view> known;
  for (const SchemeKnob& knob : kKnobs) {
    if (knob.name == name) return knob;
    known.push_back(knob.name);
  }
  throw UsageError(unknown_name("option of a scheme", name, known));
}

SchemeCost cost_of(const Scheme& scheme, const SchemeOptions& options, const SchemeShape& shape) {
  if (scheme.low_rank) return factor_cost(scheme, options, shape);
  std::int64_t length = 0;
  for (const ParameterInfo& part : shape.parts) length += part.count;
  const SparseOptions call = sparse_call(scheme, options, shape.quota);
  const SparseShape sparse = shape_of(call, length, shape);
  return {payload_bytes(*scheme.all_reduce, sparse),
          shape.size > 1 ? sparse_wire_seconds(*scheme.all_reduce, sparse, shape.link) : 0.0};
}

std::int64_t payload_bytes(const Scheme& scheme, const SchemeOptions& options, const SchemeShape& shape) {
  return cost_of(scheme, options, shape).bytes;
}

SparseOptions sparse_call(const Scheme& scheme, const SchemeOptions& options, std::int64_t quota) {
  return {.k = quota,
          .algorithm = scheme.name,
          .codec = options.codec,
          .blocks = options.blocks,
          .residual = options.residual,
          .teams = options.teams,
          .gather = options.gather,
          .all_reduce = options.all_reduce,
          .threads = options.threads};
}

SparseShape shape_of(const SparseOptions& call, std::int64_t length, const SchemeShape& shape) {
  SparseShape out;
  out.size = shape.size;
  out.length = length;
  out.k = call.k;
  out.blocks = call.blocks == "dealt" ? Deal::Kind::dealt : Deal::Kind::contiguous;
  out.codec = wire::sparse_codec_of(call.codec);
  out.link = shape.link;
  out.all_reduce = call.all_reduce;
  out.node_size = shape.node_size;
  out.micro_op_bytes = shape.micro_op_bytes;
  const bool power = std::has_single_bit(static_cast<unsigned>(call.teams));
  TeamChoice teams{call.teams, call.gather == "r-sag" || (call.gather == "auto" && power)};
  if (teams.teams == 0) teams = shape.teams;
  if (teams.teams == 0) teams = choose_teams(shape.size, length, call.k, shape.link, out.codec, call.gather);
  out.teams = teams.teams;
  out.recursive = teams.recursive;
  return out;
}

}  // namespace weft
