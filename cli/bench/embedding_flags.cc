#include "bench/embedding_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>

#include "weft/error.h"

namespace weft::cli {

namespace {

constexpr std::int64_t kMostRows = std::int64_t{1} << 24, kMostColumns = 65536, kMostIds = 1 << 24;

void require(const char* flag, std::int64_t value, std::int64_t least, std::int64_t most) {
  if (value >= least && value <= most) return;
  throw UsageError(std::string(flag) + " must be " + std::to_string(least) + " to " + std::to_string(most) +
                   ", not " + std::to_string(value));
}

}  // namespace

void add_embedding_options(CLI::App& verb, TypedEmbedding& typed) {
  const auto option = [&](const char* name, auto& value, const char* what) {
    CLI::Option* const added = verb.add_option(name, value, what)->group("embedding");
    typed.flags.push_back(added);
    return added;
  };
  option("--rows", typed.bench.rows, "of the table (default 32768)");
  option("--columns", typed.bench.columns, "of the table (default 64)");
  option("--tokens", typed.bench.tokens, "of a rank's batch (default 2560)");
  option("--zipf", typed.bench.zipf, "exponent of their distribution (default 1; 0: all rows alike)");
  option("--negatives", typed.bench.negatives, "ids beside them that all ranks read (default 0)");
  option("--ways", typed.ways, "names, with commas (default: all; weft info lists them)")->delimiter(',');
}

bool was_given(const TypedEmbedding& typed, const std::string& flag) {
  return std::ranges::any_of(typed.flags,
                             [&](const CLI::Option* f) { return f->get_name() == flag && f->count() > 0; });
}

void refuse_embedding_options(const TypedEmbedding& typed, const std::vector<std::string>& shared) {
  for (const CLI::Option* flag : typed.flags) {
    if (flag->count() > 0 && std::ranges::find(shared, flag->get_name()) == shared.end())
      throw UsageError(flag->get_name() + " is for bench embedding");
  }
}

EmbeddingBench checked(const TypedEmbedding& typed) {
  const EmbeddingBench& bench = typed.bench;
  require("--rows", bench.rows, 1, kMostRows);
  require("--columns", bench.columns, 1, kMostColumns);
  require("--tokens", bench.tokens, 1, kMostIds);
  require("--negatives", bench.negatives, 0, kMostIds);
  if (!(std::isfinite(bench.zipf) && bench.zipf >= 0 && bench.zipf <= 10))
    throw UsageError("--zipf must be 0 to 10, not " + CLI::detail::to_string(bench.zipf));
  return bench;
}

}  // namespace weft::cli
