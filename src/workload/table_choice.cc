#include "workload/table_choice.h"

#include <algorithm>

#include "embedding/ways.h"
#include "state/optimizer.h"
#include "weft/error.h"
#include "workload/table_draws.h"

namespace weft {

namespace {

constexpr int kMostRanks = 64;  // whose ids are drawn

std::vector<std::int64_t> list_of(std::vector<std::int64_t> ids) {
  std::ranges::sort(ids);
  ids.erase(std::ranges::unique(ids).begin(), ids.end());
  return ids;
}

// Why rows of an optimizer cannot be updated apart from the others; empty: they can.
std::string trouble_of(const OptimizerOptions& optimizer) {
  try {
    validate_rows(optimizer);
  } catch (const UsageError& e) {
    return e.what();
  }
  return {};
}

// Whether a row without a gradient stays as it is under the rule of all rows, too: then all ways train alike.
bool rows_alone(const OptimizerOptions& o) {
  return (o.name == "sgd" || o.name == "adagrad") && o.momentum == 0 && o.weight_decay == 0;
}

}  // namespace

TableFigures table_figures(const OutlineTable& table, int ranks, std::uint64_t seed) {
  TableFigures out{.rows = table.rows, .columns = table.width, .size = ranks};
  out.tokens = static_cast<double>(table.lookups_per_step + table.shared_per_step);
  if (out.tokens == 0) return out;
  const TableDraws draws(table);
  const int drawn = std::min(ranks, kMostRanks);
  std::vector<int> lists(static_cast<std::size_t>(table.rows));         // that have the row
  std::vector<bool> next(static_cast<std::size_t>(table.rows), false);  // some rank's next batch reads it
  for (int rank = 0; rank < drawn; ++rank) {
    for (const std::int64_t row : list_of(draws.ids(seed, rank, 0))) ++lists[static_cast<std::size_t>(row)];
    for (const std::int64_t row : draws.ids(seed, rank, 1)) next[static_cast<std::size_t>(row)] = true;
  }
  double all = 0, prior = 0;
  for (std::size_t row = 0; row < lists.size(); ++row) {
    all += lists[row];
    prior += next[row] ? lists[row] : 0;
    out.shared_rows += lists[row] == drawn ? 1 : 0;
  }
  out.unique_ratio = all / drawn / out.tokens;
  out.prior_share = prior / all;
  return out;
}

TablesChoice choose_tables(const Outline& outline, TablesOptions given, const OptimizerOptions& optimizer,
                           int ranks, std::uint64_t seed, const LinkCost& link) {
  TablesChoice out{.tables = std::move(given), .rows = {}};
  const std::string none = TablesOptions{}.way;
  const std::string trouble = trouble_of(optimizer);
  const ModelShape shape = shape_of(outline);
  std::vector<std::string_view> allowed{"embrace", "allgather"};
  if (rows_alone(optimizer)) allowed.push_back("dense");
  for (const OutlineTable& table : outline.tables) {
    const auto parameter = std::ranges::find(shape.parameters, table.name, &ParameterShape::name);
    if (parameter == shape.parameters.end() || !parameter->table)
      continue;  // its rows alone do not say it all
    if (!trouble.empty()) {
      out.rows.push_back({table.name, none, trouble});
      continue;
    }
    const TableChoice choice = choose_table_way(table_figures(table, ranks, seed), link, allowed);
    out.rows.push_back({table.name, choice.way, choice.why});
  }
  const auto same = [&](const TablesChoice::Of& row) { return row.way == out.rows.front().way; };
  out.tables.way = none;
  if (!out.rows.empty() && std::ranges::all_of(out.rows, same)) {
    out.tables.way = out.rows.front().way;
  } else {
    for (const TablesChoice::Of& row : out.rows) out.tables.way += "/" + row.table + "=" + row.way;
  }
  if (!TableWays(out.tables.way).any(TableWay::Kind::hybrid)) out.tables.scheduling.clear();
  return out;
}

std::string TablesChoice::why() const {
  if (rows.empty()) return "the model has no table, there is nothing to choose";
  std::string out;
  for (const Of& row : rows)
    out += (out.empty() ? "" : "; ") + row.table + " " + row.way + ", because " + row.why;
  return out;
}

}  // namespace weft
