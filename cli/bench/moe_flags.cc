#include "bench/moe_flags.h"

#include <CLI/CLI.hpp>
#include <cmath>

#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr std::int64_t kMostTokens = 1 << 24, kMostWidth = 65536, kMostExperts = 65536, kMostSlices = 256;

void require(const char* flag, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw UsageError(std::string(flag) + " must be " + std::to_string(least) + " to " + std::to_string(most) +
                   ", not " + std::to_string(value));
}

}  // namespace

void add_moe_options(CLI::App& verb, TypedMoe& typed) {
  const auto option = [&](const char* name, auto& value, const char* what) {
    CLI::Option* const added = verb.add_option(name, value, what)->group("moe");
    typed.flags.push_back(added);
    return added;
  };
  option("--width", typed.bench.width, "values of a token (default 256)");
  option("--experts", typed.bench.experts, "of the layer, dealt to the ranks (default 8)");
  option("--choices", typed.bench.choices, "experts of a token (default 1)");
  option("--capacity-factor", typed.bench.capacity_factor,
         "places of an expert over an even share (default 1.25; 0: none is dropped)");
  option("--slices", typed.bench.slices, "in which rows travel, with commas (default 1,2)")->delimiter(',');
  option("--routing", typed.bench.routing,
         "uniform (default), zipf (with --zipf), or a FILE: a line for each token with its experts' numbers");
}

void refuse_moe_options(const TypedMoe& typed) {
  for (const CLI::Option* flag : typed.flags) {
    if (flag->count() > 0) throw UsageError(flag->get_name() + " is for bench moe");
  }
}

MoeBench checked(const TypedMoe& typed, const EmbeddingBench& shared, bool tokens_given) {
  MoeBench bench = typed.bench;
  const bool drawn = bench.routing == "uniform" || bench.routing == "zipf";
  if (tokens_given)
    bench.tokens = shared.tokens;
  else if (!drawn)
    bench.tokens = 0;  // the file's
  bench.zipf = shared.zipf;
  if (tokens_given) require("--tokens", bench.tokens, 1, kMostTokens);
  require("--width", bench.width, 1, kMostWidth);
  require("--experts", bench.experts, 1, kMostExperts);
  require("--choices", bench.choices, 1, bench.experts);
  if (bench.slices.empty()) bench.slices = {1};
  for (const int slices : bench.slices) require("--slices", slices, 1, kMostSlices);
  if (!(std::isfinite(bench.capacity_factor) && bench.capacity_factor >= 0 && bench.capacity_factor <= 1e6))
    throw UsageError("--capacity-factor must be positive, or 0 where none is dropped, not " +
                     CLI::detail::to_string(bench.capacity_factor));
  if (!(std::isfinite(bench.zipf) && bench.zipf >= 0 && bench.zipf <= 10))
    throw UsageError("--zipf must be 0 to 10, not " + CLI::detail::to_string(bench.zipf));
  return bench;
}

}  // namespace weft::cli
