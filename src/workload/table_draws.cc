#include "workload/table_draws.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include "weft/random.h"

namespace weft {

namespace {

std::vector<double> cumulative_of(std::int64_t rows, double zipf) {
  std::vector<double> out(static_cast<std::size_t>(rows));
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = sum += std::pow(static_cast<double>(i + 1), -zipf);
  for (double& c : out) c /= sum;
  return out;
}

// Rows that so many draws are expected to hit.
double expected_rows(const std::vector<double>& cumulative, double draws) {
  double rows = 0, before = 0;
  for (const double c : cumulative) {
    rows += -std::expm1(draws * std::log1p(-std::min(c - before, 1 - 1e-16)));
    before = c;
  }
  return rows;
}

std::int64_t distinct(std::span<const std::int64_t> ids) {
  return static_cast<std::int64_t>(std::unordered_set<std::int64_t>(ids.begin(), ids.end()).size());
}

constexpr std::uint32_t kPurpose = 0x6964'7300u;  // "ids"
constexpr std::uint32_t kShared = 0xffff'ffffu;   // in place of a rank

}  // namespace

void describe_lookups(OutlineTable& table, std::span<const std::int64_t> ids, std::int64_t shared) {
  const std::span<const std::int64_t> own = ids.first(ids.size() - static_cast<std::size_t>(shared));
  table.lookups_per_step = static_cast<std::int64_t>(own.size());
  table.shared_per_step = shared;
  table.rows_per_step = static_cast<double>(distinct(ids));
  const auto seen = static_cast<double>(distinct(own));
  // The larger the exponent, the fewer rows.
  double low = 0, high = 4;
  for (int i = 0; i < 24 && !own.empty(); ++i) {
    const double middle = (low + high) / 2;
    const bool more =
        expected_rows(cumulative_of(table.rows, middle), static_cast<double>(own.size())) > seen;
    (more ? low : high) = middle;
  }
  table.zipf = own.empty() ? 1 : (low + high) / 2;
}

void assume_lookups(OutlineTable& table, std::int64_t own, std::int64_t shared) {
  table.lookups_per_step = own;
  table.shared_per_step = shared;
  table.zipf = 1;
  const auto draws = static_cast<double>(own + shared);
  table.rows_per_step = expected_rows(cumulative_of(table.rows, 1), draws);
}

TableDraws::TableDraws(const OutlineTable& table)
    : purpose_(kPurpose),
      rows_(table.rows),
      own_(table.lookups_per_step),
      shared_(table.shared_per_step),
      cumulative_(cumulative_of(table.rows, table.zipf)) {
  for (const char c : table.name) purpose_ = (purpose_ ^ static_cast<unsigned char>(c)) * 0x0100'0193u;
}

std::vector<std::int64_t> TableDraws::ids(std::uint64_t seed, int rank, std::int64_t step) const {
  std::vector<std::int64_t> out;
  out.reserve(static_cast<std::size_t>(own_ + shared_));
  Random mine(seed, purpose_, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(step));
  for (std::int64_t i = 0; i < own_; ++i)
    out.push_back(std::upper_bound(cumulative_.begin(), cumulative_.end() - 1, mine.uniform()) -
                  cumulative_.begin());
  Random all(seed, purpose_, kShared, static_cast<std::uint32_t>(step));
  const double range = std::log(static_cast<double>(rows_) + 1);
  for (std::int64_t i = 0; i < shared_; ++i) {
    const auto drawn = static_cast<std::int64_t>(std::exp(all.uniform() * range)) - 1;
    out.push_back(std::clamp<std::int64_t>(drawn, 0, rows_ - 1));
  }
  return out;
}

}  // namespace weft
