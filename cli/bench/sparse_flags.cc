#include "bench/sparse_flags.h"

#include <CLI/CLI.hpp>
#include <bit>
#include <initializer_list>

#include "weft/error.h"
#include "wire/codec.h"

namespace weft::cli {

namespace {

constexpr std::int64_t kMostBuckets = 65536;  // an operation each, in flight at once

std::string one_of(const std::string& flag, const std::string& value,
                   std::initializer_list<const char*> known) {
  std::string list;
  for (const char* name : known) {
    if (value == name) return value;
    list += (list.empty() ? "" : ", ") + std::string(name);
  }
  throw UsageError(flag + " '" + value + "' is none of: " + list);
}

void check_teams(const SchemeOptions& scheme, int ranks) {
  if (scheme.teams < 0) throw UsageError("--teams must be 1 or more, not " + std::to_string(scheme.teams));
  if (scheme.teams == 0) return;
  if (ranks % scheme.teams != 0) {
    throw UsageError("--teams " + std::to_string(scheme.teams) + " do not divide " + std::to_string(ranks) +
                     " ranks");
  }
  if (scheme.gather == "r-sag" && !std::has_single_bit(static_cast<unsigned>(scheme.teams))) {
    throw UsageError("--gather r-sag needs a power of two of teams, not " + std::to_string(scheme.teams));
  }
}

constexpr int kMostThreads = 256;

void take_buckets(const TypedSparse& typed, SparseBench& bench) {
  if (!typed.quotas.empty()) bench.scheme.quotas = quota_kind_of(typed.quotas);
  if (!typed.buckets) {
    if (!typed.quotas.empty()) throw UsageError("--quotas are those of --buckets, which are not given");
    return;
  }
  const std::int64_t buckets = *typed.buckets;
  if (buckets < 1 || buckets > kMostBuckets) {
    throw UsageError("--buckets must be 1 to " + std::to_string(kMostBuckets) + ", not " +
                     std::to_string(buckets));
  }
  if (typed.crossover) throw UsageError("--crossover is for one vector, without --buckets");
  bench.buckets = static_cast<int>(buckets);
}

}  // namespace

void add_sparse_options(CLI::App& verb, TypedSparse& typed) {
  const std::string group = "sparse_allreduce";
  const auto option = [&](const char* name, auto& value, const char* what) {
    typed.flags.push_back(verb.add_option(name, value, what)->group(group));
  };
  option("--length", typed.length, "elements of a rank's vector (default 1048576)");
  option("--density", typed.scheme.density,
         "share of them that is sent: k = round(length x density), at least 1");
  option("--distribution", typed.distribution, "gaussian (default), laplace, layered, heavy");
  option("--teams", typed.scheme.teams, "spardl: a divisor of the ranks (default: by the cost model)");
  option("--gather", typed.scheme.gather, "spardl with teams: r-sag, b-sag, auto (default)");
  option("--codec", typed.scheme.codec, "coo, packed (default), packed-bf16");
  option("--residual", typed.residual, "gres (default), pres, lres, drop");
  option("--blocks", typed.scheme.blocks, "dealt (default), contiguous");
  option("--buckets", typed.buckets, "cut into so many, in flight together through the data-parallel layer");
  option("--quotas", typed.quotas, "of the buckets: adaptive (default), proportional");
  option("--threads", typed.scheme.threads, "of the selection, a rank (default 1)");
  option("--steps-before", typed.steps_before,
         "steps that settle the state, not measured (default 3; oktopk has settled after some 250)");
  typed.flags.push_back(
      verb.add_flag("--shifted-draws", typed.shifted,
                    "data are drawn once and shifted by another distance each step: many steps in less time")
          ->group(group));
  typed.flags.push_back(
      verb.add_flag("--no-check", typed.no_check, "no captured energy, no mass error")->group(group));
  typed.flags.push_back(
      verb.add_flag("--crossover", typed.crossover,
                    "sim: at which density dense wins, and the best number of teams, over ranks and links")
          ->group(group));
}

void refuse_sparse_options(const TypedSparse& typed) {
  for (const CLI::Option* flag : typed.flags) {
    if (flag->count() > 0) throw UsageError(flag->get_name() + " is for bench sparse_allreduce");
  }
}

SparseBench checked(const TypedSparse& typed, int ranks) {
  SparseBench bench;
  if (typed.length < 1 || typed.length > 0xffff'ffffll) {
    throw UsageError("--length must be 1 to 2^32 - 1 elements, not " + std::to_string(typed.length));
  }
  const SchemeOptions& scheme = typed.scheme;
  if (!(scheme.density > 0 && scheme.density <= 1)) {
    throw UsageError("--density must be above 0 and at most 1, not " +
                     CLI::detail::to_string(scheme.density));
  }
  if (scheme.threads < 1 || scheme.threads > kMostThreads) {
    throw UsageError("--threads must be 1 to " + std::to_string(kMostThreads) + ", not " +
                     std::to_string(scheme.threads));
  }
  if (typed.steps_before < 0) throw UsageError("--steps-before must be 0 or more");
  bench.length = typed.length;
  bench.distribution = distribution_of(typed.distribution);
  bench.scheme = scheme;
  bench.scheme.codec = wire::name_of(wire::sparse_codec_of(scheme.codec));
  bench.scheme.blocks = one_of("--blocks", scheme.blocks, {"dealt", "contiguous"});
  bench.scheme.gather = one_of("--gather", scheme.gather, {"auto", "r-sag", "b-sag"});
  bench.scheme.residual = residual_rule_of(typed.residual);
  bench.steps_before = typed.steps_before;
  if (typed.shifted && bench.distribution == Distribution::layered) {
    throw UsageError("--shifted-draws would shift the layers of --distribution layered: leave it out");
  }
  bench.shifted = typed.shifted;
  bench.check = !typed.no_check;
  bench.crossover = typed.crossover;
  check_teams(bench.scheme, ranks);
  take_buckets(typed, bench);
  return bench;
}

}  // namespace weft::cli
