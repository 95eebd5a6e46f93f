#include "state/rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/names.h"
#include "weft/error.h"
#include "wire/safetensors_header.h"

namespace weft {

namespace {

constexpr std::string_view kRules[] = {"sum", "same", "restart", "moves"};

bool is_word(std::string_view text) {
  const auto fits = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
  };
  return !text.empty() && std::all_of(text.begin(), text.end(), fits);
}

template <class T>
bool finite(std::span<const std::byte> values) {
  const std::span<const T> all(reinterpret_cast<const T*>(values.data()), values.size() / sizeof(T));
  return std::all_of(all.begin(), all.end(), [](T v) { return std::isfinite(v); });
}

std::string number(std::int64_t n) { return std::to_string(n); }

}  // namespace

std::string_view name_of(LayoutRule rule) { return kRules[static_cast<std::size_t>(rule)]; }

LayoutRule layout_rule_of(std::string_view name) {
  const auto* const found = std::find(std::begin(kRules), std::end(kRules), name);
  if (found == std::end(kRules)) throw UsageError(unknown_name("rule of a row", name, kRules));
  return static_cast<LayoutRule>(found - std::begin(kRules));
}

std::string describe(const StateKey& key) {
  return "the " + key.kind + " of " + wire::safetensors::printable(key.name);
}

std::string trouble_with(const StateRow& row) {
  if (!is_word(row.key.owner) || !is_word(row.key.kind))
    return wire::safetensors::printable(row.key.owner + " " + row.key.kind) +
           " cannot be the owner and kind of a row";
  if (row.key.name.empty() || row.key.name.find('\n') != std::string::npos)
    return wire::safetensors::printable(row.key.name) + " cannot be the name of a row";
  const std::string what = describe(row.key);
  if (row.dtype != DType::float32 && row.dtype != DType::float64 && row.dtype != DType::int64)
    return what + " is of " + std::string(name_of(row.dtype)) + ", not float32, float64 or int64";
  if (row.rule == LayoutRule::sum && row.dtype == DType::int64) return what + " is a sum of whole numbers";
  if (row.peers.size < 1 || row.peers.rank < 0 || row.peers.rank >= row.peers.size) {
    return what + " is of peer " + number(row.peers.rank) + " of " + number(row.peers.size);
  }
  if (!(row.divisor >= 0) || !std::isfinite(row.divisor))
    return what + " has a divisor that is no such number";
  if (const std::string why = trouble_with(row.shard); !why.empty()) return what + ": " + why;
  const bool cut = row.rule == LayoutRule::sum || row.rule == LayoutRule::moves;
  if (!cut && !row.shard.is_whole())
    return what + " is " + text_of(row.shard) + ": with its rule it is never cut";
  return "";
}

std::string RowsOfRank::trouble_with(const StateRow& row) {
  if (std::string why = weft::trouble_with(row); !why.empty()) return why;
  std::vector<const StateRow*>& twins = seen_[row.key];
  for (const StateRow* twin : twins) {
    const bool one_tensor =
        row.shard.shape == twin->shard.shape && row.dtype == twin->dtype && row.rule == twin->rule;
    if (!one_tensor || row.shard == twin->shard || common_elements(row.shard, twin->shard) > 0)
      return describe(row.key) + " is there twice";
  }
  twins.push_back(&row);
  return "";
}

bool all_finite(DType dtype, std::span<const std::byte> values) {
  if (dtype == DType::float32) return finite<float>(values);
  return dtype != DType::float64 || finite<double>(values);
}

const StateValue* StateSnapshot::find(std::string_view kind, std::string_view name) const {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const StateValue& v) {
    return v.row.key.kind == kind && v.row.key.name == name;
  });
  return found == rows.end() ? nullptr : &*found;
}
StateValue* StateSnapshot::find(std::string_view kind, std::string_view name) {
  return const_cast<StateValue*>(std::as_const(*this).find(kind, name));
}

RowsByKey by_key(const StateSource& source) {
  RowsByKey out;
  for (std::size_t i = 0; i < source.rows().size(); ++i) out[source.rows()[i].row.key].push_back(i);
  return out;
}

SnapshotSource::SnapshotSource(std::span<const StateSnapshot> snapshots, int rank, int size) {
  if (snapshots.empty() || size < 1) throw UsageError("state: there are no snapshots, or no ranks");
  const bool alone = snapshots.size() == 1 && snapshots[0].rank == rank && snapshots[0].size == size;
  std::vector<const StateSnapshot*> in_order(snapshots.size());
  for (const StateSnapshot& s : snapshots) {
    if (alone) {
      in_order[0] = &s;
      break;
    }
    if (s.size != static_cast<int>(snapshots.size())) {
      throw UsageError("state: rank " + number(s.rank) + "'s snapshot is of " + number(s.size) +
                       " ranks and comes with " + number(static_cast<std::int64_t>(snapshots.size())) +
                       "; rank " + number(rank) + " of " + number(size) +
                       " goes on from its own, or from those of all ranks");
    }
    if (s.rank < 0 || s.rank >= s.size || in_order[static_cast<std::size_t>(s.rank)] != nullptr) {
      throw UsageError("state: rank " + number(s.rank) + " of " + number(s.size) +
                       " is there twice or never was");
    }
    in_order[static_cast<std::size_t>(s.rank)] = &s;
  }
  // Of what several ranks may have: by key, and by the part of a tensor that they hold.
  std::map<std::pair<StateKey, std::string>, std::pair<const StateValue*, int>> first_of;
  for (const StateSnapshot* s : in_order) {
    RowsOfRank mine;
    for (const StateValue& v : s->rows) {
      if (const std::string why = mine.trouble_with(v.row); !why.empty())
        throw UsageError("state: in rank " + number(s->rank) + "'s snapshot " + why);
      if (!v.bytes.empty() && v.bytes.size() != v.row.num_bytes()) {
        throw UsageError("state: " + describe(v.row.key) + " on rank " + number(s->rank) + " has " +
                         number(static_cast<std::int64_t>(v.bytes.size() / size_of(v.row.dtype))) +
                         " elements, not " + number(v.row.shard.num_elements()));
      }
      rows_.push_back({v.row, v.bytes.empty()});
      values_.push_back(&v);
      if (!one_is_enough(v.row.rule)) continue;
      const std::string part = v.row.rule == LayoutRule::moves ? text_of(v.row.shard) : "";
      const auto [found, fresh] = first_of.try_emplace({v.row.key, part}, &v, s->rank);
      const StateValue& other = *found->second.first;
      if (fresh ||
          (v.row.shard == other.row.shard && v.row.dtype == other.row.dtype && v.bytes == other.bytes))
        continue;
      throw UsageError("state: rank " + number(s->rank) + "'s snapshot has another value than rank " +
                       number(found->second.second) + "'s for " + describe(v.row.key));
    }
  }
}

void SnapshotSource::read(std::size_t row, std::size_t first, std::span<std::byte> into) const {
  if (!into.empty()) std::memcpy(into.data(), values_[row]->bytes.data() + first, into.size());
}

}  // namespace weft
