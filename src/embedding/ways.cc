#include "embedding/ways.h"

#include <algorithm>
#include <array>

#include "base/names.h"
#include "weft/error.h"

namespace weft {

namespace {

using Kind = TableWay::Kind;

constexpr std::array kWays{
    TableWay{.name = "scheme", .summary = "gradients like all others, under --scheme", .kind = Kind::scheme},
    TableWay{
        .name = "dense", .summary = "every element all-reduced, apart from --scheme", .kind = Kind::dense},
    TableWay{.name = "push-pull",
             .summary = "every element, each rank the server of one block of them (BytePS)",
             .kind = Kind::dense,
             .all_reduce = "direct"},
    TableWay{.name = "allgather",
             .summary =
                 "every rank holds all of it; gradients of the rows that were read go to everybody, those "
                 "that all ranks have by an all-reduce",
             .cut = TableCut::none,
             .gather = TableGather::shared},
    TableWay{.name = "allgather-raw",
             .summary = "the same as frameworks do it: an id and a row for every token, duplicates included",
             .cut = TableCut::none,
             .gather = TableGather::tokens,
             .scheduling = "off"},
    TableWay{.name = "parallax",
             .summary = "rows on one server for four ranks, which update them and send what is read next",
             .cut = TableCut::rows,
             .ranks_per_owner = 4},
    TableWay{.name = "parallax-pushed",
             .summary =
                 "every rank holds all of it; servers update the rows that were pushed and send them to all",
             .cut = TableCut::pushed,
             .ranks_per_owner = 4,
             .scheduling = "off"},
    TableWay{.name = "hashed", .summary = "rows dealt to all ranks, each a server", .cut = TableCut::rows},
    TableWay{.name = "alltoall",
             .summary = "columns on all ranks; rows travel where they are used, in order",
             .scheduling = "off"},
    TableWay{.name = "embrace",
             .summary = "columns on all ranks; rows that are read next travel first, the others with slack",
             .scheduling = "two-sided"},
};

constexpr std::array<std::string_view, 5> kScheduling{"off", "horizontal", "vertical", "both", "two-sided"};

}  // namespace

std::span<const TableWay> table_ways() { return kWays; }

const TableWay& find_table_way(std::string_view name) {
  const auto found = std::ranges::find(kWays, name, &TableWay::name);
  if (found == kWays.end()) throw UsageError(unknown_name("way of tables", name, table_way_names()));
  return *found;
}

TableWays::TableWays(std::string_view text) : others_(&find_table_way("scheme")) {
  for (bool first = true;; first = false) {
    const std::size_t end = std::min(text.find('/'), text.size());
    const std::string_view part = text.substr(0, end);
    const std::size_t equals = part.find('=');
    if (equals != std::string_view::npos) {
      std::string name(part.substr(0, equals));
      if (std::ranges::find(names_, name) != names_.end())
        throw UsageError("tables: '" + name + "' has two ways");
      names_.push_back(std::move(name));
      ways_.push_back(&find_table_way(part.substr(equals + 1)));
    } else if (first) {
      others_ = &find_table_way(part);
    } else {
      throw UsageError("tables: '" + std::string(part) + "' is no TABLE=WAY, as in embrace/output=dense");
    }
    if (end == text.size()) return;
    text.remove_prefix(end + 1);
  }
}

const TableWay& TableWays::of(std::string_view table) const {
  const auto found = std::ranges::find(names_, table);
  return found == names_.end() ? *others_ : *ways_[static_cast<std::size_t>(found - names_.begin())];
}

std::vector<const TableWay*> TableWays::all() const {
  std::vector<const TableWay*> out{others_};
  for (const TableWay* way : ways_) {
    if (std::ranges::find(out, way) == out.end()) out.push_back(way);
  }
  return out;
}

bool TableWays::any(Kind kind) const {
  return std::ranges::any_of(all(), [&](const TableWay* way) { return way->kind == kind; });
}

void TableWays::check_saved() const {
  for (const TableWay* way : all()) {
    if (!way->keeps_state())
      throw UsageError("tables of way '" + std::string(way->name) +
                       "' are dealt by rows, for comparisons, and not saved: --checkpoint-every 0");
  }
}

std::vector<std::string_view> table_way_names() {
  std::vector<std::string_view> out;
  out.reserve(kWays.size());
  for (const TableWay& way : kWays) out.push_back(way.name);
  return out;
}

std::vector<std::string_view> table_scheduling_names() { return {kScheduling.begin(), kScheduling.end()}; }

void check_tables(const TablesOptions& o) {
  const bool hybrid = TableWays(o.way).any(Kind::hybrid);
  if (!o.scheduling.empty() && std::ranges::find(kScheduling, o.scheduling) == kScheduling.end())
    throw UsageError(unknown_name("scheduling of tables", o.scheduling, table_scheduling_names()));
  if (!hybrid && !o.scheduling.empty())
    throw UsageError("tables of way '" + o.way +
                     "' are gradients like others: they have no scheduling of their own");
  if (!(o.split_below >= 0 && o.split_below <= 1))
    throw UsageError("tables-split-below must be 0 to 1, not " + std::to_string(o.split_below));
}

HybridOptions hybrid_options(const TableWay& way, const TablesOptions& o, int size) {
  HybridOptions out;
  out.way = way.name;
  out.cut = way.cut;
  out.gather = way.gather;
  out.owners = (size + way.ranks_per_owner - 1) / way.ranks_per_owner;
  const std::string_view scheduling = o.scheduling.empty() ? way.scheduling : std::string_view(o.scheduling);
  out.two_sided = scheduling == "two-sided";
  const bool both = out.two_sided || scheduling == "both";
  out.horizontal = both || scheduling == "horizontal";
  out.vertical = both || scheduling == "vertical";
  out.split_below = o.split_below;
  return out;
}

}  // namespace weft
